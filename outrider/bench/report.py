"""A measurement as a table and as a file."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, Sequence

from rich.table import Table

from ..errors import LoadError, ParameterError
from ..files import write_json
from .runner import Row, Run, summarise

RESULT_VERSION = 1

LEGEND = """\
tok/s = emitted / seconds after the prefill; ratio = tok/s over our own plain decoding of the same prompts, in this run
tok/pass = emitted / passes (plain decoding: 1.0); accepted = accepted / proposed drafted tokens
by depth = of the rounds in which depth d - 1 was kept and d was drafted, the share in which d was kept
overhead = share of the time spent neither in the target's passes nor in the drafter
same = texts equal to plain decoding's; those within rounding of a tie are counted as near-ties"""


def table(rows: Sequence[Row], title: str | None = None) -> Table:
    """One line for each Row; plain decoding is one of them."""
    with_target = len({row.configuration.target for row in rows}) > 1
    with_category = any(row.category is not None for row in rows)
    result = Table(title=title, title_justify="left")
    for name in ("target",) * with_target + ("category",) * with_category + ("drafter",):
        result.add_column(name, overflow="fold")
    for name in ("draft", "batch", "tok/s", "ratio", "tok/pass", "accepted", "by depth", "draft ms/round", "target ms/pass"):
        result.add_column(name, justify="right")
    result.add_column("overhead", justify="right")
    result.add_column("same", overflow="fold")
    for row in rows:
        cells = [row.configuration.target] * with_target + [row.category or "-"] * with_category + [_drafter(row)]
        result.add_row(*cells, *_figures(row), style="bold red" if row.drafted_nothing or row.unexplained else None)
    return result


def _drafter(row: Row) -> str:
    name = row.configuration.drafter if not row.configuration.is_plain else "none (plain)"
    options = "".join(f" {key}={value}" for key, value in row.configuration.options.items())
    marks = " LOSSY" * row.lossy + " DRAFTED NOTHING" * row.drafted_nothing
    return f"{name}{options}{marks}"


def _figures(row: Row) -> list[str]:
    s = row.statistics
    passes = s.whole_passes or 1
    return [
        "" if row.configuration.is_plain else str(row.configuration.draft),
        str(row.configuration.batch),
        _number(s.tokens_per_second, ".1f"),
        _number(row.ratio, ".2f"),
        _number(s.acceptance_length, ".2f"),
        _number(s.acceptance_rate, ".0%"),
        " ".join(f"{rate:.2f}" for rate in s.conditional_rates[:8]) or "-",
        f"{1e3 * s.seconds['propose'] / passes:.2f}",
        f"{1e3 * s.seconds['forward'] / passes:.1f}",
        _number(s.overhead, ".0%"),
        _same(row),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _same(row: Row) -> str:
    if row.configuration.is_plain:
        return ""
    if not row.compared:
        return "(sampled)"
    if not row.differing:
        return f"yes ({row.compared})"
    ties = row.differing - row.unexplained
    parts = [f"{ties} near-tie{'s' * (ties > 1)}"] * (ties > 0) + [f"{row.unexplained} DIFFER"] * (row.unexplained > 0)
    return f"{', '.join(parts)} of {row.compared}"


# ---- files ----------------------------------------------------------------------------------------------------------


def result(manifest: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that was measured, for JSON: the rows of the table, and each prompt of each run."""
    return {
        "outrider_bench": RESULT_VERSION,
        **manifest,
        "rows": [as_json(row) for row in summarise(runs)],
        "categories": [as_json(row) for row in summarise(runs, by_category=True)],
        "runs": [_run(run) for run in runs],
    }


def as_json(row: Row) -> dict[str, Any]:
    return {
        **row.configuration.as_dict(),
        "category": row.category,
        "rule": row.rule,
        "lossy": row.lossy,
        "ratio": row.ratio,
        "plain_tokens_per_second": row.plain.tokens_per_second,
        "drafted_nothing": row.drafted_nothing,
        "runs": row.runs,
        "compared": row.compared,
        "differing": row.differing,
        "unexplained": row.unexplained,
        "statistics": row.statistics.as_dict(),
    }


def _run(run: Run) -> dict[str, Any]:
    differences = run.differences or (None,) * len(run.each)
    return {
        **run.configuration.as_dict(),
        "category": run.group.category,
        "repetition": run.repetition,
        "prompts": [
            {
                "number": number,
                "finish_reason": r.finish_reason,
                "prompt_tokens": r.prompt_tokens,
                "seed": r.seed,
                "text_sha256": hashlib.sha256(r.text.encode()).hexdigest(),
                "same_as_plain": None if run.differences is None else where is None,
                "difference": asdict(where) if where else None,
                "statistics": figures.as_dict(),
            }
            for number, r, figures, where in zip(run.group.numbers, run.results, run.each, differences)
        ],
    }


def refuse_overwriting(path: str | None) -> None:
    """Raise ParameterError when there is a result already: results are never changed."""
    if path is not None and Path(path).exists():
        raise ParameterError(f"{path} exists already; a result is never overwritten, give another name")


def write(path: str, value: dict[str, Any]) -> None:
    """Write a result whole or not at all."""
    try:
        write_json(path, value, mode=0o444)
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror}") from error
