"""Reading GGUF files in Python: keys and tensors, without the half minute that a large vocabulary takes in the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from .errors import LoadError

FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class Reader(GGUFReader):
    """The package's reader, but an array is one part, and is only made into a list when its key is asked for."""

    def __init__(self, path: str | Path):
        self._arrays: list[tuple[GGUFValueType, int, int]] = []  # kind, offset of the first element, how many
        super().__init__(path)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count, start = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        self._arrays.append((kind, start, count))
        if kind == GGUFValueType.STRING:
            end = start
            for _ in range(count):
                end += 8 + self._length(end)
        elif kind == GGUFValueType.ARRAY:
            raise ValueError("it has arrays of arrays")
        else:
            end = start + count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, kind]

    def _length(self, offset: int) -> int:
        """Of the string at `offset`."""
        data = memoryview(np.asarray(self.data))  # type: ignore[arg-type]
        if offset + 8 > len(data):
            raise ValueError("it ends within its keys")
        return int.from_bytes(data[offset : offset + 8], self._order)  # type: ignore[arg-type]

    @property
    def _order(self) -> Any:
        return "little" if self.endianess.name == "LITTLE" else "big"

    def kinds(self) -> dict[str, list[GGUFValueType]]:
        """By key: the kind of its value; of an array, then that of its elements."""
        return {name: field.types for name, field in self.fields.items() if not name.startswith("GGUF.")}

    def values(self, prefix: str = "") -> dict[str, Any]:
        """The keys that begin with `prefix` with their values. 32-bit numbers are the shortest decimals that mean them."""
        arrays, found = iter(self._arrays), dict[str, Any]()
        for name, kinds in self.kinds().items():
            array = next(arrays) if kinds[0] == GGUFValueType.ARRAY else None
            if not name.startswith(prefix):
                continue
            if array is not None:
                found[name] = self._list(*array)
            else:
                value = self.fields[name].contents()
                found[name] = float(str(np.float32(value))) if kinds[0] == GGUFValueType.FLOAT32 else value
        return found

    def length(self, name: str) -> int:
        """Of the array under this key; 0 where there is none."""
        arrays = [key for key, kinds in self.kinds().items() if kinds[0] == GGUFValueType.ARRAY]
        return self._arrays[arrays.index(name)][2] if name in arrays else 0

    def _list(self, kind: GGUFValueType, start: int, count: int) -> list[Any]:
        if kind != GGUFValueType.STRING:
            return self._get(start, self.gguf_scalar_to_np[kind], count).tolist()
        data, texts = memoryview(np.asarray(self.data)), []  # type: ignore[arg-type]
        for _ in range(count):
            end = start + 8 + self._length(start)
            texts.append(str(data[start + 8 : end], "utf-8"))
            start = end
        return texts


def open_gguf(path: str | Path, kind: type[Reader] = Reader) -> Any:
    """A reader of a GGUF file. Raises LoadError where there is no such file, or it is not one."""
    try:
        return kind(path)
    except FileNotFoundError:
        raise LoadError(f"there is no file {path}") from None
    except Exception as error:  # of many kinds, from whatever the bytes were taken for
        raise LoadError(f"{path} cannot be read: no GGUF header, or a damaged one ({error})") from error


def add_key(writer: Any, name: str, value: Any, kinds: list[GGUFValueType]) -> None:
    """Give a writer of the `gguf` package a key as `Reader` has it."""
    kind, *inner = kinds
    writer.add_key_value(name, value, kind, inner[0] if inner else None)


def tensor(part: ReaderTensor) -> Tensor:
    """A tensor of a file, in its own type; quantised ones as float32."""
    data = part.data
    if part.tensor_type == GGMLQuantizationType.BF16:
        return torch.from_numpy(np.array(data)).view(torch.bfloat16)
    if part.tensor_type in FLOATS or np.issubdtype(data.dtype, np.signedinteger):
        return torch.from_numpy(np.array(data))
    return torch.from_numpy(dequantize(data, part.tensor_type))
