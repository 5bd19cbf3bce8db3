"""Outrider: lossless speculative decoding for any target and any drafter.

import outrider
engine = outrider.load("smollm2", drafter="suffix")
result = engine.generate([{"role": "user", "content": "Hello!"}], max_tokens=64)
print(result.text, result.stats.acceptance_length)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode import Sequence
    from .drafters import load_drafter
    from .engine import Chat, Chunk, Engine, Result, load
    from .errors import OutriderError
    from .models import load_target
    from .sampling import SamplingParams
    from .trace import Round, Statistics, read_trace, statistics
    from .tree import Budget, DraftTree

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "Chat",
    "Chunk",
    "DraftTree",
    "Engine",
    "OutriderError",
    "Result",
    "Round",
    "SamplingParams",
    "Sequence",
    "Statistics",
    "load",
    "load_drafter",
    "load_target",
    "read_trace",
    "statistics",
]

_MODULES = {
    "decode": ("Sequence",),
    "drafters": ("load_drafter",),
    "engine": ("Chat", "Chunk", "Engine", "Result", "load"),
    "errors": ("OutriderError",),
    "models": ("load_target",),
    "sampling": ("SamplingParams",),
    "trace": ("Round", "Statistics", "read_trace", "statistics"),
    "tree": ("Budget", "DraftTree"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Modules are imported when a name of theirs is first used, so that `outrider --help` need not wait for PyTorch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_PLACES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
