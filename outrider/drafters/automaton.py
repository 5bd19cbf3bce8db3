"""A suffix automaton that grows with its text (Blumer et al. 1985), with counts and the order of recency."""

from __future__ import annotations

Token = int | None
"""None may stand for a border: a mark that occurs once."""

WALK = 16
"""Contexts that a token is counted for, the longest ones. Ordinary text repeats fewer; text that is all one token repeats as
many as it has tokens, and counting for each of them would take quadratic time."""


class Automaton:
    """All substrings of a growing text. A state is a set of substrings that end at the same places.

    For each state: `length` of its longest substring; `link`, the state of that one's longest suffix that ends at more places;
    `after`, the states reached by one token more, the most recent last; `count` of its places. At most 2n states and 3n
    transitions for n tokens. State 0 is the empty substring, state `last` the whole text.
    """

    def __init__(self) -> None:
        self.length = [0]
        self.link = [-1]
        self.after: list[dict[Token, int]] = [{}]
        self.count = [0]
        self.last = 0

    @property
    def repeated(self) -> int:
        """The state of the longest suffix of the text that also occurs earlier; 0 when there is none."""
        return max(self.link[self.last], 0)

    def append(self, token: Token) -> None:
        length, link, after, count = self.length, self.link, self.after, self.count
        state = self.repeated
        for _ in range(WALK):
            if state <= 0:
                break
            known = after[state]
            if token in known:
                known[token] = known.pop(token)  # the most recent is last
            state = link[state]

        new = self._state(length[self.last] + 1, {}, 0)
        state, self.last = self.last, new
        while state >= 0 and token not in after[state]:
            after[state][token] = new
            state = link[state]
        if state >= 0:
            found = after[state][token]
            if length[found] == length[state] + 1:
                link[new] = found
            else:  # of the substrings in `found`, only the shorter ones end here too: they get a state of their own
                clone = self._state(length[state] + 1, dict(after[found]), count[found])
                link[clone] = link[found]
                link[found] = link[new] = clone
                while state >= 0 and after[state].get(token) == found:
                    after[state][token] = clone
                    state = link[state]

        state = new
        for _ in range(WALK):
            if state <= 0:
                break
            count[state] += 1
            state = link[state]

    def _state(self, length: int, after: dict[Token, int], count: int) -> int:
        self.length.append(length)
        self.link.append(0)
        self.after.append(after)
        self.count.append(count)
        return len(self.length) - 1
