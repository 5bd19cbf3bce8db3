"""Heads in GGUF files as checkpoints: what llama.cpp's kinds of heads share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Callable, Collection, Mapping

import torch
from torch import Tensor

from ..errors import LoadError
from ..gguf_file import FLOATS, tensor
from .checkpoint import Stored

LAYER_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_hidden_layers": "block_count",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
"""Of decoder layers: the config's key, and the file's behind the architecture's name."""


def keys(path: Path, reader: Any, architecture: str, known: Collection[str], optional: Collection[str]) -> dict[str, Any]:
    """The keys of the architecture, without its name. Raises LoadError for one that is not known, or missing and not optional."""
    values = {name.removeprefix(f"{architecture}."): value for name, value in reader.values(f"{architecture}.").items()}
    if unknown := sorted(values.keys() - set(known)):
        raise LoadError(f"{path}: key {architecture}.{unknown[0]} is not known here; what it changes would be ignored")
    if missing := sorted(set(known) - values.keys() - set(optional)):
        raise LoadError(f"{path} has no key {architecture}.{missing[0]}: it is incomplete, or of another version of llama.cpp")
    return values


def stored(
    path: Path, reader: Any, names: Mapping[str, str], undo: Callable[[str, Tensor], Tensor] = lambda name, rows: rows
) -> dict[str, Stored]:
    """The tensors by a checkpoint's names. names: by the file's. undo: what the file did to a matrix.

    ``d2t`` becomes offsets; norms, which such files hold in float32, get the type of the matrices where that loses nothing. Raises
    LoadError for a tensor that is not known.
    """
    parts = {part.name: part for part in reader.tensors}
    if unknown := sorted(parts.keys() - names.keys()):
        raise LoadError(f"{path}: tensor {unknown[0]} is not known here; a head that lacks it would draft nonsense")
    if "fc.weight" not in parts:
        raise LoadError(f"{path} has no tensor fc.weight: it is incomplete")
    kind = FLOATS.get(parts["fc.weight"].tensor_type, torch.float32)

    def load(name: str, part: Any) -> Tensor:
        values = tensor(part)
        if name == "d2t":
            return values.long() - torch.arange(len(values))
        if values.dim() > 1:
            return undo(name, values)
        narrow = values.to(kind)
        return narrow if torch.equal(narrow.float(), values) else values

    found = {}
    for theirs, part in parts.items():
        shape = tuple(int(n) for n in reversed(part.shape))
        found[names[theirs]] = Stored(shape, partial(load, names[theirs], part), path.name)
    return found
