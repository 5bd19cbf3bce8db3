"""A target of which only the shape is known: enough to say whether a drafter fits it, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn, Sequence

from ..errors import LoadError
from .base import Target


class DescribedTarget(Target):
    """It has sizes, and computes nothing."""

    def __init__(self, name: str, n_layers: int, hidden_size: int, vocab_size: int, architectures: Sequence[str] = ()):
        """architectures: as transformers' configs name them."""
        self.name = name
        self.n_layers, self.hidden_size, self.vocab_size = n_layers, hidden_size, vocab_size
        self.architectures = list(architectures)
        self.eos: frozenset[int] = frozenset()
        self.context_length = 0

    @classmethod
    def read(cls, source: str) -> DescribedTarget:
        """From the config of a folder, a hub id or a packaged model, or the header of a GGUF file. Raises LoadError."""
        from .gguf import is_gguf

        return cls._of_gguf(source) if is_gguf(source) else cls._of_config(source)

    @classmethod
    def _of_gguf(cls, source: str) -> DescribedTarget:
        from ..gguf_file import open_gguf

        reader = open_gguf(source)
        values = reader.values()
        kind = values.get("general.architecture")
        sizes = [values.get(f"{kind}.{key}") for key in ("block_count", "embedding_length")]
        vocabulary = reader.length("tokenizer.ggml.tokens") or values.get(f"{kind}.vocab_size")
        if not vocabulary or not all(sizes):
            raise LoadError(f"{source} is no language model: its header has no block_count, embedding_length or vocabulary")
        return cls(source, sizes[0] - values.get(f"{kind}.nextn_predict_layers", 0), sizes[1], vocabulary)

    @classmethod
    def _of_config(cls, source: str) -> DescribedTarget:
        from transformers import AutoConfig

        from ..models import PACKAGED, get

        place = str(get(source)) if source in PACKAGED else source
        try:
            config: Any = AutoConfig.from_pretrained(place)
            text = config.get_text_config()
            return cls(source, text.num_hidden_layers, text.hidden_size, text.vocab_size, config.architectures or ())
        except Exception as error:  # transformers and the hub have errors of many kinds
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            wrong = (
                f"there is no folder {source}" if source.startswith(("/", ".", "~")) and not Path(source).exists() else first
            )
            raise LoadError(f"the target {source} cannot be read: {wrong}") from error

    def _cannot(self, *_: Any, **__: Any) -> NoReturn:
        raise LoadError(f"this needs the weights of {self.name}, of which only the shape was read")

    open = truncate = prefill = forward = commit = close = embed = head = _cannot  # type: ignore[assignment]
