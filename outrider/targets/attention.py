"""Attention over one KV cache per sequence, with all rows of all sequences on one axis.

transformers' models call the function registered here through `AttentionInterface`, once for each layer, with the queries,
keys and values of a whole pass ``[1, heads, Σn, d]``. It stores each sequence's new keys behind that sequence's old ones and
attends with that tree's own mask: no padded rows, and the linear layers see one dense batch.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Iterator

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from .. import kernels
from ..tree import DraftTree
from .base import Slot

NAME = "outrider"
FEW_ROWS = 64
"""Up to here grouped matrix products beat the fused kernel, which would repeat keys and values for each query head."""
FIRST_CAPACITY = 256


class KVSlot(Slot):
    """Keys and values of one sequence: for each layer ``[kv_heads, capacity, d]``, of which `length` rows are kept."""

    def __init__(self) -> None:
        self.length = 0
        self.whole = 0  # rows that were kept of passes through all layers
        self._is_whole = True  # the pass in progress
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def begin(self, whole: bool) -> None:
        """A target's pass begins; whole: through all layers. What a partial pass left must be gone before the next whole one."""
        if whole and self.length > self.whole:
            raise RuntimeError(f"the last {self.length - self.whole} rows were kept of partial passes; truncate them first")
        self._is_whole = whole

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the pass's ``[kv_heads, n, d]`` and return everything the rows may see, ``[kv_heads, length + n, d]``."""
        end = self.length + key.shape[1]
        for store, new in ((self.keys, key), (self.values, value)):
            held = store.get(layer)
            if held is None or held.shape[1] < end:
                grown = new.new_empty(new.shape[0], max(FIRST_CAPACITY, 2 * end if held is not None else end), new.shape[2])
                if held is not None:
                    grown[:, : self.length] = held[:, : self.length]
                store[layer] = held = grown
            held[:, self.length : end] = new
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def commit(self, path: list[int]) -> None:
        """Keep these rows of the last pass, in this order, right behind the kept ones."""
        moved = next((i for i, row in enumerate(path) if row != i), None)  # the first that is not where it belongs
        if moved is not None:
            rows = torch.tensor(path[moved:]) + self.length
            for held in (*self.keys.values(), *self.values.values()):
                if held.shape[1] <= self.length + max(path):
                    continue  # of a layer that a partial pass left out
                rows = rows.to(held.device)
                held[:, self.length + moved : self.length + len(path)] = held.index_select(1, rows)
        self.length += len(path)
        if self._is_whole:
            self.whole = self.length

    def truncate(self, length: int) -> None:
        """Forget everything after the first `length` rows."""
        self.length, self.whole = min(self.length, length), min(self.whole, length)

    def copy(self, length: int) -> KVSlot:
        """A slot of its own with the first `length` rows."""
        slot = KVSlot()
        slot.length, slot.whole = length, min(self.whole, length)
        for mine, theirs in ((self.keys, slot.keys), (self.values, slot.values)):
            for layer, held in mine.items():
                theirs[layer] = held[:, : max(length, 1)].clone()
        return slot

    def free(self) -> None:
        self.keys.clear()
        self.values.clear()
        self.length = self.whole = 0
        self.closed = True


@dataclass
class Segment:
    """One sequence's rows in a pass: `first` to `first + n` on the common axis.

    since: the rows are the tree's nodes from this one on; those before are the last `since` rows of the slot. Targets run a tree
    at once, heads that feed on their own guesses run it level by level.
    """

    slot: KVSlot
    tree: DraftTree
    first: int
    since: int = 0
    masks: dict[tuple[int | None, torch.device, torch.dtype], Tensor | None] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.tree) - self.since

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """What to add to the scores of all columns ``[n, kept + nodes]``, or of the tree's ``[n, nodes]``; None for nothing.

        window: a row sees only keys of positions above its own minus `window`.
        """
        key = (window, like.device, like.dtype)
        if key not in self.masks:
            self.masks[key] = self._mask(window, like)
        return self.masks[key]

    def _mask(self, window: int | None, like: Tensor) -> Tensor | None:
        kept = self.slot.length - self.since
        reaches_past = window is not None and kept + self.tree.depth >= window
        if len(self.tree) == 1 and not reaches_past:
            return None
        hidden = ~self.tree.ancestors()[self.since :]
        if reaches_past and window is not None:
            depths = torch.tensor(self.tree.depths)
            position = torch.cat([torch.arange(kept), kept + depths])
            hidden = torch.cat([torch.zeros(self.n, kept, dtype=torch.bool), hidden], dim=1)
            hidden |= position[None] <= (kept + depths)[self.since :, None] - window
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf).to(like.device)


