"""`outrider lab`: a guided session on the real engine."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ..errors import LoadError
from .options import MODEL, Loading, TargetOption, flags
from .session import as_prompt, check_early, open_drafter, open_target, say, waiting

if TYPE_CHECKING:
    from ..lab.desk import Desk

COPY = "q4_0"
"""Of which type the weights of the drafter are, where it is a copy of the target."""


@flags
def lab(
    loading: Loading,
    target: TargetOption = "smollm2",
    drafter: Annotated[
        str | None,
        Option("-d", "--drafter", help="Drafter; by default a coarser copy of the packaged target.", rich_help_panel=MODEL),
    ] = None,
    progress: Annotated[str | None, Option(metavar="FILE", help="Keep the progress here instead of beside the models.")] = None,
) -> None:
    """Learn how speculation works by doing: objectives that are checked against what the engine did. Progress is kept."""
    from ..files import cache_directory
    from ..lab.progress import Progress
    from ..models import PACKAGED
    from .lab_shell import Shell

    options = loading.options()
    drafter = drafter or usual_drafter(target)
    if drafter != str(copy_of(target)):
        check_early(drafter, options)
    if loading.dtype == "auto" and target in PACKAGED:
        loading = replace(loading, dtype="float32")  # in bfloat16 two logits are often equal, and texts part at such ties
    kept = Progress(Path(progress) if progress else cache_directory() / "lab.json", (target, drafter))
    done, settings = kept.read()
    with closing(desk_for(target, drafter, options, loading)) as desk:
        if settings is not None:
            desk.settings = settings
        Shell(desk, kept, done).run()


def copy_of(target: str) -> Path | None:
    """Where the coarser copy of a packaged target is kept, or None for other targets."""
    from ..models import PACKAGED, directory

    return directory() / PACKAGED[target].file.replace(".gguf", f"-{COPY}.gguf") if target in PACKAGED else None


def usual_drafter(target: str) -> str:
    """Who drafts where nobody is named: a requantised copy of a packaged target, where a library can make and run it; "
    "else `suffix`."""
    from ..targets import llama

    if (copy := copy_of(target)) is None:
        return "suffix"
    try:
        llama.candidates("auto")
    except LoadError as error:
        say(f"NOTE: the drafter is suffix, for there is nothing to run a coarser copy of the target with: {error}")
        return "suffix"
    return str(copy)


def make_copy(target: str) -> None:
    """Requantise a packaged target, once."""
    from ..models import PACKAGED, directory, get
    from ..requantise import requantise

    copy = copy_of(target)
    assert copy is not None
    if not copy.exists():
        get(target, say)
        with waiting("making a coarser copy of the target"):
            requantise(str(directory() / PACKAGED[target].file), str(copy), COPY)


def desk_for(target: str, drafter: str, options: dict[str, str], loading: Loading) -> Desk:
    """A desk for the pair, with nothing loaded yet."""
    from ..lab.desk import Desk, Settings

    def load_drafter(name: str, model: Any, given: dict[str, str]) -> Any:
        if name == str(copy_of(target)):
            make_copy(target)
        check_early(name, given)
        return open_drafter(name, model, given, loading)

    return Desk(
        pair=(target, drafter, tuple(options.items())),
        open_target=lambda name: open_target(name, loading, [drafter]),
        open_drafter=load_drafter,
        as_prompt=as_prompt,
        settings=Settings(drafter, tuple(options.items())),
    )


def measured(desk: Desk) -> None:
    """Load the pair and measure what its passes cost."""
    desk.load()
    with waiting("measuring passes"):
        desk.measure_costs()
    assert desk.target is not None and desk.costs is not None
    rows = ", ".join(f"{n}: {ms:.1f} ms" for n, ms in desk.costs.rows.items())
    typer.echo(
        f"{desk.target.name} with {desk.settings.name}. A pass over so many tokens takes {rows}; drafting one "
        f"{desk.costs.draft:.2f} ms."
    )
