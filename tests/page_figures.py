"""The figures of the page of traces, computed anew from the trace's lines: an account independent of the page's own script.

A figure is named by its element's `data-n`, and its place by the `data-` attributes around it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Callable

from traces import lines

from outrider.trace import Round, read_trace, statistics

Line = dict[str, Any]
PHASES = ("propose", "forward", "probabilities", "accept", "cut", "commit", "observe")


@dataclass(frozen=True)
class Place:
    """Where a figure stands: its trace and sequence, and perhaps a round, a node, a depth of the draft, a chart."""

    trace: str
    sequence: int
    round: int | None = None
    node: int | None = None
    depth: int | None = None
    prefill: bool = False


class Account:
    """What the page ought to say about these files."""

    def __init__(self, *files: Path):
        self.files = {file.name: file for file in files}

    @cached_property
    def lines(self) -> dict[str, tuple[Line, list[Line]]]:
        return {name: lines(file) for name, file in self.files.items()}

    @cached_property
    def _rounds(self) -> dict[str, list[Round]]:
        return {name: read_trace(file)[1] for name, file in self.files.items()}

    def rounds(self, place: Place) -> list[Line]:
        return [r for r in self.lines[place.trace][1] if r["sequence"] == place.sequence]

    def round(self, place: Place) -> Line:
        (found,) = (r for r in self.rounds(place) if r["number"] == place.round)
        return found

    def of_prompt(self, place: Place) -> list[Place]:
        """Every sequence with the same prompt and target, this one too."""
        asked = self._asked(place)
        every = [Place(name, n) for name, (_, rounds) in self.lines.items() for n in sorted({r["sequence"] for r in rounds})]
        return [other for other in every if self._asked(other) == asked]

    def _asked(self, place: Place) -> tuple[str, str]:
        header = self.lines[place.trace][0]
        about = header["sequences"][place.sequence]
        return header.get("target", about.get("target") and {"name": about["target"]})["name"], header["prompts"][
            str(about["prompt"])
        ]

    def plain(self, place: Place) -> Place:
        return next(other for other in self.of_prompt(place) if self.rounds(other)[0]["drafter"] == "none")

    def expected(self, name: str, place: Place) -> float | list[float]:
        """The figure's value, or the values that it may be one of (where a place has several of a name)."""
        if name in OF_NODES and place.node is not None:
            return OF_NODES[name](self.round(place), place.node)
        if name in OF_ROUNDS and place.round is not None:
            return OF_ROUNDS[name](self.round(place))
        return getattr(self, "_" + name.replace("-", "_"))(place)

    # ---- of several rounds ----

    def _figures(self, place: Place) -> Any:
        return statistics(r for r in self._rounds[place.trace] if r.sequence == place.sequence)

    def _last_round(self, place: Place) -> float:
        return max(r["number"] for r in self.rounds(place)) + 1

    def _emitted_all(self, place: Place) -> float:
        return self._figures(place).emitted

    def _passes(self, place: Place) -> float:
        return self._figures(place).passes

    def _per_pass(self, place: Place) -> float:
        return self._figures(place).acceptance_length

    def _accepted_all(self, place: Place) -> float:
        return self._figures(place).accepted

    def _proposed_all(self, place: Place) -> float:
        return self._figures(place).proposed

    def _rate(self, place: Place) -> float:
        return 100 * self._figures(place).acceptance_rate

    def _draft_per_pass(self, place: Place) -> float:
        return self._figures(place).proposed / self._figures(place).passes

    def _seconds(self, place: Place) -> float:
        return self._figures(place).total_seconds

    def _speed(self, place: Place) -> float:
        return self._figures(place).tokens_per_second

    def _prefill(self, place: Place) -> float:
        return self._figures(place).seconds["prefill"]

    def _propose_share(self, place: Place) -> float:
        return 100 * self._figures(place).seconds["propose"] / self._figures(place).total_seconds

    def _ratio(self, place: Place) -> float:
        return self._speed(place) / self._speed(self.plain(place))

    def _parting(self, place: Place) -> float:
        mine, other = ([t for r in self.rounds(p) for t in r["emitted"]] for p in (place, self.plain(place)))
        return next(i for i, (a, b) in enumerate(zip(mine, other), 1) if a != b)

    def _candidates(self, place: Place) -> float:
        return len(self.of_prompt(place))

    def _place_first(self, place: Place) -> float:
        return self.round(place)["context"] - self.rounds(place)[0]["context"] + 1

    def _place_last(self, place: Place) -> float:
        return self._place_first(place) + len(self.round(place)["emitted"]) - 1

    def _first_place(self, place: Place) -> float:
        return 1

    def _last_place(self, place: Place) -> float:
        return self._emitted_all(place)

    def _longest(self, place: Place) -> float:
        return max(len(r["tokens"]) - 1 for r in self.rounds(place))

    def _depth(self, place: Place) -> float:
        return place.depth or 0

    def _reached(self, place: Place) -> float:
        return self._figures(place).reached_by_depth[(place.depth or 0) - 1]

    def _kept(self, place: Place) -> float:
        return self._figures(place).accepted_by_depth[(place.depth or 0) - 1]

    def _kept_share(self, place: Place) -> float:
        return 100 * self._kept(place) / self._reached(place)

    def _stretch(self, place: Place, choose: Callable[..., Any]) -> tuple[int, float]:
        counts = [len(r["emitted"]) for r in self.rounds(place)]
        windows = [sum(counts[i : i + 8]) / 8 for i in range(len(counts) - 7)]
        return windows.index(choose(windows)), choose(windows)

    def _hard(self, place: Place) -> float:
        return self._stretch(place, min)[1]

    def _easy(self, place: Place) -> float:
        return self._stretch(place, max)[1]

    def _hard_first(self, place: Place) -> float:
        return self.rounds(place)[self._stretch(place, min)[0]]["number"] + 1

    def _hard_last(self, place: Place) -> float:
        return self._hard_first(place) + 7

    def _easy_first(self, place: Place) -> float:
        return self.rounds(place)[self._stretch(place, max)[0]]["number"] + 1

    def _easy_last(self, place: Place) -> float:
        return self._easy_first(place) + 7

    # ---- the race, and charts ----

    def ends(self, place: Place) -> list[float]:
        """When each round of a sequence had ended, in seconds."""
        lengths = (
            sum(r["times"][p] for p in PHASES) + (r["times"]["prefill"] if place.prefill else 0) for r in self.rounds(place)
        )
        return [at / 1e9 for at in accumulate(lengths)]

    def _done(self, place: Place) -> float:
        return self.ends(place)[-1]

    def _most_passes(self, place: Place) -> float:
        return max(len(self.rounds(other)) for other in self.of_prompt(place))

    def _most_seconds(self, place: Place) -> float:
        return max(self.ends(other)[-1] for other in self.of_prompt(place))

    def _most_tokens(self, place: Place) -> float:
        return max(self._emitted_all(other) for other in self.of_prompt(place))

    def _zero(self, place: Place) -> float:
        return 0


