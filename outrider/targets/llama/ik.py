"""ik_llama.cpp through ik-llama-cpp-python: a fork of 2024's llama.cpp with faster CPU kernels for several rows."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_int, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

from ...errors import ParameterError
from .interrupts import deferred
from .library import Library
from .placement import Placement

WRONG_TYPES, WRONG_UNLESS, RIGHT_ROWS = (3, 7), 128, 31
"""Of Q4_1 and Q5_1 weights whose row length is no multiple of 128 it computes garbage from 32 rows on (version 0.1.5)."""
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")
UNUSED = 1 << 1  # of the attributes of a token
FAILED = -1  # a status that is not of the library
CACHE_TYPES = {"cache_type_k": ("f32", "f16", "bf16"), "cache_type_v": ("f16", "bf16")}
"""What is right without flash attention: quantised keys come out wrong where holes are closed, and other values are refused."""


class CacheView(ctypes.Structure):
    """`llama_kv_cache_view`: how the cells of a cache are used."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in ("n_cells", "n_seq_max", "token_count", "used_cells", "max_contiguous", "max_contiguous_idx")
        ),
        ("cells", c_void_p),
        ("cells_sequences", c_void_p),
    ]

    @property
    def has_holes(self) -> bool:
        """Whether a free cell lies below a used one."""
        free = self.n_cells - self.used_cells
        return free > 0 and (self.max_contiguous, self.max_contiguous_idx) != (free, self.used_cells)


class IkLibrary(Library):
    title = "ik_llama.cpp"
    package = "ik-llama-cpp-python"
    embedded = b"inp_embd"
    symbols: ClassVar = {
        "model_free": "llama_free_model",
        "model_n_layer": "llama_n_layer",
        "model_n_ctx_train": "llama_n_ctx_train",
        "tokenize": "llama_vocab_tokenize",
        "token_to_piece": "llama_token_to_piece_vocab",
    }

    def __init__(self) -> None:
        from ik_llama_cpp import _ctypes_api as binding

        super().__init__(binding, binding._lib)
        place = (c_void_p, c_int32, c_int32, c_int32)
        self._rm = self.bind("llama_kv_cache_seq_rm", c_bool, place)
        self._cp = self.bind("llama_kv_cache_seq_cp", None, (c_void_p, c_int32, c_int32, c_int32, c_int32))
        self._attributes = self.bind("llama_token_get_attr", c_int, (c_void_p, c_int32))
        self._defragment = self.bind("llama_kv_cache_defrag", None, (c_void_p,))
        self._weight = self.bind("llama_get_model_tensor", c_void_p, (c_void_p, c_char_p))
        self._rows = self.bind("ggml_nrows", c_int64, (c_void_p,))
        self._update = self.bind("llama_kv_cache_update", c_int32, (c_void_p,))
        self._view = self.bind("llama_kv_cache_view_init", CacheView, (c_void_p, c_int32))
        self._look = self.bind("llama_kv_cache_view_update", None, (c_void_p, ctypes.POINTER(CacheView)))
        self._forget = self.bind("llama_kv_cache_view_free", None, (ctypes.POINTER(CacheView),))

    def check(self, placement: Placement) -> None:
        super().check(placement)
        if placement.flash_attention:
            raise ParameterError(
                f"flash_attention: that of {self.title} {self.version} leaves out cells which a row should see where sequences or branches "
                "share the cache; leave it off, or take --gguf-library llama.cpp"
            )
        for name, right in CACHE_TYPES.items():
            if (kind := getattr(placement, name)) not in right:
                raise ParameterError(
                    f"{name}: {self.title} {self.version} gets {kind} wrong where sequences or branches share the cache; it has "
                    f"{', '.join(right)}; or take --gguf-library llama.cpp"
                )

    def place_model(self, params: Any, placement: Placement) -> None:
        params.use_mmap = placement.mmap
        params.use_mlock = placement.mlock
        params.repack_tensors = placement.repack

    def place_context(self, params: Any, placement: Placement) -> None:
        params.flash_attn = False
        params.defrag_thold = -1.0  # `decode` sees to it

    def most_rows(self, model: int) -> int | None:
        names = ["output.weight", "token_embd.weight"]
        names += [f"blk.{i}.{name}.weight" for i in range(self.model_n_layer(model)) for name in (*MATRICES, *EXPERTS)]
        for name in names:
            if not (weight := self._weight(model, name.encode())):
                continue
            kind = ctypes.cast(weight, ctypes.POINTER(c_int32))[0]  # the first member of a ggml_tensor
            if kind in WRONG_TYPES and self.ggml_nelements(weight) // self._rows(weight) % WRONG_UNLESS:
                return RIGHT_ROWS
        return None

    def seq_rm(self, context: int, sequence: int, begin: int, end: int) -> None:
        self._rm(context, sequence, begin, end)

    def seq_cp(self, context: int, source: int, destination: int, begin: int, end: int) -> None:
        self._cp(context, source, destination, begin, end)

    def is_unused(self, vocabulary: int, model: int, token: int) -> bool:
        return bool(self._attributes(model, token) & UNUSED)

    def decode(self, context: int, batch: Any) -> int:
        """As in any library, but the cache's holes are closed first: what lies behind one may not be seen (version 0.1.5), and the
        cells of a pass must be free side by side.
        """
        with deferred():
            while (before := self._cells(context)).has_holes:
                self._defragment(context)  # closes some
                if self._update(context) or bytes(self._cells(context)) == bytes(before):
                    return FAILED
        return super().decode(context, batch)

    def _cells(self, context: int) -> CacheView:
        """How the cells are used now, without what each of them holds."""
        view = self._view(context, 1)
        self._look(context, view)
        self._forget(view)
        view.cells = view.cells_sequences = None
        return view
