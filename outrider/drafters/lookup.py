"""Copies what followed the last few tokens when they last occurred, in the prompt or in the output.

Source: prompt lookup decoding (Saxena 2023). Differs in that the latest occurrence wins instead of the first, that it is
found in an index instead of by a scan, and that a copy may run on into itself, so that it keeps up a repetition.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Sequence

from ..errors import ParameterError
from ..sampling import Sampler
from ..tree import Budget, DraftTree
from .base import Drafter, Options, State, Work


@dataclass(frozen=True)
class LookupOptions(Options):
    """max_ngram, min_ngram: longest and shortest run of last tokens that is looked for. max_length: most drafted tokens."""

    max_ngram: int = 4
    min_ngram: int = 1
    max_length: int = 10

    def __post_init__(self) -> None:
        for name in ("max_ngram", "min_ngram", "max_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ParameterError(f"option {name} must be a whole number, 1 or more; got {value!r}")
        if self.max_ngram > 32:
            raise ParameterError(f"option max_ngram must be at most 32; got {self.max_ngram}")
        if self.min_ngram > self.max_ngram:
            raise ParameterError(f"option min_ngram ({self.min_ngram}) must not exceed max_ngram ({self.max_ngram})")


class IndexState(State):
    """A state that indexes its sequence's tokens one by one. Subclasses say how, in `start` and `add`."""

    def __init__(self, sampler: Sampler):
        super().__init__(sampler)
        self.restart()

    @abstractmethod
    def start(self) -> None:
        """An empty index."""

    @abstractmethod
    def add(self, token: int) -> None:
        """Index `token`, which comes after `self.tokens`."""

    def restart(self) -> None:
        """Forget every token."""
        self.tokens: list[int] = []
        self._source: Sequence[int] | None = None
        self.start()

    def truncate(self, length: int) -> None:
        self._source = None  # what is still right is found out when the tokens are next seen

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Index what is new in `tokens`, or all of it where something changed that had been indexed.

        A list that only grew since the last call is not compared again.
        """
        known = len(self.tokens)
        if tokens is not self._source or len(tokens) < known:
            if list(tokens[:known]) != self.tokens:
                self.restart()
                known = 0
            self._source = tokens
        for token in tokens[known:]:
            self.add(token)
            self.tokens.append(token)


class LookupState(IndexState):
    """For each n-gram with a successor, the place of that successor; the latest wins."""

    def __init__(self, sampler: Sampler, options: LookupOptions):
        self._sizes = range(options.max_ngram, options.min_ngram - 1, -1)
        super().__init__(sampler)

    def fork(self, sampler: Sampler) -> LookupState:
        return LookupState(sampler, LookupOptions(max_ngram=self._sizes[0], min_ngram=self._sizes[-1]))

    def start(self) -> None:
        self._place: dict[tuple[int, ...], int] = {}

    def add(self, token: int) -> None:
        for ngram in self._last():
            self._place[ngram] = len(self.tokens)

    def find(self) -> tuple[int, int] | None:
        """The place of what followed the longest known n-gram that the text ends with, and its length."""
        return next(((self._place[ngram], len(ngram)) for ngram in self._last() if ngram in self._place), None)

    def _last(self) -> list[tuple[int, ...]]:
        """The n-grams at the end of the text, the longest first."""
        return [tuple(self.tokens[-n:]) for n in self._sizes if n <= len(self.tokens)]


class LookupDrafter(Drafter):
    """Point-mass chains copied from earlier text."""

    name = "lookup"
    Options = LookupOptions
    options: LookupOptions

    def open(self, sampler: Sampler) -> LookupState:
        return LookupState(sampler, self.options)

    def propose(self, work: Work) -> list[DraftTree]:
        return [self._draft(ask.state, ask.tokens, ask.budget) for ask in work]

    def _draft(self, state: State, tokens: Sequence[int], budget: Budget) -> DraftTree:
        assert isinstance(state, LookupState)
        state.catch_up(tokens)
        drafts: list[int] = []
        if (found := state.find()) is None:
            return DraftTree.chain(tokens[-1])
        place, match = found
        for at in range(place, place + min(budget.nodes, budget.depth, self.options.max_length)):
            drafts.append(tokens[at] if at < len(tokens) else drafts[at - len(tokens)])
        score = [(match + k) / (match + k + 1) for k in range(len(drafts))]  # the more agrees, the more likely; a rough guess
        return DraftTree.chain(tokens[-1], drafts, score=score)
