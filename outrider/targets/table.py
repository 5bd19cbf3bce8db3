"""An exact toy target for tests and docs: a small random table of laws, and letters as tokens.

The law of the next token depends on the last `order` tokens alone and is computed in float64, one row at a time, so a pass
over a tree rounds exactly as passes over single tokens do.
"""

from __future__ import annotations

import hashlib
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import ParameterError
from ..text import Message
from ..tree import DraftTree
from .base import LayerKey, Output, Slot, Target


class LetterTokenizer:
    """Token i is the i-th of `texts`; encoding takes the longest match at each place."""

    def __init__(self, texts: Sequence[str], special: frozenset[int] = frozenset()):
        self.texts = list(texts)
        self.size = len(self.texts)
        self.special = special

    def encode(self, text: str) -> list[int]:
        return self.encode_plain(text)

    def encode_plain(self, text: str) -> list[int]:
        tokens, at = [], 0
        while at < len(text):
            fitting = [i for i, t in enumerate(self.texts) if t and i not in self.special and text.startswith(t, at)]
            if not fitting:
                raise ParameterError(f"this tokenizer has no token for {text[at]!r}")
            tokens.append(max(fitting, key=lambda i: len(self.texts[i])))
            at += len(self.texts[tokens[-1]])
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.texts[t] for t in tokens if t not in self.special)

    template = None

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode_plain(self.render(messages, tools))

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if tools:
            raise ParameterError("tools: letters have no chat template that shows them")
        return "".join(message["content"] for message in messages)

    def token_text(self, token: int) -> str:
        return self.texts[token]

    def vocabulary(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.texts)}


class TableSlot(Slot):
    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens = list(tokens)
        self.pending: DraftTree | None = None

    @property
    def length(self) -> int:  # type: ignore[override]
        return len(self.tokens)


class TableTarget(Target):
    """A random law for each context of `order` tokens.

    seed: which laws. sharpness: spread of the logits; higher is more certain. noise, noise_seed: adds a second table to the
    first, which makes a related model: a drafter that is often right. eos_bias: added to the logits of the end tokens.
    hidden_size: width of the hidden states, a fixed random function of context and layer.
    """

    def __init__(
        self,
        vocab_size: int = 12,
        seed: int = 0,
        order: int = 2,
        sharpness: float = 2.0,
        noise: float = 0.0,
        noise_seed: int = 1,
        eos: Sequence[int] = (0,),
        eos_bias: float = 0.0,
        context_length: int = 256,
        texts: Sequence[str] | None = None,
        hidden_size: int = 8,
    ):
        self.name = f"table-{seed}"
        self.vocab_size = vocab_size
        self.eos = frozenset(eos)
        self.context_length = context_length
        self.n_layers = 2
        self.hidden_size = hidden_size
        self.dtype = torch.float64
        texts = texts or [chr(ord("a") + i % 26) + ("" if i < 26 else str(i // 26)) for i in range(vocab_size)]
        self.tokenizer = LetterTokenizer(texts, self.eos)
        self.open_slots = 0
        self.rows_computed = 0
        self._law = (seed, order, sharpness, noise, noise_seed, eos_bias)
        self._memo: dict[tuple[int, ...], Tensor] = {}

    def open(self, like: Slot | None = None, length: int = 0) -> TableSlot:
        self.open_slots += 1
        return TableSlot(like.tokens[:length] if isinstance(like, TableSlot) else ())

    def truncate(self, slot: Slot, length: int) -> None:
        del self._live(slot).tokens[length:]

    def prefill(
        self, slot: Slot, tokens: Sequence[int], layers: Sequence[LayerKey] = (), logits: bool = False
    ) -> Iterator[Output]:
        live = self._live(slot)
        for start in range(0, len(tokens), 5):
            chunk = DraftTree.chain(tokens[start], tokens[start + 1 : start + 5])
            (output,) = self.forward([(slot, chunk)], layers)
            self.commit(slot, range(len(chunk)))
            if not logits:
                output.logits = None
            yield output
            assert live.pending is None

    def forward(
        self,
        work: Sequence[tuple[Slot, DraftTree]],
        layers: Sequence[LayerKey] = (),
        upto: int | None = None,
        skip: Sequence[int] = (),
    ) -> list[Output]:
        left_out = sorted({*skip, *range(self.n_layers if upto is None else upto, self.n_layers)})
        if left_out and layers:
            raise ParameterError("a partial pass (upto, skip) has no hidden states to give")
        outputs = []
        for slot, tree in work:
            live = self._live(slot)
            assert live.pending is None, "commit must follow each pass"
            live.pending = tree
            contexts = [(*live.tokens, tree.tokens[0], *tree.path_tokens(i)) for i in range(len(tree))]
            self.rows_computed += len(tree)
            logits = torch.stack([self.logits(context) for context in contexts])
            for layer in left_out:  # it has no layers; each that is left out disturbs the law
                logits = logits + 0.5 * torch.stack([self._disturbance(layer, context) for context in contexts])
            hidden = {key: torch.stack([self._hidden(context, key) for context in contexts]) for key in layers}
            outputs.append(Output(logits, hidden, start=len(live.tokens)))
        return outputs

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        live = self._live(slot)
        assert live.pending is not None, "nothing to commit"
        live.tokens += [live.pending.tokens[i] for i in path]
        live.pending = None

    def close(self, slot: Slot) -> None:
        if not slot.closed:
            slot.closed = True
            self.open_slots -= 1

    def logits(self, context: Sequence[int]) -> Tensor:
        """Logits ``[V]`` of the next token, float64."""
        seed, order, sharpness, noise, noise_seed, eos_bias = self._law
        key = tuple(context[-order:]) if order else ()
        if key not in self._memo:
            row = sharpness * _normal((seed, key), self.vocab_size)
            if noise:
                row = row + noise * _normal((noise_seed, key), self.vocab_size)
            row[list(self.eos)] += eos_bias
            self._memo[key] = row
        return self._memo[key]

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return torch.stack([_normal(("embedding", token), self.hidden_size) for token in tokens])

    def head(self, hidden: Tensor) -> Tensor:
        raise ParameterError("the table target has no output head to lend")

    def _disturbance(self, layer: int, context: Sequence[int]) -> Tensor:
        seed, order, *_ = self._law
        return _normal(("left out", seed, layer, tuple(context[-order:]) if order else ()), self.vocab_size)

    def _hidden(self, context: Sequence[int], layer: LayerKey) -> Tensor:
        return _normal((layer, tuple(context[-self._law[1] :])), self.hidden_size)

    @staticmethod
    def _live(slot: Slot) -> TableSlot:
        assert isinstance(slot, TableSlot) and not slot.closed, "the slot is closed"
        return slot


def _normal(key: object, n: int) -> Tensor:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.from_numpy(np.random.default_rng(int.from_bytes(digest, "big")).standard_normal(n))
