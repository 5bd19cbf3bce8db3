"""What a pass of a target costs by its rows: as it was in a benchmark's rounds, and beside what the machine would allow."""

from __future__ import annotations

import statistics as numbers
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Sequence

from ..errors import OutriderError
from ..targets.base import Target
from .folder import Folder
from .roofline import ROWS, roofline
from .runner import Run
from .spread import Spread, as_dict


@dataclass(frozen=True)
class Pass:
    """A pass of the target for one sequence alone: rows, tokens before it, milliseconds."""

    rows: int
    context: int
    ms: float


def passes_of(run: Run) -> list[Pass]:
    """The passes that served one sequence alone: only of these the rows are the sequence's own."""
    rounds = (round for result in run.results for round in result.rounds if round.sequences == 1)
    return [Pass(r.rows, r.context, r.times.forward / 1e6) for r in rounds]


def costs(passes: Sequence[Pass], roofline: dict[str, Any] | None) -> dict[str, Any]:
    """Milliseconds of a pass by its rows, as they were in this measurement, beside the roofline of the target alone."""
    by_rows: dict[int, list[float]] = defaultdict(list)
    for one in passes:
        by_rows[one.rows].append(one.ms)
    return {
        "context": int(numbers.median(one.context for one in passes)) if passes else None,
        "rows": [{"rows": rows, "ms": as_dict(Spread.of(by_rows[rows]))} for rows in sorted(by_rows)],
        "roofline": roofline,
    }


def roofline_of(folder: Folder, name: str, target: Target) -> dict[str, Any]:
    """The target's roofline after as many tokens as the folder's passes had before them, or why there is none."""
    passes = [one for turn in folder.turns() for run in turn if run.configuration.target == name for one in passes_of(run)]
    context = min(costs(passes, None)["context"] or 128, target.context_length - max(ROWS))
    try:
        return roofline(target, max(context, 2))
    except OutriderError as error:
        return {"why_not": str(error)}
