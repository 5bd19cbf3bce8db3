"""Predicted speed with and without speculation, the best plan, and the reason in words.

A round yields ``tokens per pass`` (`acceptance`, or a replayed trace) and takes a pass of the target over the draft's rows, the drafter's
passes, and the loop's own overhead. Speed = sequences x tokens / seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Sequence

from .acceptance import Acceptance, Draft
from .hardware import Device, Hardware
from .passes import Load, Pass, Placement, one_pass
from .placement import Fit, Tenant, check_given, everything, fit, place
from .shapes import Shape
from .unions import Unions

WORTH = 1.05
"""Least predicted gain that is called worth it."""


class Expected(Protocol):
    """What drafts yield: `Acceptance`, or a `Replay` of a trace."""

    def tokens(self, draft: Draft) -> float: ...

    def nodes(self, draft: Draft) -> float: ...


@dataclass(frozen=True)
class Drafter:
    """shape: a draft model (or head); None for drafters without one. seconds: of proposing a token beside the model's passes."""

    name: str
    shape: Shape | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Everything that a prediction depends on but the draft and the number of sequences."""

    target: Shape
    drafter: Drafter
    hardware: Hardware
    place: Placement
    drafter_on_gpu: bool
    context: int
    unions: Unions = field(default_factory=Unions)

    @property
    def drafter_place(self) -> Placement:
        shape = self.drafter.shape
        return everything(shape) if shape and self.drafter_on_gpu else Placement()

    @property
    def main(self) -> Device:
        """The device that the loop waits for."""
        device = (self.hardware.gpu if self.place.gpu_layers else None) or self.hardware.host or self.hardware.gpu
        assert device is not None
        return device

    def target_pass(self, rows: float, sequences: int) -> Pass:
        return one_pass(self.target, self.hardware, self.place, Load(rows, sequences, self.context), self.unions)

    def drafting(self, draft: Draft, sequences: int, nodes: float) -> float:
        """Seconds of proposing so many of the draft's nodes: one pass of the drafter for each level, over the nodes of the one above."""
        seconds, overheads = nodes * sequences * self.drafter.seconds, self.main.overheads
        shape = self.drafter.shape
        if shape is None:
            return seconds
        for level in [1, *draft.levels][: len(draft.widths)]:
            load = Load(level, sequences, self.context)
            seconds += one_pass(shape, self.hardware, self.drafter_place, load, self.unions).seconds
            seconds += sequences * (overheads.step + level * shape.vocabulary * overheads.logit)
        return seconds * nodes / draft.nodes

    def loop(self, rows: float, sequences: int) -> float:
        """Seconds of a round that are spent neither in a pass nor in drafting."""
        overheads = self.main.overheads
        return sequences * (overheads.turn + rows * self.target.vocabulary * overheads.logit)

    def fit(self, sequences: int, rows: int) -> Fit:
        tenants = [Tenant(self.target, self.place)]
        if self.drafter.shape:
            tenants.append(Tenant(self.drafter.shape, self.drafter_place))
        return fit(self.hardware, tenants, self.context, sequences, rows)


@dataclass(frozen=True)
class Prediction:
    """One draft for a number of sequences. The seconds of a round are those of the target's pass, of drafting, and of the loop."""

    draft: Draft
    sequences: int
    nodes: float
    tokens: float
    target: Pass
    drafting: float
    loop: float

    @property
    def seconds(self) -> float:
        return self.target.seconds + self.drafting + self.loop

    @property
    def speed(self) -> float:
        """Tokens per second, of all sequences together."""
        return self.sequences * self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "draft": str(self.draft),
            "nodes": self.nodes,
            "sequences": self.sequences,
            "tokens_per_pass": self.tokens,
            "tokens_per_second": self.speed,
            "seconds": {"round": self.seconds, "target": self.target.seconds, "drafting": self.drafting, "loop": self.loop},
            "terms": [vars(term) for term in self.target.terms],
            "bound": self.target.bound,
        }


