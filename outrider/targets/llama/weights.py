"""The embedding and the output matrix of a GGUF file as floats, for heads that borrow them."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Sequence

import torch
from torch import Tensor

_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


class Matrices:
    """Read when they are first asked for: of the embedding only the rows, the output matrix whole."""

    def __init__(self, path: str):
        self._path = path

    def embedding(self, tokens: Sequence[int]) -> Tensor:
        """Rows of the embedding, ``[n, H]``."""
        return self._floats(self._tensors["token_embd.weight"], list(tokens))

    @cached_property
    def output(self) -> Tensor:
        """The output matrix ``[V, H]``: the embedding, where the file has none of its own."""
        return self._floats(self._tensors.get("output.weight", self._tensors["token_embd.weight"]), slice(None))

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        from ...gguf_file import open_gguf

        found = (t for part in self._parts() for t in open_gguf(part).tensors)
        return {t.name: t for t in found if t.name in ("token_embd.weight", "output.weight")}

    def _parts(self) -> list[str]:
        if not (match := _PART.search(self._path)):
            return [self._path]
        stem, parts = self._path[: match.start()], match.group(1)
        names = [f"{stem}-{i:05}-of-{parts}.gguf" for i in range(1, int(parts) + 1)]
        return [name for name in names if Path(name).exists()]

    @staticmethod
    def _floats(tensor: Any, rows: Any) -> Tensor:
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(tensor.data[rows], tensor.tensor_type)).float()
