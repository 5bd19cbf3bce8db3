"""Outrider: lossless speculative decoding for any target and any drafter.

    import outrider
    engine = outrider.load("smollm2", drafter="suffix")
    result = engine.generate([{"role": "user", "content": "Hello!"}], max_tokens=64)
    print(result.text, result.stats.acceptance_length)
"""

from .decode import Sequence, decode
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
    "decode",
    "load",
    "load_drafter",
    "load_target",
    "read_trace",
    "statistics",
]
