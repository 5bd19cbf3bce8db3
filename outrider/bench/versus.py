"""Two reports beside each other: the same prompts on the same target, paired prompt by prompt.

A prompt's speed-up is that of a turn, its time per token beside plain decoding's next to it; with several repetitions their median. So what
is compared has the speed of the machine taken out. The change is the geometric mean over prompts, with an interval by resampling them.
"""

from __future__ import annotations

import statistics as numbers
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, Iterable

from ..errors import ParameterError
from .folder import Folder
from .runner import Configuration, Run
from .spread import Interval, interval, ratio_interval

Key = tuple[str, ...]
"""The prompts that were decoded together, by their SHA-256."""


@dataclass(frozen=True)
class Measured:
    """What a turn says about one configuration: speed-up against its plain decoding, tokens per second, tokens per pass, the tokens."""

    category: str
    speedup: float
    speed: float
    length: float
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Side:
    """One report: for each configuration and group of prompts what was measured, once for each repetition."""

    folder: Folder
    found: dict[Configuration, dict[Key, list[Measured]]]

    @classmethod
    def read(cls, folder: Folder) -> Side:
        hashes = [prompt["sha256"] for prompt in folder.about["question"]["prompts"]]
        names = list(dict.fromkeys(c["target"] for c in folder.about["question"]["configurations"]))
        found: dict[Configuration, dict[Key, list[Measured]]] = defaultdict(lambda: defaultdict(list))
        for turn in folder.turns():
            plain = next(run for run in turn if run.configuration.is_plain)
            key = tuple(hashes[number] for number in plain.group.numbers)
            for run in turn:
                place = replace(run.configuration, target=str(names.index(run.configuration.target)))
                found[place][key].append(_measured(run, plain))
        if not found:
            raise ParameterError(f"{folder.path} has no finished measurement yet")
        return cls(folder, found)

    @property
    def drafting(self) -> list[Configuration]:
        return [configuration for configuration in self.found if not configuration.is_plain]


def _measured(run: Run, plain: Run) -> Measured:
    s = run.statistics
    texts = tuple(result.tokens for result in run.results)
    return Measured(
        run.group.category,
        plain.seconds_per_token / run.seconds_per_token,
        s.tokens_per_second or 0.0,
        s.acceptance_length or 0.0,
        texts,
    )


def compare(one: Folder, other: Folder, anyway: bool = False) -> dict[str, Any]:
    """Both reports, paired, for JSON. anyway: also where they differ in target, prompts or sampling; then it says in "
    "what, and pairs the
    prompts that both have. Raises ParameterError for differences, and where nothing can be paired.
    """
    differences = differing(one, other)
    if differences and not anyway:
        raise ParameterError(
            f"{one.path} and {other.path} differ in {', '.join(differences)}: what they measured is not the same; "
            "--anyway compares what they have in common"
        )
    a, b = Side.read(one), Side.read(other)
    fixed = one.about["question"]["sampling"]["temperature"] == 0 or one.about["question"]["sampling"]["seed"] is not None
    rows = []
    for mine, theirs in pairs(a, b):
        keys = [key for key in a.found[mine] if key in b.found[theirs]]
        if not keys:
            continue
        categories = list(dict.fromkeys(a.found[mine][key][0].category for key in keys))
        for category in (None, *(categories if len(categories) > 1 else ())):
            chosen = [key for key in keys if category in (None, a.found[mine][key][0].category)]
            both = [(a.found[mine][key], b.found[theirs][key]) for key in chosen]
            rows.append(_row(mine, theirs, category, both, fixed))
    if not rows:
        raise ParameterError(f"{one.path} and {other.path} have no prompts in common")
    return {
        "outrider_comparison": 1,
        "a": _about(one),
        "b": _about(other),
        "differences": differences,
        "rows": rows,
    }


def differing(one: Folder, other: Folder) -> list[str]:
    """What of the question is not the same, apart from the drafters and what it ran on."""
    mine, theirs = one.about["question"], other.about["question"]
    found = [name for name in ("prompts", "sampling", "raw") if mine.get(name) != theirs.get(name)]
    models = [[{k: v for k, v in m.items() if k != "name"} for m in folder.about["models"].values()] for folder in (one, other)]
    return ["target"] * (models[0] != models[1]) + found


def _about(folder: Folder) -> dict[str, Any]:
    return {"path": str(folder.path), **{name: folder.about[name] for name in ("date", "command", "versions", "machine")}}


def pairs(a: Side, b: Side) -> list[tuple[Configuration, Configuration]]:
    """Configurations that both have, plain decoding's first; if there is none beside it and each has just one, these two."""
    common = [configuration for configuration in a.found if configuration in b.found]
    if not any(not configuration.is_plain for configuration in common) and len(a.drafting) == len(b.drafting) == 1:
        return [*((c, c) for c in common), (a.drafting[0], b.drafting[0])]
    if not common:
        raise ParameterError(f"{a.folder.path} and {b.folder.path} have no configuration in common")
    return [(configuration, configuration) for configuration in common]


Both = list[tuple[list[Measured], list[Measured]]]
"""For each group of prompts what A and B measured."""


def _row(mine: Configuration, theirs: Configuration, category: str | None, both: Both, fixed: bool) -> dict[str, Any]:
    speedups, speeds, lengths = (_medians(both, name) for name in ("speedup", "speed", "length"))
    return {
        "a": _name(mine),
        "b": _name(theirs),
        "plain": mine.is_plain,
        "category": category,
        "prompts": len(both),
        "speedup": [numbers.median(values) for values in zip(*speedups)],
        "speedup_change": asdict(ratio_interval([y / x for x, y in speedups])),
        "tokens_per_second": [numbers.median(values) for values in zip(*speeds)],
        "tokens_per_second_change": asdict(ratio_interval([y / x for x, y in speeds])),
        "acceptance_length": [numbers.median(values) for values in zip(*lengths)],
        "acceptance_length_change": asdict(interval([y - x for x, y in lengths])),
        "same_texts": sum(x[0].texts == y[0].texts for x, y in both) if fixed else None,
        "verdict": verdict(speeds if mine.is_plain else speedups),
    }


def _medians(both: Both, name: str) -> list[tuple[float, float]]:
    value: Callable[[Iterable[Measured]], float] = lambda of: numbers.median(getattr(one, name) for one in of)  # noqa: E731
    return [(value(x), value(y)) for x, y in both]


def _name(configuration: Configuration) -> str:
    if configuration.is_plain:
        return f"plain batch {configuration.batch}"
    options = "".join(f" {name}={value}" for name, value in configuration.options.items())
    return f"{configuration.drafter}{options} draft {configuration.draft} batch {configuration.batch}"


def verdict(speeds: list[tuple[float, float]]) -> str:
    """What the interval says about B."""
    change: Interval = ratio_interval([y / x for x, y in speeds])
    if change.low is None:
        return "too few prompts to tell"
    if not change.excludes(1.0):
        return "no difference beyond chance"
    return "B faster" if change.mean > 1 else "B slower"
