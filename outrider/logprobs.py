"""Log-probabilities of emitted tokens, from the target's own logits before any processing."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from .targets.base import Output
from .trace import TokenLogprob


def logprobs_of(output: Output, path: Sequence[int], tokens: Sequence[int], top: int | None) -> tuple[TokenLogprob, ...] | None:
    """Log-probabilities of the emitted `tokens`, from the rows that predicted them."""
    if top is None:
        return None
    if not tokens:
        return ()
    assert output.logits is not None
    rows = output.logits[list(path[: len(tokens)])]
    rows = rows if rows.dtype == torch.float64 else rows.float()
    logprobs = rows.log_softmax(dim=-1)  # [m, V]
    chosen = logprobs.gather(1, torch.tensor(list(tokens), device=rows.device)[:, None])[:, 0].tolist()
    if top == 0:
        return tuple(TokenLogprob(token, value) for token, value in zip(tokens, chosen))
    best = _top(logprobs, top)
    return tuple(TokenLogprob(token, value, alternatives) for token, value, alternatives in zip(tokens, chosen, best))


def _top(logprobs: Tensor, k: int) -> list[tuple[tuple[int, float], ...]]:
    """The k most likely tokens of each row, of equals the lowest ids."""
    values = logprobs.topk(min(k, logprobs.shape[1]), dim=-1).values
    result = []
    for row, least in zip(logprobs, values[:, -1]):
        ids = (row >= least).nonzero()[:, 0]
        order = row[ids].sort(descending=True, stable=True)
        result.append(tuple(zip(ids[order.indices][:k].tolist(), order.values[:k].tolist())))
    return result
