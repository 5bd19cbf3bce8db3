"""Follows a text that the caller expects in the output, and finds its place again after a difference.

Source: "predicted outputs" of the OpenAI API; how the place is found again is our own. A pointer stands at the expected
token that should come next. While the output agrees, the pointer moves with it and what follows it is drafted. After
a difference the longest run of last output tokens that the expected text has, too, says where to go on: at its nearest
occurrence after the last sure place, else, for more than one token, at the last one before it. Where none is found, the new
token is taken to replace the expected one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from ..errors import ParameterError
from ..sampling import Sampler
from ..tree import Budget, DraftTree
from .base import Drafter, Options, State, Work

SURE = 2
"""So many agreeing tokens make a place sure."""
LOST = 8
"""After so many tokens in a row that agree with nothing, nothing is drafted until a place is found."""
MIN_PROBABILITY = 0.1


@dataclass(frozen=True)
class PredictionOptions(Options):
    """text, file: the expected text, or a UTF-8 file that has it, for requests that bring no prediction of their own.
    max_match: longest run of last tokens that is looked for after a difference. min_probability: a token is drafted when it,
    with all before it, is at least this likely; by default 0.1, or what the round's price says. max_length: most drafted tokens.
    """

    text: str | None = None
    file: str | None = None
    max_match: int = 4
    min_probability: float | None = None
    max_length: int = 64

    def __post_init__(self) -> None:
        if self.text is not None and self.file is not None:
            raise ParameterError("give option text or option file, not both")
        if self.min_probability is not None and not 0 <= self.min_probability <= 1:
            raise ParameterError(f"option min_probability must be from 0 to 1; got {self.min_probability!r}")
        if not isinstance(self.max_match, int) or not SURE <= self.max_match <= 32:
            raise ParameterError(f"option max_match must be a whole number from {SURE} to 32; got {self.max_match!r}")
        if not isinstance(self.max_length, int) or self.max_length < 1:
            raise ParameterError(f"option max_length must be a whole number, 1 or more; got {self.max_length!r}")


class PredictionState(State):
    """The expected tokens, where each short run of them ends, and how far one sequence has followed them."""

    def __init__(self, sampler: Sampler, options: PredictionOptions):
        super().__init__(sampler)
        self._options = options
        self._indexed_for: Sampler | None = None
        self._index()

    def fork(self, sampler: Sampler) -> PredictionState:
        return PredictionState(sampler, self._options)

    def truncate(self, length: int) -> None:
        self._restart()

    def _index(self) -> None:
        self.expected = _expected_tokens(self.sampler, self._options)
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)  # run of tokens -> places right after it, ascending
        for end in range(1, len(self.expected) + 1):
            for size in range(1, min(self._options.max_match, end) + 1):
                self._ends[tuple(self.expected[end - size : end])].append(end)
        self._indexed_for = self.sampler
        self._restart()

    def _restart(self) -> None:
        self._known = 0
        self.pointer = 0  # place of the expected token that should come next
        self.agreed = 0  # tokens that agreed up to here, without a break
        self.strange = 0  # tokens since the last sure place
        self._sure = 0  # the pointer's last sure place

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Follow the output tokens that are new; the prompt says nothing about the place."""
        if self._indexed_for is not self.sampler:  # the next turn of a conversation, with its own prediction
            self._index()
        if len(tokens) < self._known:
            self._restart()
        prompt_length = self.sampler.position - self.sampler.emitted + 1
        for at in range(max(self._known, prompt_length), len(tokens)):
            self._follow(tokens[max(prompt_length, at + 1 - self._options.max_match) : at + 1])
        self._known = len(tokens)

    def _follow(self, last: Sequence[int]) -> None:
        """Move the pointer over the newest output token; `last` are up to max_match output tokens that end with it."""
        if self.pointer < len(self.expected) and self.expected[self.pointer] == last[-1]:
            self.pointer += 1
            self.agreed += 1
        else:
            self.pointer, self.agreed = self._find(last)
        if self.agreed >= SURE:
            self._sure, self.strange = self.pointer, 0
        else:
            self.strange += 1

    def _find(self, last: Sequence[int]) -> tuple[int, int]:
        """Where the expected text goes on after the last tokens, and how many of them agree there."""
        for size in range(len(last), 0, -1):
            ends = self._ends.get(tuple(last[-size:]))
            if ends is None:
                continue
            at = bisect_left(ends, self._sure + 1)
            if at < len(ends) or size >= SURE:
                return ends[min(at, len(ends) - 1)], size
        return min(self.pointer + 1, len(self.expected)), 0

    @property
    def lost(self) -> bool:
        return self.strange > LOST


class PredictionDrafter(Drafter):
    """Point-mass chains from the expected text."""

    name = "prediction"
    Options = PredictionOptions
    options: PredictionOptions
    takes_prediction = True

    def open(self, sampler: Sampler) -> PredictionState:
        return PredictionState(sampler, self.options)

    def propose(self, work: Work) -> list[DraftTree]:
        return [self._draft(ask.state, ask.tokens, ask.budget) for ask in work]

    def _draft(self, state: State, tokens: Sequence[int], budget: Budget) -> DraftTree:
        assert isinstance(state, PredictionState)
        state.catch_up(tokens)
        drafts: list[int] = []
        chances: list[float] = []
        path, least = 1.0, budget.least(self.options.min_probability, MIN_PROBABILITY)
        if not state.lost:
            length = min(budget.nodes, budget.depth, self.options.max_length)
            for depth, token in enumerate(state.expected[state.pointer : state.pointer + length]):
                chance = _chance(state.agreed + depth)
                path *= chance
                if path < least:
                    break
                drafts.append(token)
                chances.append(chance)
        return DraftTree.chain(tokens[-1], drafts, score=chances)


def _chance(agreed: int) -> float:
    """Of the next token to agree after so many that did: a rule of thumb, 1/2 at first and near 1 soon."""
    return 1 - 1 / (agreed + 2)


def _expected_tokens(sampler: Sampler, options: PredictionOptions) -> list[int]:
    text = sampler.params.prediction if sampler.params.prediction is not None else options.text
    if text is None and options.file is not None:
        try:
            text = Path(options.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(f"option file: {options.file!r} cannot be read as UTF-8 text: {error}") from error
    if text is None:
        raise ParameterError(
            "the drafter 'prediction' has no expected text: give the sampling parameter prediction, or -o text=... or -o file=PATH"
        )
    if sampler.tokenizer is None:
        raise ParameterError("the drafter 'prediction' needs a tokenizer, and this target has none")
    return sampler.tokenizer.encode_plain(text)
