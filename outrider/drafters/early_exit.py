"""Drafting with a part of the target itself: early exit, or layers left out (Zhang et al. 2024, Draft & Verify; Elhoushi et al. 2024,
LayerSkip).

The part shares the target's cache. It reads the keys and values of verified tokens, which passes through all layers made, and writes those
of its own guesses behind them. These are dropped at the end of every draft: the pass that verifies the guesses computes
all layers of them anew. (LayerSkip keeps the first layers' work for that pass; here nothing of a guess survives.)

Which layers to leave out is found by a short search, unless it is said.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any, Sequence

import torch

from ..errors import LoadError, OutriderWarning, ParameterError
from ..sampling import Sampler
from ..targets.base import Output, Slot, Target
from ..tree import DraftTree
from .base import Drafter, State, Work
from .growth import Growth, TreeOptions
from .model import Draft, grow

TEXT = """The old harbour had been quiet for years when the ferry company announced that it would come back. "We expect the first boats
in spring," the director said on Monday, "and about four hundred passengers a day by the end of the year." Not everybody was pleased.

def moving_average(values: list[float], size: int) -> list[float]:
    if size < 1:
        raise ValueError("size must be at least 1")
    return [sum(values[i : i + size]) / size for i in range(len(values) - size + 1)]

1. Preheat the oven to 180 degrees. 2. Mix the flour, the sugar and a pinch of salt. 3. Add the eggs one by one and stir until smooth."""
"""What the search compares on, where no other text is given: a little prose, code and a list."""
ROWS = 96
"""Most tokens of the text that it looks at."""
TRIED = 4
"""Layers that are tried at each step of the search."""
LONGEST = 8
"""The longest draft that a set of layers is judged by."""


@dataclass(frozen=True)
class EarlyExitOptions(TreeOptions):
    """upto: run only so many of the target's layers. skip: leave these out, by number from 0. With neither, a short search finds the
    layers to leave out, on `text` or on a text of its own. The others say how drafts grow: `TreeOptions`.
    """

    upto: int | None = None
    skip: tuple[int, ...] | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text is not None and (self.upto is not None or self.skip is not None):
            raise ParameterError("option text is for the search; with upto or skip there is none")


@dataclass(frozen=True)
class Part:
    """The target without some of its layers."""

    target: Target
    left_out: tuple[int, ...]

    def forward(self, work: Sequence[tuple[Slot, DraftTree]]) -> list[Output]:
        return self.target.forward(work, skip=self.left_out)

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        self.target.commit(slot, path)


class EarlyExitDrafter(Drafter):
    """Chains and trees from a part of the target."""

    name = "early-exit"
    Options = EarlyExitOptions
    options: EarlyExitOptions

    def __init__(self, target: Target, left_out: Sequence[int], options: EarlyExitOptions | None = None):
        super().__init__(options)
        self.part = Part(target, tuple(sorted(left_out)))
        self.cost = cost(target, len(self.part.left_out))
        self.least = min(self.cost, 0.5)
        self.searched: dict[str, Any] = {}

    @classmethod
    def load(cls, target: Target, options: Any, source: str | None = None, **loading: Any) -> EarlyExitDrafter:
        if options.upto is None and options.skip is None:
            return cls._searched(target, options)
        upto = target.n_layers if options.upto is None else options.upto
        left_out = {*(options.skip or ()), *range(upto, target.n_layers)}
        if not 1 <= upto <= target.n_layers or any(not 0 <= k < target.n_layers for k in left_out):
            raise ParameterError(f"options upto and skip must name layers of {target.name}: 0 to {target.n_layers - 1}")
        if not 0 < len(left_out) < target.n_layers:
            raise ParameterError("options upto and skip must leave out some layers, and not all")
        drafter = cls(target, tuple(left_out), options)
        slot = target.open()
        try:
            drafter.part.forward([(slot, DraftTree.chain(0))])  # a target that cannot leave out layers says so now
            drafter.part.commit(slot, [])
        finally:
            target.close(slot)
        return drafter

    @classmethod
    def _searched(cls, target: Target, options: EarlyExitOptions) -> EarlyExitDrafter:
        if target.tokenizer is None:
            raise ParameterError(
                "the search for layers to leave out needs a tokenizer; give the layers: -o skip=... or -o upto=..."
            )
        began = time.perf_counter()
        found = search(target, target.tokenizer.encode(options.text or TEXT)[: min(ROWS, target.context_length)])
        numbers = ",".join(map(str, found.left_out))
        verdict = "" if found.speed > 1 else "; no part of this model is likely to pay"
        warnings.warn(
            f"found layers to leave out in {time.perf_counter() - began:.1f} s: with -o skip={numbers} that need not be done again "
            f"(agreement {found.agreement:.0%}, a draft step costs {found.cost:.0%} of a pass, predicted speed {found.speed:.2f}x{verdict})",
            OutriderWarning,
            stacklevel=4,
        )
        drafter = cls(target, found.left_out, options)
        drafter.searched = {"agreement": round(found.agreement, 3), "predicted speed": round(found.speed, 3)}
        return drafter

    def describe(self) -> dict[str, Any]:
        target, left_out = self.part.target, self.part.left_out
        return {
            "dialect": "a part of the target itself",
            "runs": f"{target.n_layers - len(left_out)} of {target.n_layers} layers",
            "left out": list(left_out),
            "a draft step costs": f"{self.cost:.0%} of a pass, by parameters",
            **self.searched,
        }

    def open(self, sampler: Sampler) -> State:
        return State(sampler)

    def propose(self, work: Work) -> list[DraftTree]:
        growths = [Growth(ask.state.sampler, ask.tokens[-1], ask.budget, self.options, self.least) for ask in work]
        drafts: list[tuple[Draft, int]] = []
        for ask, growth in zip(work, growths):
            if ask.slot is None or ask.slot.length != len(ask.tokens) - 1:
                growth.frontier = []  # nothing to read on from
            else:
                drafts.append((Draft(growth, ask.slot, [], []), ask.slot.length))
        try:
            self.steps = grow(self.part, [draft for draft, _ in drafts])
        finally:
            for draft, length in drafts:
                self.part.target.truncate(draft.slot, length)
        return [growth.tree() for growth in growths]


# ---- the search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A set of layers to leave out. agreement: share of positions where the rest says the target's own token. cost: of a draft step, as
    a share of a pass. speed: tokens per time against plain decoding, with the best draft length, from these two.
    """

    left_out: tuple[int, ...]
    agreement: float
    cost: float
    speed: float