def predict(setting: Setting, draft: Draft, sequences: int, expected: Expected) -> Prediction:
    """The prediction of one draft; an empty one is plain decoding."""
    nodes = expected.nodes(draft) if draft.widths else 0.0
    return Prediction(
        draft=draft,
        sequences=sequences,
        nodes=nodes,
        tokens=expected.tokens(draft) if draft.widths else 1.0,
        target=setting.target_pass(nodes + 1, sequences),
        drafting=setting.drafting(draft, sequences, nodes) if draft.widths else 0.0,
        loop=setting.loop(nodes + 1, sequences),
    )


def round_seconds(setting: Setting, draft: Draft, sequences: int, nodes: float) -> float:
    """Seconds of a round that drafts so many nodes for each sequence."""
    drafting = setting.drafting(draft, sequences, nodes) if draft.widths else 0.0
    return setting.target_pass(nodes + 1, sequences).seconds + drafting + setting.loop(nodes + 1, sequences)


def settle(
    target: Shape,
    drafter: Drafter,
    hardware: Hardware,
    context: int,
    unions: Unions,
    expected: Expected,
    sequences: int = 1,
    drafts: Sequence[Draft] = (),
    given: Placement | None = None,
) -> Setting:
    """The setting with the best placement: the drafter on the GPU beside fewer layers of the target, or on the host; whichever is
    faster. given: the user's own placement of the target.
    """
    rows = max((d.nodes for d in drafts), default=0) + 1
    made = []
    for on_gpu in (True, False) if hardware.gpu and hardware.host and drafter.shape else (hardware.gpu is not None,):
        others = [Tenant(drafter.shape, everything(drafter.shape) if on_gpu else Placement())] if drafter.shape else []
        where = check_given(target, hardware, given) if given else place(target, hardware, others, context, sequences, rows)
        made.append(Setting(target, drafter, hardware, where, on_gpu, context, unions))

    def worth(setting: Setting) -> tuple[bool, float]:
        speeds = [predict(setting, d, sequences, expected).speed for d in drafts or (Draft(),)]
        return setting.fit(sequences, rows).fits, max(speeds)

    return max(made, key=worth)


@dataclass(frozen=True)
class Plan:
    """Predictions by number of sequences, plain decoding first; and what follows from them."""

    setting: Setting
    expected: Expected
    predictions: dict[int, list[Prediction]]
    without: Setting
    """The target alone: it may have the memory that a drafter would take."""

    def plain(self, sequences: int) -> Prediction:
        return self.predictions[sequences][0]

    def best(self, sequences: int) -> Prediction:
        """The fastest prediction; plain decoding where nothing gains enough to be worth it."""
        best = max(self.predictions[sequences], key=lambda p: p.speed)
        return best if self.gain(best) >= WORTH else self.plain(sequences)

    def gain(self, prediction: Prediction) -> float:
        return prediction.speed / self.plain(prediction.sequences).speed

    @property
    def ends(self) -> int | None:
        """The smallest number of sequences from which no draft is worth it, of those planned."""
        none = [n for n in self.predictions if not self.best(n).draft.widths]
        return min((n for n in none if all(m in none for m in self.predictions if m >= n)), default=None)


def make_plan(
    setting: Setting, expected: Expected, drafts: Sequence[Draft], batches: Sequence[int], without: Setting | None = None
) -> Plan:
    """Predictions of plain decoding and of every draft, for every number of sequences. without: the setting of the target alone."""
    without = without or setting
    drafts = [d for d in drafts if d.widths and setting.drafter.name != "none"]
    found = {n: [predict(without, Draft(), n, expected), *(predict(setting, d, n, expected) for d in drafts)] for n in batches}
    return Plan(setting, expected, found, without)


def break_even(plan: Plan, prediction: Prediction) -> float | None:
    """The lowest acceptance rate, in steps of 0.01, at which this draft would be worth it; None where none is."""
    for percent in range(1, 101):
        tokens = Acceptance((percent / 100,)).tokens(prediction.draft)
        if plan.gain(replace(prediction, tokens=tokens)) >= WORTH:
            return percent / 100
    return None
