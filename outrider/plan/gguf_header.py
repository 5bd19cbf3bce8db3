"""The header of a GGUF file: its keys, and each tensor's dimensions and size. The tensors' data need not be there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import LoadError
from .shapes import Part, Shape, Tensors, from_gguf


class _Header(GGUFReader):
    """A reader that stops where the tensors' data begin, and skips lists of texts (a vocabulary takes it half a minute)."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY or self._get(orig_offs, np.uint32)[0] != GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        order = "little" if self.endianess.name == "LITTLE" else "big"
        data = memoryview(np.asarray(self.data))  # type: ignore[arg-type]
        end = orig_offs + 12
        for _ in range(int(self._get(orig_offs + 4, np.uint64)[0])):
            if end + 8 > len(data):
                raise ValueError("it ends within its keys")
            end += 8 + int.from_bytes(data[end : end + 8], order)  # type: ignore[arg-type]
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType.STRING]

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
    if not path.is_file():
        raise LoadError(f"there is no file {path}")
    try:
        reader = _Header(path)
        keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    except Exception as error:  # of many kinds, from whatever the bytes were taken for
        raise LoadError(f"cannot read the GGUF header of {path}: {error}") from error
    most = reader.bytes_by_type.most_common(1)
    return from_gguf(path.stem, reader.sizes, keys, f"GGUF, mostly {most[0][0]}" if most else "GGUF")
