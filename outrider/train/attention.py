"""Attention while a drafter is trained: whole sequences one behind the other on one axis, and the later steps of an unrolled head.

In training-time test (EAGLE-3, Li et al. 2025) a head runs over all positions with the target's features first; in step k it takes its
own output of step k - 1 for the feature. Row i of step k then sees the keys of the first step up to its own position, as it would see
verified positions when it drafts, and of each later step its own row alone: its ancestors on the drafted path.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "outrider_unrolled"


@dataclass
class Unrolled:
    """What the attention function needs to know about the step in progress, and what it keeps of those before.

    rows: of each sequence in this step. first: of each sequence the row of the first step that is row 0 of the later ones.
    """

    rows: Sequence[int]
    first: Sequence[int] = ()
    step: int = 0
    keys: dict[int, list[list[Tensor]]] = field(default_factory=dict)  # by layer, step, sequence: [kv_heads, n, d]
    values: dict[int, list[list[Tensor]]] = field(default_factory=dict)

    def next(self, rows: Sequence[int]) -> None:
        """The next step runs so many rows of each sequence, the first of those before."""
        self.rows, self.step = rows, self.step + 1


CURRENT: ContextVar[Unrolled] = ContextVar("outrider_unrolled")


@contextmanager
def unrolling(run: Unrolled) -> Iterator[None]:
    """Inside, models with our attention attend as `run` says."""
    before = CURRENT.set(run)
    try:
        yield
    finally:
        CURRENT.reset(before)


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, Σn, d]
    key: Tensor,  # [1, kv_heads, Σn, d]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function behind AttentionInterface: returns ``[1, Σn, heads, d]``."""
    run, layer = CURRENT.get(), int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = list(key[0].split(list(run.rows), dim=1)), list(value[0].split(list(run.rows), dim=1))
    run.keys.setdefault(layer, []).append(keys)
    run.values.setdefault(layer, []).append(values)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    repeat = query.shape[1] // key.shape[1]
    parts = []
    for b, q in enumerate(query[0].split(list(run.rows), dim=1)):
        if run.step == 0:
            k, v = (x.repeat_interleave(repeat, 0) if repeat > 1 else x for x in (keys[b], values[b]))
            x = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scaling)[0]
        else:
            x = _later(q, [step[b] for step in run.keys[layer]], [step[b] for step in run.values[layer]], run.first[b], scaling)
        parts.append(x.transpose(0, 1))
    return torch.cat(parts)[None], None


def _later(q: Tensor, keys: list[Tensor], values: list[Tensor], first: int, scaling: float) -> Tensor:
    """Row r of a later step ``[heads, n, d]`` sees rows 0 to first + r of the first step, and row r of each step after it."""
    heads, n, _ = q.shape
    seen = first + n
    repeat = heads // keys[0].shape[0]
    k, v = ([x.repeat_interleave(repeat, 0) if repeat > 1 else x for x in each] for each in (keys, values))
    scores = (q * scaling) @ k[0][:, :seen].transpose(1, 2)  # [heads, n, seen]
    hidden = torch.ones(n, seen, dtype=torch.bool, device=q.device).triu(first + 1)
    scores = scores.float().masked_fill(hidden, -torch.inf)
    own = torch.stack([((q * scaling) * step[:, :n]).sum(-1) for step in k[1:]], dim=-1)  # [heads, n, steps]
    weights = torch.cat([scores, own.float()], dim=-1).softmax(dim=-1).to(q.dtype)
    result = weights[..., :seen] @ v[0][:, :seen]
    for j, step in enumerate(v[1:]):
        result = result + weights[..., seen + j, None] * step[:, :n]
    return result


AttentionInterface.register(NAME, attend)
