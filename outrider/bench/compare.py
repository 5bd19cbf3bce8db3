"""Where two texts of one prompt part, and whether rounding can explain it.

A pass over n rows rounds differently from n passes over one row. So on a real model two tokens whose scores are within
rounding can change places, and the text after that is another one. This says how near they were.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

import torch

from ..sampling import Sampler, SamplingParams
from ..targets.base import Target
from ..tree import DraftTree

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest gap, as a share of the logits' largest magnitude, that rounding explains: about ten units in the last place of the
activations, as seen over the depth of a model."""


@dataclass(frozen=True)
class Difference:
    """position: output token at which two texts part, from 0. expected, found: the tokens there, None past the end.
    gap: how far their scores are apart (logits over temperature, noise included under `coupled`), measured in a pass over one
    row. scale: largest magnitude of the logits there. near_tie: whether the gap is within rounding.
    """

    position: int
    expected: int | None
    found: int | None
    gap: float
    scale: float
    near_tie: bool

    def __str__(self) -> str:
        kind = "near-tie, within rounding" if self.near_tie else "NOT explained by rounding"
        return f"token {self.position}: gap {self.gap:.2g} between the two best scores, logits up to {self.scale:.3g} ({kind})"


def comparable(params: SamplingParams, rule: str) -> bool:
    """Whether these settings fix the text, so that a drafter must not change it."""
    return params.temperature == 0 or (rule == "coupled" and params.seed is not None)


def difference(
    target: Target, prompt: Sequence[int], params: SamplingParams, expected: Sequence[int], found: Sequence[int]
) -> Difference | None:
    """None where both outputs are the same. expected: plain decoding's tokens. prompt: token ids."""
    if list(expected) == list(found):
        return None
    shorter = min(len(expected), len(found))
    at = next((i for i in range(shorter) if expected[i] != found[i]), shorter)
    one, other = (tokens[at] if at < len(tokens) else None for tokens in (expected, found))
    if one is None or other is None:
        return Difference(at, one, other, float("inf"), 0.0, False)
    scores, scale = _scores(target, prompt, params, expected[:at], (one, other))
    gap = abs(scores[0] - scores[1])
    return Difference(at, one, other, gap, scale, gap <= TOLERANCE.get(target.dtype, 4e-2) * scale)


def _scores(
    target: Target, prompt: Sequence[int], params: SamplingParams, before: Sequence[int], tokens: tuple[int, int]
) -> tuple[list[float], float]:
    """Scores of two tokens after `prompt` and `before`, and the largest magnitude of the logits there."""
    known = [*prompt, *before]
    slot = target.open()
    try:
        for _ in target.prefill(slot, known[:-1]):
            pass
        (output,) = target.forward([(slot, anchor := DraftTree.chain(known[-1]))])
        assert output.logits is not None
        logits = output.logits.float() if output.logits.dtype != torch.float64 else output.logits
        target.commit(slot, (0,))
    finally:
        target.close(slot)
    greedy = params.temperature == 0
    law = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) if greedy else params
    sampler = Sampler(law, prompt, target.vocab_size, target.eos, "coupled", matcher=target.matcher(law))
    sampler.commit(before)
    p = sampler.probabilities(logits, anchor)[0]
    scale = float(logits.abs().max()) / (1.0 if greedy else params.temperature)
    if greedy:
        return p[list(tokens)].log().tolist(), scale
    values, ids = sampler.race(p, 0, int((p > 0).sum()))
    score = dict(zip(ids.tolist(), values.tolist()))
    return [score.get(token, float("-inf")) for token in tokens], scale
