"""`outrider export`: a drafter in the format of another engine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from typer import Argument, Option

from .options import TargetOption, named_values
from .session import print_json, quiet, say, waiting


def export(
    drafter: Annotated[str, Argument(help="The folder or hub id of heads, or a GGUF file.")],
    out: Annotated[str, Argument(metavar="OUT", help="The folder to write; for gguf the file.")],
    form: Annotated[str, Option("--format", help="safeailab, specforge, speculators, gguf, medusa.", show_default=False)],
    target: TargetOption = "smollm2",
    option: Annotated[
        list[str], Option("-o", "--option", metavar="NAME=VALUE", help="Where the drafter's own files are wrong about it.")
    ] = [],  # noqa: B006
    force: Annotated[bool, Option("--force", help="Replace an earlier export at OUT.")] = False,
    json: Annotated[bool, Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Write a drafter for another engine: vLLM, SGLang, llama.cpp (docs/export.md). Its weights stay as they are."""
    quiet()
    from ..export import FORMATS
    from ..export import export as write

    with waiting(f"writing {out}"):
        made = write(drafter, form, out, target, named_values(option, "an option of the drafter", "-o"), force)
    if json:
        print_json(asdict(made))
        return
    size = sum(made.files.values()) / 2**20
    say(f"{out}: {FORMATS[form].title}; {', '.join(made.files)}, {size:.1f} MiB; from {made.found}")
    if made.use:
        say(f"run it: {made.use}")
