"""What the GGUF target needs of a llama.cpp library: some thirty C functions under one name each.

The libraries differ in the names of a few functions, in the structures of parameters, and in what they can do. A subclass says
so; all else is bound here, from one table. Pointers to models, vocabularies and contexts are plain integers.
"""

from __future__ import annotations

import ctypes
import re
from abc import ABC, abstractmethod
from collections import deque
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from importlib.metadata import version
from typing import Any, Callable, ClassVar

from ...errors import ParameterError
from .interrupts import deferred
from .placement import Placement

SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "log_set": (None, (c_void_p, c_void_p)),
    "backend_init": (None, ()),
    "supports_gpu_offload": (c_bool, ()),
    "supports_mlock": (c_bool, ()),
    "model_free": (None, (c_void_p,)),
    "model_n_layer": (c_int32, (c_void_p,)),
    "model_n_embd": (c_int32, (c_void_p,)),
    "model_n_ctx_train": (c_int32, (c_void_p,)),
    "model_n_params": (c_uint64, (c_void_p,)),
    "model_size": (c_uint64, (c_void_p,)),
    "model_desc": (c_int32, (c_void_p, c_char_p, c_size_t)),
    "model_meta_val_str": (c_int32, (c_void_p, c_char_p, c_char_p, c_size_t)),
    "model_has_encoder": (c_bool, (c_void_p,)),
    "model_is_recurrent": (c_bool, (c_void_p,)),
    "model_is_hybrid": (c_bool, (c_void_p,)),
    "model_get_vocab": (c_void_p, (c_void_p,)),
    "vocab_n_tokens": (c_int32, (c_void_p,)),
    "vocab_type": (c_int, (c_void_p,)),
    "vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "vocab_bos": (c_int32, (c_void_p,)),
    "vocab_eos": (c_int32, (c_void_p,)),
    "tokenize": (c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "token_to_piece": (c_int32, (c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool)),
    "free": (None, (c_void_p,)),
    "n_ctx": (c_uint32, (c_void_p,)),
    "get_logits": (c_void_p, (c_void_p,)),
}
GGML: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_get_name": (c_char_p, (c_void_p,)),
    "ggml_nbytes": (c_size_t, (c_void_p,)),
    "ggml_nelements": (ctypes.c_int64, (c_void_p,)),
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_cpu_buffer_type": (c_void_p, ()),
    "ggml_backend_buft_name": (c_char_p, (c_void_p,)),
}
ERROR = 4
"""Level of an error in the log."""
LOG_CALLBACK = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
EVAL_CALLBACK = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_PREFIX = re.compile(r"^(?:[a-z_0-9:~]+(?:\(\))?: )*(?:error loading model: |error: )?", re.IGNORECASE)


class BufferOverride(ctypes.Structure):
    """`llama_model_tensor_buft_override`: tensors whose name matches go to this kind of buffer."""

    _fields_ = [("pattern", c_char_p), ("buffer_type", c_void_p)]


