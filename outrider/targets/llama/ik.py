"""ik_llama.cpp through ik-llama-cpp-python: a fork of 2024's llama.cpp with faster CPU kernels for several rows."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_int, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

from ...errors import ParameterError
from .library import Library
from .placement import Placement

WRONG_TYPES, WRONG_UNLESS, RIGHT_ROWS = (3, 7), 128, 31
"""Of Q4_1 and Q5_1 weights whose row length is no multiple of 128 it computes garbage from 32 rows on (version 0.1.5)."""
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")
UNUSED = 1 << 1  # of the attributes of a token
DEFRAGMENT_FROM = 0.1
FLASH_TYPES = ("f16", "q8_0", "q4_0", "q4_1", "iq4_nl")
"""Cache types that its flash attention takes on a CPU; with any other it ends the process."""


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

    def check(self, placement: Placement) -> None:
        super().check(placement)
        if placement.flash_attention is False:
            raise ParameterError(
                f"flash_attention: without it {self.title} {self.version} gets attention wrong where a refused branch left a hole in the "
                "cache; leave it on, or take --gguf-library llama.cpp"
            )
        for name in ("cache_type_k", "cache_type_v"):
            if not self.has_gpu and (kind := getattr(placement, name)) not in FLASH_TYPES:
                raise ParameterError(f"{name}: {self.title} on a CPU has no {kind}; it has {', '.join(FLASH_TYPES)}")

    def place_model(self, params: Any, placement: Placement) -> None:
        params.use_mmap = placement.mmap
        params.use_mlock = placement.mlock
        params.repack_tensors = placement.repack

    def place_context(self, params: Any, placement: Placement) -> None:
        params.flash_attn = True
        params.defrag_thold = DEFRAGMENT_FROM  # its cells must be free side by side, and trees leave holes

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

    def defragment(self, context: int) -> bool:
        self._defragment(context)
        return self._update(context) == 0
