"""What a folder, a file or a hub id given as a drafter is, found out by its content."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import LoadError
from ..models import PACKAGED
from . import dflash_formats, dflash_gguf, eagle_formats, eagle_gguf, hydra, medusa, mtp_head
from .checkpoint import Checkpoint, read_config, resolve


@dataclass(frozen=True)
class Found:
    """drafter: its name in the table. dialect: in words."""

    drafter: str
    dialect: str


def detect(source: str) -> Found:
    """What `source` is. Raises LoadError when it is nothing that can draft, or a kind of drafter that is known but not supported."""
    if source in PACKAGED:
        return Found("model", "a packaged model")
    place = resolve(source)
    if place.is_file():
        return _file(place)
    config = read_config(place)
    if (place / "adapter_config.json").exists():
        raise LoadError(f"{source} is an adapter (LoRA) for another model; merge it into its model first")
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3", "dflash"):
        raise LoadError(f"{source} is a {kind!r} drafter of speculators; of these eagle3 and dflash are supported")
    if dialect := dflash_formats.detect(config):
        return Found("dflash", dflash_formats.DIALECTS[dialect])
    try:
        checkpoint = Checkpoint.read(place)
    except LoadError:
        if config.get("architectures"):
            return Found("model", "a causal language model")  # what is wrong with its files is said when it is loaded
        raise
    return _folder(source, checkpoint)


def _folder(source: str, checkpoint: Checkpoint) -> Found:
    if "hydra_num_heads" in checkpoint.config or hydra.detect(checkpoint):
        architecture = hydra.detect(checkpoint) or "mlp"
        return Found("hydra", hydra.ARCHITECTURES.get(architecture, f"Hydra heads ({architecture})"))
    if dialect := medusa.detect(checkpoint):
        return Found("medusa", medusa.DIALECTS[dialect])
    if dialect := eagle_formats.detect(checkpoint):
        return Found("eagle", eagle_formats.DIALECTS[dialect].title)
    names = set(checkpoint.tensors)
    if (modules := mtp_head.find(checkpoint)) and all(map(modules.holds, names)):
        return Found("mtp", f"multi-token prediction ({modules.layout.family})")
    if (
        not any("embed" in name or name.startswith("transformer.wte") for name in names)
        and "model_type" not in checkpoint.config
    ):
        raise LoadError(
            f"{source} is no drafter that is known here: neither heads (Medusa, Hydra, EAGLE, MTP, DFlash) nor a causal language model; its first "
            f"tensor is {min(names)}"
        )
    return Found("model", "a causal language model")


def _file(path: Path) -> Found:
    if path.suffix != ".gguf":
        raise LoadError(f"{path} is a file; give the folder that it is in, or a .gguf file")
    with open(path, "rb") as file:
        head = file.read(1 << 16)
    found = re.search(rb"general\.architecture\x08\0\0\0.{8}([a-z0-9_.-]+)", head, re.DOTALL)
    architecture = found[1].decode() if found else ""
    if architecture == eagle_gguf.ARCHITECTURE:
        return Found("eagle", eagle_formats.DIALECTS["gguf"].title)
    if architecture == dflash_gguf.ARCHITECTURE:
        return Found("dflash", dflash_formats.DIALECTS["gguf"])
    return Found("model", "a causal language model in a GGUF file")
