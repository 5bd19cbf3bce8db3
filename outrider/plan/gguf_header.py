"""The header of a GGUF file: its keys, and each tensor's dimensions and size. The tensors' data need not be there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..gguf_file import Reader, open_gguf
from .shapes import Part, Shape, Tensors, from_gguf


class _Header(Reader):
    """A reader that stops where the tensors' data begin."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        self.sizes: Tensors = {}
        self.bytes_by_type: Counter[str] = Counter()
        for field in fields:
            _, name, _, dims, kind, _ = field.parts
            type_ = GGMLQuantizationType(kind[0])
            shape = tuple(int(d) for d in dims)
            elements = 1
            for d in shape:
                elements *= d
            block, size = GGML_QUANT_SIZES[type_]
            part = Part(elements, elements * size // block)
            self.sizes[bytes(name).decode()] = (shape, part)
            self.bytes_by_type[type_.name] += int(part.bytes)


def read_gguf(path: Path) -> Shape:
    """The shape of a GGUF file's model. Raises LoadError where there is no such file, or it is not one."""
    reader = open_gguf(path, _Header)
    keys = {name: value for name, value in reader.values().items() if not name.startswith("tokenizer.")}
    most = reader.bytes_by_type.most_common(1)
    return from_gguf(path.stem, reader.sizes, keys, f"GGUF, mostly {most[0][0]}" if most else "GGUF")
