"""A model and a context of a llama.cpp library: rows in, logits and states out."""

from __future__ import annotations

import ctypes
import weakref
from itertools import chain
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from .library import EVAL_CALLBACK, Library
from .placement import Placement

NO_ROOM = 1
"""What `Context.decode` returns when the KV cache has no room for the rows."""


class Model:
    """Weights. Freed when nothing refers to it any more."""

    def __init__(self, library: Library, pointer: int):
        self.library = library
        self.pointer = pointer
        self.vocabulary: int = library.model_get_vocab(pointer)
        weakref.finalize(self, library.model_free, pointer)

    def metadata(self, key: str) -> str | None:
        return self.library.metadata(self.pointer, key)

    def number(self, key: str) -> int | None:
        """A whole number of the metadata below the architecture's name; None where it is missing or a list."""
        value = self.metadata(f"{self.metadata('general.architecture')}.{key}")
        return int(value) if value is not None and value.isdigit() else None


class Context:
    """A KV cache of `cells` cells, and passes over rows. Freed when nothing refers to it, logits included.

    shows: whether inner tensors can be watched, which costs a little in every pass.
    """

    def __init__(self, model: Model, placement: Placement, cells: int, shows: bool = False):
        self.model = model
        self.library = model.library
        self.watch: dict[bytes, list[Tensor]] = {}
        self._callback = EVAL_CALLBACK(self._on_tensor) if shows else None
        pointer = self.library.new_context(model.pointer, placement, cells, self._callback)
        if not pointer:
            raise MemoryError(self.library.last_error() or "no context could be made")
        self.pointer: int = pointer
        weakref.finalize(self, self.library.free, pointer)
        self.rows = placement.n_batch
        self.width: int = self.library.vocab_n_tokens(model.vocabulary)
        self._tokens, self._positions, self._counts = (np.zeros(self.rows, dtype=np.int32) for _ in range(3))
        self._wanted = np.zeros(self.rows, dtype=np.int8)
        self._places = np.zeros(self.rows, dtype=np.uint64)

    @property
    def shows(self) -> bool:
        return self._callback is not None

    def decode(self, tokens: Sequence[int], positions: Sequence[int], ids: Sequence[Sequence[int]], logits: bool) -> int:
        """A pass over at most `rows` rows. ids: the sequences that each row belongs to. Returns the library's status."""
        n = len(tokens)
        flat = np.fromiter(chain.from_iterable(ids), dtype=np.int32)
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._counts[:n] = [len(each) for each in ids]
        self._wanted[:n] = logits
        starts = np.cumsum(self._counts[:n], dtype=np.uint64) - self._counts[:n].astype(np.uint64)
        self._places[:n] = starts * np.uint64(4) + np.uint64(flat.ctypes.data)
        return self.library.decode(self.pointer, self._batch(n))

    def _batch(self, n: int) -> Any:
        batch = self.library.binding.llama_batch()
        batch.n_tokens = n
        arrays: dict[str, np.ndarray] = {"token": self._tokens, "pos": self._positions, "n_seq_id": self._counts}
        arrays |= {"seq_id": self._places, "logits": self._wanted}
        for name, array in arrays.items():
            setattr(batch, name, ctypes.cast(array.ctypes.data, type(getattr(batch, name))))
        return batch

    def logits(self, n: int) -> Tensor:
        """Logits ``[n, width]`` of the last pass, where the library keeps them: the next pass overwrites them."""
        return torch.from_numpy(np.asarray(_Memory(self, self.library.get_logits(self.pointer), (n, self.width))))

    def seq_rm(self, sequence: int, begin: int = 0, end: int = -1) -> None:
        self.library.seq_rm(self.pointer, sequence, begin, end)

    def seq_cp(self, source: int, destination: int, begin: int, end: int) -> None:
        self.library.seq_cp(self.pointer, source, destination, begin, end)

    def _on_tensor(self, tensor: int, ask: bool, _: Any) -> bool:
        """Called for every tensor of the graph: first whether it is wanted, then, if so, when it is computed."""
        found = self.watch.get(self.library.ggml_get_name(tensor))
        if found is None:
            return not ask
        if not ask:
            count = self.library.ggml_nelements(tensor)
            if self.library.ggml_nbytes(tensor) == 4 * count:  # float32; what is not shows up as missing
                values = torch.empty(count)
                self.library.ggml_backend_tensor_get(tensor, values.data_ptr(), 0, 4 * count)
                found.append(values)
        return True


class _Memory:
    """Memory of a context as numpy takes it; whoever holds the array keeps the context alive."""

    def __init__(self, context: Context, pointer: int, shape: tuple[int, ...]):
        self._context = context
        self.__array_interface__ = {"version": 3, "typestr": "<f4", "shape": shape, "data": (pointer, False)}
