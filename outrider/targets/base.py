"""What the loop asks of a target: a model behind a KV cache that only it can see.

Hidden states are keyed by layer entry: ``k`` is the residual stream entering layer k, ``n_layers`` the one after the
last layer before the final norm, ``"final"`` the output head's input after that norm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from ..errors import ParameterError
from ..grammar import Grammars, Matcher
from ..params import SamplingParams
from ..text import Tokenizer
from ..tree import DraftTree

LayerKey = int | str


@dataclass
class Output:
    """What one pass says about one sequence. Valid until the next pass of the same target; copy what you keep.

    logits: ``[n, V]``, row i predicts the token after node i; None where nobody asked (prefill).
    hidden: ``{key: [n, H]}`` for the layers asked for.
    start: position in the sequence of row 0; row i stands at ``start + depth(i)``.
    """

    logits: Tensor | None
    hidden: dict[LayerKey, Tensor] = field(default_factory=dict)
    start: int = 0


class Slot:
    """One sequence in a target's cache. Targets subclass it; the loop reads `length` and passes it back."""

    length: int = 0
    """Number of tokens whose KV is kept."""
    closed: bool = False


class Target(ABC):
    """A causal language model whose distribution is kept."""

    name: str
    """What the user called it: a path, a hub id, an alias."""
    vocab_size: int
    """Width of the logits: the tokenizer's ids, without padding rows."""
    eos: frozenset[int]
    """Every token id that ends a generation."""
    context_length: int
    """Most tokens, prompt included, that a sequence may have."""
    n_layers: int
    hidden_size: int
    tokenizer: Tokenizer | None = None
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    n_parameters: int = 0

    @abstractmethod
    def open(self, like: Slot | None = None, length: int = 0) -> Slot:
        """A new sequence; with `like`, a fork that starts with the first `length` tokens of that slot."""

    @abstractmethod
    def truncate(self, slot: Slot, length: int) -> None:
        """Forget everything after the first `length` tokens."""

    @abstractmethod
    def prefill(
        self, slot: Slot, tokens: Sequence[int], layers: Sequence[LayerKey] = (), logits: bool = False
    ) -> Iterator[Output]:
        """Append `tokens` to the slot's cache in chunks, yielding one Output a chunk. The caller exhausts the iterator.

        Logits are computed only when asked for: prompt rows need none.
        """

    @abstractmethod
    def forward(
        self,
        work: Sequence[tuple[Slot, DraftTree]],
        layers: Sequence[LayerKey] = (),
        upto: int | None = None,
        skip: Sequence[int] = (),
    ) -> list[Output]:
        """One pass over all nodes of all trees. `commit` must follow for every slot before its next pass.

        upto: run only the first `upto` layers. skip: leave these layers out. Both are for self-speculation; a target
        that cannot do them raises ParameterError.
        """

    @abstractmethod
    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        """Keep the KV of these nodes of the last pass, in this order; drop all its others.

        The path starts with 0, or is empty: then the whole pass is dropped.
        """

    @abstractmethod
    def close(self, slot: Slot) -> None:
        """Free what the slot holds. Closing twice is harmless."""

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Input embeddings ``[n, H]``, for heads that borrow them."""
        raise NotImplementedError(f"{type(self).__name__} does not lend its embeddings")

    def head(self, hidden: Tensor) -> Tensor:
        """Logits ``[n, V]`` of the output head for ``"final"`` hidden states ``[n, H]``."""
        raise NotImplementedError(f"{type(self).__name__} does not lend its output head")

    @cached_property
    def _grammars(self) -> Grammars:
        assert self.tokenizer is not None
        return Grammars(self.tokenizer, self.vocab_size)

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """What holds a sequence to the grammar that `params` ask for, if they do. Raises ParameterError for a broken one."""
        grammar = params.grammar
        if grammar is None:
            return None
        if self.tokenizer is None:
            raise ParameterError(f"{grammar.kind} needs a tokenizer, and {self.name} has none")
        return self._grammars.matcher(grammar, self.eos | frozenset(params.stop_token_ids))

    def memory(self) -> dict[str, int]:
        """Bytes held, by kind: ``weights`` and ``kv_per_token`` at least, where they are known."""
        return {}

    def describe(self) -> dict[str, Any]:
        """What `outrider check` shows about this target."""
        return {
            "name": self.name,
            "parameters": self.n_parameters,
            "layers": self.n_layers,
            "hidden": self.hidden_size,
            "vocabulary": self.vocab_size,
            "context": self.context_length,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
        }
