"""A target of which only the shape is known: enough to say whether a drafter fits it, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, NoReturn, Sequence

from torch import Tensor

from ..errors import LoadError
from ..tree import DraftTree
from .base import LayerKey, Output, Slot, Target


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

    def open(self, like: Slot | None = None, length: int = 0) -> Slot:
        self._cannot()

    def truncate(self, slot: Slot, length: int) -> None:
        self._cannot()

    def prefill(
        self, slot: Slot, tokens: Sequence[int], layers: Sequence[LayerKey] = (), logits: bool = False
    ) -> Iterator[Output]:
        self._cannot()

    def forward(
        self,
        work: Sequence[tuple[Slot, DraftTree]],
        layers: Sequence[LayerKey] = (),
        upto: int | None = None,
        skip: Sequence[int] = (),
    ) -> list[Output]:
        self._cannot()

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        self._cannot()

    def close(self, slot: Slot) -> None:
        self._cannot()

    def embed(self, tokens: Sequence[int]) -> Tensor:
        self._cannot()

    def head(self, hidden: Tensor) -> Tensor:
        self._cannot()
