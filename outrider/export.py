"""A drafter in another format, for another engine. Weights stay as they are; names, config and the meaning of numbers change.

A drafter is read as it is read for drafting, and so what could not draft is not exported. What is written goes by the tables that it
is read by (`drafters.eagle_export`, `eagle_gguf`, `medusa`), so that it can be read here again, and round trips give the same bytes.
What a format, or the code that reads it elsewhere, has no place for is refused by name, because that code would ignore it and draft
nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping

from .drafters import eagle_export, make_options, medusa
from .drafters.checkpoint import CONFIG, WEIGHTS, Checkpoint, resolve
from .drafters.detect import Found, detect
from .drafters.eagle import EagleOptions
from .errors import LoadError, ParameterError
from .files import appearing
from .targets.described import DescribedTarget


@dataclass(frozen=True)
class Format:
    """title: in words. drafter: of the table, which it is for. use: the command line that runs it, with {target} and {out}."""

    title: str
    drafter: str
    use: str = ""


FORMATS = {
    "safeailab": Format("EAGLE as SafeAILab's repository reads it", "eagle"),
    "specforge": Format(
        "EAGLE-3 as SpecForge writes it, for SGLang",
        "eagle",
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 --speculative-draft-model-path {out} "
        "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6",
    ),
    "speculators": Format(
        "EAGLE-3 as the speculators library writes it, for vLLM",
        "eagle",
        'vllm serve {target} --speculative-config \'{{"method": "eagle3", "model": "{out}", "num_speculative_tokens": 5}}\'',
    ),
    "gguf": Format(
        "EAGLE-3 as a GGUF file, for llama.cpp",
        "eagle",
        "llama-server -m {target} --spec-type draft-eagle3 --spec-draft-model {out} --spec-draft-n-max 5",
    ),
    "medusa": Format("Medusa heads as FasterDecoding's repository reads them", "medusa"),
}
ONLY = {
    "hydra": "Hydra heads have one format, the one that they are in",
    "mtp": "modules of multi-token prediction are a part of their model, and engines read them from its folder",
    "dflash": "engines read DFlash drafters as they are published",
    "model": "a whole model is read by engines as it is",
}


@dataclass(frozen=True)
class Exported:
    """What was written: where, in which format, from what, each file's bytes; and how to run it elsewhere."""

    path: str
    format: str
    found: str
    files: dict[str, int] = field(default_factory=dict)
    use: str = ""


def export(
    source: str,
    form: str,
    destination: str,
    target: str = "smollm2",
    options: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Exported:
    """Write the drafter `source`, made for `target`, in the format `form`: a folder, and for ``gguf`` a file.

    target: only its shape is read; for ``gguf`` it must be a GGUF file, whose vocabulary goes along. options: of the drafter, where
    its checkpoint is wrong about itself (`EagleOptions`). force: replace an earlier export. The destination appears when it is
    complete, or not at all. Raises LoadError and ParameterError with one line that says what is wrong.
    """
    if form not in FORMATS:
        raise ParameterError(f"unknown format {form!r}; known: {', '.join(FORMATS)}")
    found, place = detect(source), Path(destination).expanduser()
    if found.drafter != FORMATS[form].drafter:
        raise ParameterError(_wrong_kind(source, found, form))
    _check_place(place, resolve(source), form, force)
    write = _writer(source, form, DescribedTarget.read(target), options or {})
    try:
        with appearing(place) as part:
            write(part)
            files = [part] if part.is_file() else sorted(part.iterdir())
            sizes = {file.name: file.stat().st_size for file in files}
    except OSError as error:
        raise LoadError(f"cannot write {destination}: {error.strerror or error}") from error
    return Exported(destination, form, found.dialect, sizes, FORMATS[form].use.format(target=target, out=destination))


def _writer(source: str, form: str, target: DescribedTarget, options: Mapping[str, Any]) -> Callable[[Path], None]:
    """What writes it at a place. Everything that can be wrong with the drafter is said before."""
    if form == "medusa":
        if options:
            raise ParameterError(f"option {next(iter(options))} is for EAGLE heads; Medusa heads have nothing to set")
        config, tensors = medusa.bare(Checkpoint.read(resolve(source)), target)
        return lambda place: medusa.write(place, config, tensors)
    made = make_options(EagleOptions, options, "eagle")
    assert isinstance(made, EagleOptions)
    head = eagle_export.read(source, target, made)
    eagle_export.refuse(head, form)
    return lambda place: eagle_export.write(head, form, place)


def _wrong_kind(source: str, found: Found, form: str) -> str:
    formats = [name for name, each in FORMATS.items() if each.drafter == found.drafter]
    instead = f"formats for it: {', '.join(formats)}" if formats else ONLY.get(found.drafter, "it has no weights")
    return f"{source} is {found.dialect}, which cannot be written as {form} ({FORMATS[form].title}); {instead}"


def _check_place(place: Path, source: Path, form: str, force: bool) -> None:
    """Raise ParameterError where something is in the way."""
    if form == "gguf" and place.suffix != ".gguf":
        raise ParameterError(f"a GGUF file needs a name that ends in .gguf; got {place}")
    if not place.absolute().parent.is_dir():
        raise ParameterError(f"there is no folder {place.absolute().parent}")
    if not place.exists():
        return
    if place.samefile(source):
        raise ParameterError(f"{place} is what would be exported; give another name")
    if not force:
        raise ParameterError(f"{place} is there already; give another name, or --force to replace it")
    if place.is_dir() == (form == "gguf"):
        raise ParameterError(f"{place} is a {'folder' if place.is_dir() else 'file'}, and is not replaced; give another name")
    ours = {CONFIG, WEIGHTS, medusa.WEIGHTS}
    if place.is_dir() and (others := sorted({file.name for file in place.iterdir()} - ours)):
        raise ParameterError(
            f"{place} holds {others[0]}, which is no part of an export, and so it is not replaced; give another name"
        )
