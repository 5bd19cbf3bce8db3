"""Drafts what followed the longest repeated suffix of the text, by counts: a suffix automaton over all tokens so far.

Source: SuffixDecoding (Oliaro et al. 2024), with three differences. A suffix automaton built online (Blumer et al. 1985)
holds contexts of every length in linear space; the paper's tree is cut at a depth. The chance of a continuation is not the
bare ratio of counts but leaves room for what was not seen yet, as in PPM compression (method C, Moffat 1990), and less of it
the longer the context. That room is corrected, for each range of context lengths, by how often the output surprised the
drafter so far. All counts belong to one sequence; nothing passes from one to another.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Sequence

from ..errors import ParameterError
from ..sampling import Sampler
from ..tree import Budget, DraftTree, best_first
from .automaton import Automaton
from .base import Drafter, Options, State, Work
from .lookup import IndexState

FAN = 8
"""Continuations of a context that are looked at, the most recent ones."""
NOVELTY = [2.0 * max(match, 1) ** -1.2 for match in range(65)]
"""For a context of this many tokens, the weight of a continuation not seen yet, in occurrences; fitted to outputs of models."""
PRIOR = 4.0
"""Surprises that the correction starts from, with as many expected."""
MIN_PROBABILITY = 0.15

BORDER = None
"""Equals no token, so no context spans it."""


@dataclass(frozen=True)
class SuffixOptions(Options):
    """shape: chain, or tree (for accept rules that take trees). min_probability: a token is drafted when it, with all on the
    way to it, is at least this likely; by default 0.15, or what the round's price says. max_length: most drafted tokens on a path.
    min_match: shortest context to draft from.
    """

    shape: str = "chain"
    min_probability: float | None = None
    max_length: int = 64
    min_match: int = 1

    def __post_init__(self) -> None:
        if self.shape not in ("chain", "tree"):
            raise ParameterError(f"option shape must be chain or tree; got {self.shape!r}")
        if self.min_probability is not None and not 0 <= self.min_probability <= 1:
            raise ParameterError(f"option min_probability must be from 0 to 1; got {self.min_probability!r}")
        for name in ("max_length", "min_match"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ParameterError(f"option {name} must be a whole number, 1 or more; got {value!r}")


class Guess(NamedTuple):
    """A continuation, the state it leads to, how many tokens of context agree there, and its chance."""

    token: int
    state: int
    match: int
    chance: float


class SuffixState(IndexState):
    """The automaton of one sequence: the expected text if there is one, a border, and the sequence's tokens."""

    def start(self) -> None:
        self.automaton = Automaton()
        self.surprises = [PRIOR] * 64  # by the bit length of the context's length
        self.expected = [PRIOR] * 64
        self.prediction = self.sampler.params.prediction
        if self.prediction:
            if self.sampler.tokenizer is None:
                raise ParameterError("prediction needs a tokenizer, and this target has none")
            for token in (*self.sampler.tokenizer.encode_plain(self.prediction), BORDER):
                self.automaton.append(token)

    def catch_up(self, tokens: Sequence[int]) -> None:
        if self.prediction != self.sampler.params.prediction:  # the next turn of a conversation has its own
            self.restart()
        super().catch_up(tokens)

    def add(self, token: int) -> None:
        sampler = self.sampler
        if len(self.tokens) > sampler.position - sampler.emitted:  # output; a prompt's own repetitions say little about it
            self._learn(token)
        self.automaton.append(token)

    def _learn(self, token: int) -> None:
        state = self.automaton.repeated
        match = self.automaton.length[state]
        for guess in self._seen_after(state, match, True, 1) if state else ():
            self.surprises[match.bit_length()] += guess.token != token
            self.expected[match.bit_length()] += 1 - guess.chance

    def continuations(self, state: int, match: int, most: int) -> list[Guess]:
        """What may follow `state`, of whose longest substring the last `match` tokens agree; the likeliest first.

        Where nothing has followed it (it is the whole text), what followed its longest suffix that has a sequel.
        """
        automaton, at_end = self.automaton, False
        guesses: list[Guess] = []
        while state > 0 and not (guesses := self._seen_after(state, match, at_end, most)):
            at_end = at_end or state == automaton.last
            state = automaton.link[state]
            match = min(match, automaton.length[state])
        if not guesses:
            return []
        size = match.bit_length()
        surprise = 1 - guesses[0].chance
        corrected = min(surprise * self.surprises[size] / self.expected[size], 1.0)
        most_likely = 1 - corrected
        rest = corrected / surprise  # the runners-up share what the first leaves, but none overtakes it
        return [
            guess._replace(chance=min(guess.chance * rest, most_likely) if rank else most_likely)
            for rank, guess in enumerate(guesses)
        ]

    def _seen_after(self, state: int, match: int, at_end: bool, most: int) -> list[Guess]:
        """The most frequent of the recent continuations of a state, of equals the latest, with chances before correction.

        at_end: the end of the text, where nothing follows yet, is one of the state's places.
        """
        after, count = self.automaton.after[state], self.automaton.count
        latest = islice(reversed(after.items()), FAN)
        ranked = [(count[to], -age, token, to) for age, (token, to) in enumerate(latest) if token is not BORDER]
        if not ranked:
            return []
        ranked = [max(ranked)] if most == 1 else sorted(ranked, reverse=True)[:most]
        total = max(count[state] - at_end, ranked[0][0]) + len(after) - 1 + NOVELTY[min(match, len(NOVELTY) - 1)]
        return [Guess(token, to, match + 1, times / total) for times, _, token, to in ranked]


class SuffixDrafter(Drafter):
    """Point-mass chains or trees from a sequence's own repetitions."""

    name = "suffix"
    Options = SuffixOptions
    options: SuffixOptions
    takes_prediction = True

    def open(self, sampler: Sampler) -> SuffixState:
        return SuffixState(sampler)

    def propose(self, work: Work) -> list[DraftTree]:
        return [self._draft(ask.state, ask.tokens, ask.budget) for ask in work]

    def _draft(self, state: State, tokens: Sequence[int], budget: Budget) -> DraftTree:
        """Best first: of all that may follow what is drafted, the likeliest, until none is likely enough."""
        assert isinstance(state, SuffixState)
        state.catch_up(tokens)
        options, automaton = self.options, state.automaton
        most = 1 if options.shape == "chain" else FAN
        depth = min(options.max_length, budget.depth)
        if automaton.length[automaton.repeated] < options.min_match:
            depth = 0
        return best_first(
            Guess(tokens[-1], automaton.last, automaton.length[automaton.last], 1.0),
            lambda guess: state.continuations(guess.state, guess.match, most),
            budget.nodes,
            depth,
            budget.least(options.min_probability, MIN_PROBABILITY),
        )