class Library(ABC):
    """A loaded library. Raises AttributeError where the binding is of a version without a function that is needed."""

    title: ClassVar[str]
    package: ClassVar[str]
    """Distribution on the Python package index."""
    symbols: ClassVar[dict[str, str]] = {}
    """C names that are not ``llama_`` and the name in SIGNATURES."""
    embedded: ClassVar[bytes]
    """Name of the tensor that enters the first layer."""
    most_sequences: int | None = None
    refused: ClassVar[dict[str, str]] = {}
    """Parameters of Placement that this library has not got, with what to do instead."""

    def __init__(self, binding: Any, lib: ctypes.CDLL):
        self.binding = binding
        self.lib = lib
        self.version = version(self.package)
        self._log: deque[tuple[int, str]] = deque(maxlen=200)
        self._c = {name: self.bind(self.symbols.get(name, f"llama_{name}"), *types) for name, types in SIGNATURES.items()}
        self._c |= {name: self.bind(name, *types) for name, types in GGML.items()}
        self._on_log = LOG_CALLBACK(self._note)
        self._c["log_set"](ctypes.cast(self._on_log, c_void_p), None)
        self._c["backend_init"]()
        self.has_gpu = bool(self._c["supports_gpu_offload"]())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.__dict__["_c"][name]
        except KeyError:
            raise AttributeError(name) from None

    def bind(self, symbol: str, result: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """A function of the library, with types of its own: the binding's are left as they are."""
        return ctypes.CFUNCTYPE(result, *arguments)((symbol, self.lib))

    # ---- what the library says ----------------------------------------------------------------------------------

    def _note(self, level: int, text: bytes, _: Any) -> None:
        self._log.append((level, text.decode("utf-8", "replace")))

    def forget_log(self) -> None:
        self._log.clear()

    def log(self) -> list[str]:
        """The last lines since `forget_log`."""
        return [text for _, text in self._log.copy()]

    def last_error(self) -> str:
        """The first error since `forget_log`, which is the most specific one; without the names of C functions."""
        errors = (text.strip() for level, text in self._log if level == ERROR)
        return next((stripped for text in errors if (stripped := _PREFIX.sub("", text))), "")

    # ---- what differs -------------------------------------------------------------------------------------------

    @abstractmethod
    def place_model(self, params: Any, placement: Placement) -> None:
        """Set what this library's structure for loading models calls by names of its own."""

    @abstractmethod
    def place_context(self, params: Any, placement: Placement) -> None:
        """Set what this library's structure for contexts calls by names of its own."""

    @abstractmethod
    def seq_rm(self, context: int, sequence: int, begin: int, end: int) -> None:
        """Take the positions ``[begin, end)`` away from a sequence; -1 as `end` means all that follow."""

    @abstractmethod
    def seq_cp(self, context: int, source: int, destination: int, begin: int, end: int) -> None:
        """Let these positions of `source` belong to `destination` too. Nothing is moved."""

    @abstractmethod
    def is_unused(self, vocabulary: int, model: int, token: int) -> bool:
        """Whether a token only fills up the vocabulary."""

    def most_rows(self, model: int) -> int | None:
        """Most rows of one computation that come out right for this model, where there is such a limit."""
        return None

    # ---- what is the same ---------------------------------------------------------------------------------------

    def check(self, placement: Placement) -> None:
        """Raise ParameterError for parameters that this library cannot honour."""
        default = Placement()
        for name, instead in self.refused.items():
            if getattr(placement, name) != getattr(default, name):
                raise ParameterError(f"{name}: {self.title} has no such parameter; {instead}")
        if placement.n_gpu_layers and placement.n_gpu_layers > 0 and not self.has_gpu:
            raise ParameterError(
                f"n_gpu_layers is {placement.n_gpu_layers}, but this build of {self.title} ({self.package} {self.version}) has no GPU "
                "backend; install one that has (docs/gguf.md)"
            )
        if self.most_sequences is not None and placement.n_seq_max > self.most_sequences:
            raise ParameterError(f"n_seq_max is {placement.n_seq_max}; {self.title} goes up to {self.most_sequences}")
        if placement.mlock and not self._c["supports_mlock"]():
            raise ParameterError(f"mlock: {self.title} cannot lock memory on this system")

    def gpu_layers(self, placement: Placement) -> int:
        """How many layers go to the GPU: what was asked for, else all where there is one."""
        if not self.has_gpu:
            return 0
        wanted = placement.n_gpu_layers
        return 999 if wanted is None or wanted < 0 else wanted

    def model_params(self, placement: Placement) -> Any:
        """Structure for `load_model`. What it points to is kept alive by attributes of it."""
        params = self.binding.llama_model_default_params()
        params.n_gpu_layers = self.gpu_layers(placement)
        if placement.main_gpu is not None:
            params.main_gpu, params.split_mode = placement.main_gpu, 0
        params.kept = self.overrides(placement)
        params.tensor_buft_overrides = ctypes.cast(params.kept, c_void_p) if params.kept else None
        self.place_model(params, placement)
        return params

    def context_params(self, placement: Placement, cells: int, on_tensor: Any) -> Any:
        """Structure for `new_context`. on_tensor: an EVAL_CALLBACK, or None."""
        params = self.binding.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch, params.n_ubatch = placement.n_batch, placement.n_ubatch
        params.n_seq_max = placement.n_seq_max
        params.n_threads, params.n_threads_batch = placement.threads, placement.threads_batch
        params.type_k, params.type_v = placement.cache_type("k"), placement.cache_type("v")
        if on_tensor is not None:
            params.cb_eval = ctypes.cast(on_tensor, self.binding.ggml_backend_sched_eval_callback)
        self.place_context(params, placement)
        return params

    def load_model(self, path: str, placement: Placement) -> int | None:
        self.forget_log()
        with deferred():
            return self.binding.llama_model_load_from_file(path.encode(), self.model_params(placement))

    def new_context(self, model: int, placement: Placement, cells: int, on_tensor: Any) -> int | None:
        self.forget_log()
        with deferred():
            return self.binding.llama_init_from_model(model, self.context_params(placement, cells, on_tensor))

    def decode(self, context: int, batch: Any) -> int:
        """0: done. 1: no room in the KV cache. Anything else: failed."""
        with deferred():
            return self.binding.llama_decode(context, batch)

    def metadata(self, model: int, key: str) -> str | None:
        """A value of the file's metadata as text."""
        size = self._c["model_meta_val_str"](model, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        self._c["model_meta_val_str"](model, key.encode(), buffer, size + 1)
        return buffer.value.decode("utf-8", "replace")

    def overrides(self, placement: Placement) -> Any:
        """An array of BufferOverride with its end mark, or None where nothing is overridden."""
        wanted = [(rf"blk\.{layer}{EXPERTS}", "CPU") for layer in range(placement.n_cpu_moe)]
        wanted += [tuple(text.rsplit("=", 1)) for text in placement.tensor_overrides]  # type: ignore[misc]
        if not wanted:
            return None
        known = self.buffer_types()
        if unknown := next((name for _, name in wanted if name not in known), None):
            raise ParameterError(f"tensor_overrides: unknown buffer {unknown!r}; this library has {', '.join(known)}")
        made = [BufferOverride(pattern.encode(), known[name]) for pattern, name in wanted]
        return (BufferOverride * (len(made) + 1))(*made)

    def buffer_types(self) -> dict[str, int]:
        """Kinds of buffers that tensors can be put into, by name."""
        cpu = self._c["ggml_backend_cpu_buffer_type"]()
        return {self._c["ggml_backend_buft_name"](cpu).decode(): cpu}
