"""llama.cpp itself through llama-cpp-python, on whatever GPU that was built for."""

from __future__ import annotations

from ctypes import c_bool, c_int, c_int32, c_size_t, c_void_p
from typing import Any

from ...errors import ParameterError
from .library import Library
from .placement import Placement

PLAIN_TYPES = ("f32", "f16", "bf16")
UNUSED = 1 << 1  # of the attributes of a token
MMAP, MLOCK = 1, 2  # of `llama_load_mode`; both are 3, none is 0


class MainlineLibrary(Library):
    title = "llama.cpp"
    package = "llama-cpp-python"
    embedded = b"embd"

    def __init__(self) -> None:
        from llama_cpp import llama_cpp as binding

        super().__init__(binding, binding._lib)
        self._memory = self.bind("llama_get_memory", c_void_p, (c_void_p,))
        self._rm = self.bind("llama_memory_seq_rm", c_bool, (c_void_p, c_int32, c_int32, c_int32))
        self._cp = self.bind("llama_memory_seq_cp", None, (c_void_p, c_int32, c_int32, c_int32, c_int32))
        self._attributes = self.bind("llama_vocab_get_attr", c_int, (c_void_p, c_int32))
        self._devices = self.bind("ggml_backend_dev_count", c_size_t, ())
        self._device = self.bind("ggml_backend_dev_get", c_void_p, (c_size_t,))
        self._device_buffer = self.bind("ggml_backend_dev_buffer_type", c_void_p, (c_void_p,))
        self.most_sequences = self.bind("llama_max_parallel_sequences", c_size_t, ())()

    def place_model(self, params: Any, placement: Placement) -> None:
        params.load_mode = MMAP * placement.mmap + MLOCK * placement.mlock
        params.use_extra_bufts = placement.repack

    def place_context(self, params: Any, placement: Placement) -> None:
        params.kv_unified = params.swa_full = True  # cells of all sequences in one pool; windows can be rolled back
        if placement.flash_attention is not None:
            params.flash_attn_type = int(placement.flash_attention)

    def check(self, placement: Placement) -> None:
        super().check(placement)
        if placement.n_batch < placement.n_seq_max:
            raise ParameterError(
                f"n_batch ({placement.n_batch}) must be at least n_seq_max ({placement.n_seq_max}) in {self.title}"
            )
        quantised = placement.cache_type_v not in PLAIN_TYPES
        if quantised and placement.flash_attention is False:
            raise ParameterError(f"cache_type_v: {self.title} has no {placement.cache_type_v} without flash attention")

    def seq_rm(self, context: int, sequence: int, begin: int, end: int) -> None:
        self._rm(self._memory(context), sequence, begin, end)

    def seq_cp(self, context: int, source: int, destination: int, begin: int, end: int) -> None:
        self._cp(self._memory(context), source, destination, begin, end)

    def is_unused(self, vocabulary: int, model: int, token: int) -> bool:
        return bool(self._attributes(vocabulary, token) & UNUSED)

    def buffer_types(self) -> dict[str, int]:
        buffers = [self._device_buffer(self._device(i)) for i in range(self._devices())]
        return super().buffer_types() | {self.ggml_backend_buft_name(each).decode(): each for each in buffers if each}
