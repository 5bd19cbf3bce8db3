"""`outrider drafters` and `outrider models`: what there is."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Argument, Option

from ..errors import ParameterError
from .session import on_stdout, print_json, quiet, say

Json = Annotated[bool, Option("--json", help="One JSON object on stdout.")]
Name = Annotated[str, Argument(help="A name from `outrider models list`.")]

models = typer.Typer(no_args_is_help=True)


def drafters(json: Json = False) -> None:
    """The table of drafters with what each needs and its options (-o name=value)."""
    from ..drafters import TABLE

    rows: list[dict[str, Any]] = []
    for name, entry in TABLE.items():
        cls = entry.load()
        options = {f.name: f.default for f in dataclasses.fields(cls.Options)}
        rows.append({"name": name, **dataclasses.asdict(entry), "options": options, "about_options": cls.Options.__doc__ or ""})
    if json:
        print_json(rows)
        return
    table = Table("drafter", "drafts", "needs", "a draft costs", "output", "shapes", "options (-o name=value)", "source")
    for row in rows:
        given = "\n".join(f"{name}={_shown(value)}" for name, value in row["options"].items())
        output = "exact" if row["exact"] else "lossy"
        table.add_row(
            row["name"], row["summary"], row["needs"], row["cost"], output, ", ".join(row["shapes"]), given, row["source"]
        )
    on_stdout().print(table)


def _shown(value: Any) -> str:
    return "" if value in (None, ()) else str(value).lower() if isinstance(value, bool) else str(value)


@models.command("list")
def list_models(json: Json = False) -> None:
    """The packaged models, and whether each is here."""
    from ..models import PACKAGED, folder

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "title": model.title,
            "licence": model.licence,
            "from": model.requirement,
            "here": (folder(name) / "config.json").exists(),
            "folder": str(folder(name)),
        }
        for name, model in PACKAGED.items()
    ]
    if json:
        print_json(rows)
        return
    table = Table("name", "model", "licence", "from", "here")
    for row in rows:
        table.add_row(row["name"], row["title"], row["licence"], row["from"], row["folder"] if row["here"] else "no")
    on_stdout().print(table)


@models.command("get")
def get_model(name: Name) -> None:
    """Download, check and convert a packaged model, if it is not here."""
    _known(name)
    quiet()
    from ..models import get

    typer.echo(get(name, say))


@models.command("where")
def where(name: Name) -> None:
    """The folder of a packaged model, whether it is here or not."""
    _known(name)
    from ..models import folder

    typer.echo(folder(name))


def _known(name: str) -> None:
    from ..models import PACKAGED

    if name not in PACKAGED:
        raise ParameterError(f"unknown packaged model {name!r}; known: {', '.join(PACKAGED)}")
