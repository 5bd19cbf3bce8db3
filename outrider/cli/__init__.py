"""The command line: `outrider run`, `serve`, `bench`, `report`, `view`, `check`, `plan`, `data`, `train`, `export`, `models`, `drafters`, `demo`, `lab`.

A command is a function; what several of them share stands in dataclasses (`options`), and each field is a command-line option.
Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from .. import __version__
from . import bench, check, data, demo, export, lab, plan, report, run, serve, tables, train, view
from .session import Commands

app = typer.Typer(
    cls=Commands,
    name="outrider",
    help="Lossless speculative decoding: the text is the target's own, only sooner.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None: ...


app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.command("lab")(lab.lab)
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.command("view")(view.view)
app.command("check")(check.check)
app.command("plan")(plan.plan)
app.command("data")(data.data)
app.command("train")(train.train)
app.command("export")(export.export)
app.command("drafters")(tables.drafters)
app.add_typer(tables.models, name="models", help="Models that come without a hub or an account.")


def main() -> None:
    """Entry point of the `outrider` command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was finished is kept then, too
    app()