def accepted(r: Line) -> int:
    return min(len(r["path"]) - 1, len(r["emitted"]))


def decision_on(r: Line, node: int) -> Line:
    (found,) = (test for test in r["tests"] if test["node"] == node)
    return found


def ancestors(r: Line, node: int) -> list[int]:
    """From the anchor down to the node itself."""
    path = [node]
    while r["parents"][path[0]] >= 0:
        path.insert(0, r["parents"][path[0]])
    return path


def fallen_with(r: Line, node: int) -> int:
    """The highest ancestor that was not kept."""
    return next(i for i in ancestors(r, node) if i not in r["path"])


def first_refused(r: Line) -> int:
    """The first child of the last kept node."""
    return next(i for i, parent in enumerate(r["parents"]) if parent == r["path"][-1])


def likeliest(r: Line) -> list[float]:
    return [0.0 if logprob is None else math.exp(logprob) for _, logprob in r["logprobs"][-1]["top"]]


OF_NODES: dict[str, Callable[[Line, int], float | list[float]]] = {
    "node": lambda r, i: i,
    "parent": lambda r, i: r["parents"][i],
    "p": lambda r, i: r["p"][i],
    "q": lambda r, i: r["q"][i],
    "test": lambda r, i: decision_on(r, i)["probability"],
    "draw": lambda r, i: decision_on(r, i)["draw"],
    "score": lambda r, i: r["score"][i],
    "fallen-with": fallen_with,
    "path-end": lambda r, i: r["path"][-1],
    "sees": lambda r, i: [float(j) for j in ancestors(r, i)],
}

OF_ROUNDS: dict[str, Callable[[Line], float | list[float]]] = {
    "round": lambda r: r["number"] + 1,
    "proposed": lambda r: len(r["tokens"]) - 1,
    "accepted": accepted,
    "emitted": lambda r: len(r["emitted"]),
    "rows": lambda r: len(r["tokens"]),
    "sequences": lambda r: r["sequences"],
    "p-next": lambda r: r["p_next"],
    "refused-first": first_refused,
    "favourite": likeliest,
    "propose": lambda r: r["times"]["propose"] / 1e6,
    "forward": lambda r: r["times"]["forward"] / 1e6,
    "duration": lambda r: sum(r["times"][phase] for phase in PHASES) / 1e6,
    **{f"time-{phase}": lambda r, phase=phase: r["times"][phase] / 1e6 for phase in PHASES},  # type: ignore[misc]
}
PROBABILITIES = {"p", "q", "test", "draw", "p-next", "score", "favourite"}


def says(text: str, value: float, name: str = "") -> bool:
    """Whether a figure as written is `value` rounded to the digits that are shown; a probability is 0 or 1 only when it is so."""
    text = text.replace("\u2212", "-")
    if text.startswith("> "):
        return float(text[2:]) < value < 1
    if name in PROBABILITIES and text in ("0", "1"):
        return value == float(text)
    mantissa, _, exponent = text.partition("e")
    digits = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return abs(float(text) - value) <= 0.5000001 * 10.0**-digits
