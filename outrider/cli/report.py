"""`outrider report`: a benchmark's report again, or two of them beside each other."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Argument, Option

from ..errors import ParameterError
from .session import on_stdout, print_json, say

Json = Annotated[bool, Option("--json", help="One JSON object on stdout.")]
LEGEND = """\
speed-up: median over prompts, each against plain decoding in the same turn; B / A: geometric mean over the paired prompts, in brackets the
bounds that hold 95 % of resampled means. Of plain decoding tokens/s are compared instead: they say how the machines differ."""


def report(
    a: Annotated[str, Argument(metavar="A", help="A folder of `outrider bench --report`.")],
    b: Annotated[str | None, Argument(metavar="[B]", help="Another one, to compare with.")] = None,
    anyway: Annotated[bool, Option("--anyway", help="Compare also where targets, prompts or sampling differ.")] = False,
    json: Json = False,
) -> None:
    """Make a report anew from its traces; or, of two, say which is faster, prompt by prompt."""
    from ..bench.folder import Folder

    if b is None:
        if anyway:
            raise ParameterError("--anyway belongs to a comparison: give a second report")
        again(Folder.open(a), json)
        return
    from ..bench.versus import compare

    found = compare(Folder.open(a), Folder.open(b), anyway)
    if json:
        print_json(found)
        return
    for side in ("a", "b"):
        about = found[side]
        typer.echo(
            f"{side.upper()}: {about['path']}, {about['date']}, outrider {about['versions'].get('outrider')}, {about['machine']['processor']}"
        )
    if found["differences"]:
        say(f"NOTE: A and B differ in {', '.join(found['differences'])}; only what they have in common is compared")
    console = on_stdout()
    console.print(table(found))
    console.print(LEGEND, style="dim", highlight=False)


def again(folder: Any, json: bool) -> None:
    """Recompute a report and show it."""
    from ..bench.analysis import analyse
    from ..bench.page import write_report
    from ..bench.sections import markdown

    page = write_report(folder)
    found = analyse(folder)
    if json:
        print_json(found)
        return
    typer.echo(markdown(found))
    say(f"report: {page}")


def table(found: dict[str, Any]) -> Table:
    """One line for each pair of configurations, all prompts and by category."""
    made = Table()
    for name in ("configuration", "category"):
        made.add_column(name, overflow="fold")
    for name in ("prompts", "speed-up A", "B", "B / A", "tokens per pass A", "B", "same texts"):
        made.add_column(name, justify="right")
    made.add_column("")
    for row in found["rows"]:
        change = row["tokens_per_second_change" if row["plain"] else "speedup_change"]
        speeds = row["tokens_per_second"] if row["plain"] else row["speedup"]
        made.add_row(
            row["a"] if row["a"] == row["b"] else f"{row['a']} / {row['b']}",
            row["category"] if row["category"] is not None else "all",
            str(row["prompts"]),
            *(f"{speed:.1f} tok/s" if row["plain"] else f"{speed:.2f}" for speed in speeds),
            f"{change['mean']:.2f}" + (f" ({change['low']:.2f} to {change['high']:.2f})" if change["low"] is not None else ""),
            *(f"{length:.2f}" for length in row["acceptance_length"]),
            "(sampled)" if row["same_texts"] is None else f"{row['same_texts']} of {row['prompts']}",
            row["verdict"],
        )
    return made