@dataclass
class Pass:
    """What the attention function needs to know about the pass in progress, and what it saw."""

    segments: list[Segment]
    stores: bool = False
    """Whether the rows only leave their keys and values, and attend to nothing."""
    windows: dict[int, int | None] = field(default_factory=dict)
    """Sliding window of each layer that was called."""
    causal: bool = True
    """Whether every layer calls itself causal."""
    masked: bool = False
    """Whether the model made a mask of its own, which we do not know how to follow."""


CURRENT: ContextVar[Pass] = ContextVar("outrider_pass")
"""The pass in progress. Not every architecture hands extra arguments on to its attention, so it goes around them."""


@contextmanager
def passing(segments: list[Segment], stores: bool = False) -> Iterator[Pass]:
    """Inside, models attend with these rows; with `stores` these rows only leave their keys and values."""
    run = Pass(segments, stores)
    before = CURRENT.set(run)
    try:
        yield run
    finally:
        CURRENT.reset(before)


class PassCache(Cache):
    """Hands the pass's own keys and values to the attention function, which does the storing."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, Σn, d]
    key: Tensor,  # [1, kv_heads, Σn, d]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function behind AttentionInterface: returns ``[1, Σn, heads, d]``."""
    run = CURRENT.get(None)
    if run is None:
        raise RuntimeError("this model was set up by Outrider; call it through its target, or load another copy")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    run.windows[layer] = sliding_window
    run.causal &= bool(getattr(module, "is_causal", True))
    run.masked |= attention_mask is not None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = []
    for segment in run.segments:
        rows = slice(segment.first, segment.first + segment.n)
        keys, values = segment.slot.append(layer, key[0, :, rows], value[0, :, rows])
        if run.stores:
            parts.append(query.new_zeros(segment.n, query.shape[1], value.shape[-1]))
            continue
        mask = segment.mask(sliding_window, query)
        parts.append(_attention(query[0, :, rows], keys, values, mask, scaling, softcap, s_aux))
    return torch.cat(parts)[None] if len(parts) > 1 else parts[0][None], None


def _attention(
    q: Tensor,  # [heads, n, d]
    keys: Tensor,  # [kv_heads, m, d]
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax attention of n rows over m keys; ``[n, heads, d]``. mask: added to the last columns that it covers."""
    heads, n, _ = q.shape
    kv_heads, m, _ = keys.shape
    if n > FEW_ROWS and softcap is None and sinks is None:
        if mask is not None and mask.shape[1] < m:
            mask = torch.nn.functional.pad(mask, (m - mask.shape[1], 0))
        repeat = heads // kv_heads
        if repeat > 1:
            keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
        x = torch.nn.functional.scaled_dot_product_attention(q[None], keys[None], values[None], mask, scale=scaling)
        return x[0].transpose(0, 1)
    if softcap is None and kernels.can_attend(q, values):
        return kernels.attend(q, keys, values, mask, scaling, sinks)
    grouped = q.reshape(kv_heads, heads // kv_heads * n, -1)
    scores = (grouped @ keys.transpose(1, 2)).mul_(scaling)  # [kv_heads, group * n, m]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(heads, n, m)
    if mask is not None:
        scores[:, :, m - mask.shape[1] :] += mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(heads, n, 1).to(scores.dtype)], dim=-1)
    exact = scores if scores.dtype == torch.float64 else scores.float()
    weights = exact.softmax(dim=-1).to(values.dtype)[:, :, :m]
    return (weights.reshape(kv_heads, -1, m) @ values).view(heads, n, -1).transpose(0, 1)


AttentionInterface.register(NAME, attend)