def cost(target: Target, left_out: int) -> float:
    """What a pass with so many layers left out costs, as a share of a whole one: the parameters that it reads."""
    if not target.n_parameters:
        return 1 - left_out / target.n_layers
    head = target.vocab_size * target.hidden_size
    layers = max(target.n_parameters - head, 1)
    return 1 - left_out / target.n_layers * layers / (layers + head)


def predicted_speed(agreement: float, cost: float) -> float:
    """Tokens per time of drafts that are kept with this probability each, of the best length (Leviathan et al. 2023, theorem 3.8)."""
    return max((sum(agreement**i for i in range(n + 1))) / (1 + n * cost) for n in range(1, LONGEST + 1))


def search(target: Target, tokens: Sequence[int]) -> Judged:
    """The layers to leave out: every early exit, then layers taken out one after the other, those first that change the least.

    tokens: of a calibration text. At each step the `TRIED` layers are tried that did the least harm so far. Its work: about
    ``n_layers * (2 + TRIED / 2)`` partial passes over the text. Raises LoadError for a model of one layer.
    """
    if target.n_layers < 2:
        raise LoadError(f"{target.name} has a single layer: no part of it can draft")
    judge = _Judge(target, tokens)
    try:
        return _search(target, judge)
    finally:
        judge.close()


def _search(target: Target, judge: _Judge) -> Judged:
    every = range(target.n_layers)
    exits = [judge(range(upto, target.n_layers)) for upto in range(1, target.n_layers)]
    harmless = sorted((judge([layer]) for layer in every), key=lambda found: -found.agreement)
    best = max([*exits, *harmless], key=lambda found: found.speed)
    current = harmless[0]
    order = [found.left_out[0] for found in harmless]
    for _ in range(target.n_layers // 2):
        candidates = [layer for layer in order if layer not in current.left_out][:TRIED]
        if len(current.left_out) + 1 >= target.n_layers or not candidates:
            break
        tried = {layer: judge([*current.left_out, layer]) for layer in candidates}
        current = max(tried.values(), key=lambda found: found.agreement)
        order = sorted(tried, key=lambda layer: -tried[layer].agreement) + [layer for layer in order if layer not in tried]
        best = max(best, current, key=lambda found: found.speed)
    return best


class _Judge:
    """Compares parts of the target with the whole on one text, in a pass each."""

    def __init__(self, target: Target, tokens: Sequence[int]):
        if len(tokens) < 2:
            raise ParameterError("the search for layers to leave out needs a text of two tokens or more")
        self.target = target
        self.tree = DraftTree.chain(tokens[0], tokens[1:])
        self.slot = target.open()
        self.wanted = self._said(())

    def _said(self, left_out: Sequence[int]) -> torch.Tensor:
        (output,) = self.target.forward([(self.slot, self.tree)], skip=tuple(left_out))
        self.target.commit(self.slot, [])
        assert output.logits is not None
        return output.logits.argmax(dim=-1)

    def __call__(self, left_out: Sequence[int]) -> Judged:
        agreement = float((self._said(left_out) == self.wanted).float().mean())
        share = cost(self.target, len(left_out))
        return Judged(tuple(sorted(left_out)), agreement, share, predicted_speed(agreement, share))

    def close(self) -> None:
        self.target.close(self.slot)
