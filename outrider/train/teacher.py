"""What the target says about a text: the states that drafters read, and the law of the next token."""

from __future__ import annotations

from collections import Counter
from typing import Sequence

import torch
from torch import Tensor

from ..errors import ParameterError
from ..targets.base import LayerKey, Target
from .store import Sample


def count_vocabulary(samples: Sequence[Sample], size: int, vocab_size: int) -> Tensor:
    """Ids ``[size]``, ascending, of the tokens that answers have most often; of equals the lowest. All, if size is 0 or that large."""
    if is_whole(size, vocab_size):
        return torch.arange(vocab_size)
    return torch.tensor(sorted(by_frequency(samples, vocab_size)[:size]))


def is_whole(size: int, vocab_size: int) -> bool:
    """Whether a reduced vocabulary of `size` tokens is none. Raises ParameterError for a size that cannot be."""
    if size < 0 or size == 1:
        raise ParameterError(f"vocabulary must be 2 or more, or 0 for all tokens; got {size}")
    return size == 0 or size >= vocab_size


def by_frequency(samples: Sequence[Sample], vocab_size: int) -> list[int]:
    """All tokens, those first that answers have most often; of equals the lowest."""
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(map(int, sample.tokens[sample.prompt :]))
    return sorted(range(vocab_size), key=lambda token: (-counts[token], token))


class Teacher:
    """The target while a drafter learns from it, over a reduced vocabulary.

    ids: ``[Vd]``. known: ``[V]``, whether a token is among them. matrix: ``[Vd, H]``, their rows of the output matrix, in float32; None
    for a target whose head is more than a matrix.
    """

    def __init__(self, target: Target, ids: Tensor):
        self.target = target
        self.ids = ids.to(target.device)
        self.known = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
        self.known[self.ids] = True
        self.matrix = self._matrix()

    def _matrix(self) -> Tensor | None:
        target = self.target
        unit = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
        matrix = torch.cat([target.head(part)[:, self.ids].float() for part in unit.split(256)])  # [H, Vd]
        some = torch.linspace(-2, 2, 2 * target.hidden_size, dtype=target.dtype, device=target.device).view(2, -1)
        true = target.head(some)[:, self.ids].float()
        off = (some.float() @ matrix - true).abs().max()
        tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.05
        return matrix.T.contiguous().clone() if off <= tolerance * true.abs().max() else None

    def logits(self, states: Tensor) -> Tensor:
        """``[m, Vd]`` of final states ``[m, H]``."""
        if self.matrix is not None:
            return states.to(self.matrix.dtype) @ self.matrix.T
        return self.target.head(states.to(self.target.dtype))[:, self.ids].clone()

    @torch.no_grad()
    def law(self, states: Tensor) -> Tensor:
        """Probabilities ``[m, Vd]`` over the reduced vocabulary, renormalised, of final states ``[m, H]``."""
        return self.logits(states).float().softmax(dim=-1)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings ``[n, H]``, as a tensor that gradients may flow past."""
        return self.target.embed(tokens.tolist()).clone()

    def look(self, tokens: Sequence[int], layers: Sequence[LayerKey]) -> tuple[dict[LayerKey, Tensor], Tensor]:
        """The states ``{key: [n, H]}`` of a text, and the most likely token after each ``[n]``."""
        target = self.target
        keys = list(dict.fromkeys((*layers, "final")))
        slot = target.open()
        states: dict[LayerKey, list[Tensor]] = {key: [] for key in keys}
        best = []
        try:
            for output in target.prefill(slot, list(map(int, tokens)), layers=keys):
                for key in keys:
                    states[key].append(output.hidden[key].to(target.device).clone())
                best.append(target.head(output.hidden["final"]).argmax(dim=-1))
        finally:
            target.close(slot)
        return {key: torch.cat(parts).clone() for key, parts in states.items()}, torch.cat(best).clone()
