"""Where a GGUF model's weights and cache lie, and what computes it: the parameters that llama.cpp's users know."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import ParameterError

CACHE_TYPES = {  # name: number in ggml, bytes of an element
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "bf16": (30, 2.0),
    "q8_0": (8, 34 / 32),
    "q5_1": (7, 24 / 32),
    "q5_0": (6, 22 / 32),
    "q4_1": (3, 20 / 32),
    "q4_0": (2, 18 / 32),
    "iq4_nl": (20, 18 / 32),
}


@dataclass(frozen=True)
class Placement:
    """n_gpu_layers: layers on the GPU; all by default, where the library has one. n_cpu_moe: of this many first layers the
    experts stay on the CPU. tensor_overrides: ``PATTERN=BUFFER``, for tensors whose name matches. main_gpu: the one GPU to use
    instead of all. threads, threads_batch: for passes over one row and over several; as many as PyTorch uses by default.
    flash_attention: yes, no, or the library's own choice. cache_type_k, cache_type_v: of the KV cache. mmap, mlock: how the
    file is held in memory. repack: interleave the weights' rows at loading, which makes passes over several rows cheaper on a
    CPU. n_ctx: cells of the KV cache, shared by all sequences; 8192 by default, or the model's own context where that is
    shorter. n_batch, n_ubatch: most rows of one call and of one computation. n_seq_max: most sequences and leaves of draft
    trees at once.
    """

    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    tensor_overrides: tuple[str, ...] = ()
    main_gpu: int | None = None
    threads: int | None = None
    threads_batch: int | None = None
    flash_attention: bool | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    mmap: bool = True
    mlock: bool = False
    repack: bool = True
    n_ctx: int | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 64

    def __post_init__(self) -> None:
        least = {"n_cpu_moe": 0, "main_gpu": 0, "threads": 1, "threads_batch": 1, "n_ctx": 1, "n_batch": 1, "n_ubatch": 1}
        for name, lowest in {**least, "n_gpu_layers": -1, "n_seq_max": 1}.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**31):
                raise ParameterError(f"{name} must be a whole number, {lowest} or more; got {value!r}")
        for name in ("cache_type_k", "cache_type_v"):
            if getattr(self, name) not in CACHE_TYPES:
                raise ParameterError(f"{name} must be one of {', '.join(CACHE_TYPES)}; got {getattr(self, name)!r}")
        if self.n_ubatch > self.n_batch:
            raise ParameterError(f"n_ubatch ({self.n_ubatch}) cannot be more than n_batch ({self.n_batch})")
        for text in self.tensor_overrides:
            pattern, equals, buffer = text.rpartition("=")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ParameterError(f"tensor_overrides: {pattern!r} is not a regular expression ({error})") from error
            if not (pattern and equals and buffer):
                raise ParameterError(f"tensor_overrides are written PATTERN=BUFFER; got {text!r}")

    def cache_type(self, which: str) -> int:
        """ggml's number of the type of ``k`` or ``v``."""
        return CACHE_TYPES[getattr(self, f"cache_type_{which}")][0]
