"""What a report says, computed from the traces of its folder.

The spread of a figure is over groups of prompts (single prompts when the batch is 1); each group has one value, that of its median
decoding, as the pooled figures have it.
"""

from __future__ import annotations

import statistics as numbers
from collections import defaultdict
from dataclasses import replace
from typing import Any, Iterable, Sequence

from .costs import Pass, costs, passes_of
from .folder import REPORT_VERSION, Folder
from .report import as_json
from .runner import Configuration, Group, Run, median_run, summarise
from .spread import Spread, as_dict

PHASES = {"draft": ("propose",), "verify": ("forward",), "rest": ("probabilities", "accept", "cut", "commit", "observe")}
"""How the phases of a round are put together."""


def analyse(folder: Folder) -> dict[str, Any]:
    """The report of a folder, for JSON."""
    runs: list[Run] = []
    passes: dict[str, list[Pass]] = defaultdict(list)
    for turn in folder.turns():
        for run in turn:
            passes[run.configuration.target] += passes_of(run)
            runs.append(replace(run, results=tuple(replace(result, rounds=()) for result in run.results)))
    about = folder.about
    return {
        "outrider_report": REPORT_VERSION,
        "environment": {name: about[name] for name in ("date", "command", "versions", "machine", "models")},
        "question": about["question"],
        "interrupted": bool(about.get("interrupted")),
        "rows": [_row(row, runs) for row in summarise(runs)],
        "categories": [_row(row, runs) for row in summarise(runs, by_category=True)],
        "costs": {target: costs(found, about["rooflines"].get(target)) for target, found in passes.items()},
    }


def _row(row: Any, runs: Sequence[Run]) -> dict[str, Any]:
    mine = paired(runs, row.configuration, row.category)
    return {
        **as_json(row),
        "prompts": len({number for group in mine for number in group.numbers}),
        "spread": {name: as_dict(Spread.of(values)) for name, values in spreads(mine).items()},
        "between_repetitions": between_repetitions(mine),
        "shares": shares(row.statistics.seconds),
    }


Pairs = dict[Group, list[tuple[Run, Run]]]
"""For each group, its run and plain decoding's, once for each repetition."""


def paired(runs: Iterable[Run], configuration: Configuration, category: str | None = None) -> Pairs:
    """Runs of a configuration with plain decoding's of the same turn."""
    found = {(run.configuration, run.group, run.repetition): run for run in runs}
    pairs: Pairs = defaultdict(list)
    for (own, group, repetition), run in found.items():
        plain = found.get((configuration.plain, group, repetition))
        if own == configuration and plain is not None and category in (None, group.category):
            pairs[group].append((run, plain))
    return pairs


def spreads(pairs: Pairs) -> dict[str, list[float]]:
    """A value for each group: ``ratio`` to plain decoding, ``tokens_per_second``, ``acceptance_length``, ``acceptance_rate``."""
    chosen = [tuple(median_run(list(runs)) for runs in zip(*of_group)) for of_group in pairs.values()]
    return {
        "ratio": [value for own, plain in chosen if (value := speedup(own, plain)) is not None],
        **{
            name: [value for own, _ in chosen if (value := getattr(own.statistics, name)) is not None]
            for name in ("tokens_per_second", "acceptance_length", "acceptance_rate")
        },
    }


def speedup(run: Run, plain: Run) -> float | None:
    """Time per token of plain decoding over that of `run`, prefills left out."""
    return plain.seconds_per_token / run.seconds_per_token if run.seconds_per_token else None


def between_repetitions(pairs: Pairs) -> float | None:
    """How far the ratios of one group lie apart from repetition to repetition, as a share of their median; the median over groups."""
    several = [[value for pair in of_group if (value := speedup(*pair))] for of_group in pairs.values() if len(of_group) > 1]
    return numbers.median((max(v) - min(v)) / numbers.median(v) for v in several if v) if any(several) else None


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Of the time after the prefill: the share of drafting, of the target's passes, and of the rest."""
    total = sum(s for phase, s in seconds.items() if phase != "prefill")
    return {name: sum(seconds[phase] for phase in phases) / total if total else 0.0 for name, phases in PHASES.items()}
