"""Whether a difference between two decodings is a tie: the only kind of difference that is allowed on real models.

A pass over n rows rounds otherwise than n passes over one row. So where the two best scores are closer than rounding, either
token is right, and what comes after it is another text. The scores at the first difference are computed by a plain pass over
the shared tokens; at temperature above 0 they are the perturbed ones, log p + noise, of the rule `coupled`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch

from outrider.sampling import Sampler, SamplingParams
from outrider.targets.base import Target
from outrider.tree import DraftTree

FLOAT32 = 1e-4
"""Of the logits' scale, their largest absolute value."""


@dataclass(frozen=True)
class Tie:
    """The first difference: after `at` emitted tokens one decoding has `tokens[0]`, the other `tokens[1]`.

    gap: between the scores of the two best tokens; scale: the largest absolute logit (over the temperature).
    is_best: whether the tokens in question are the two best.
    """

    at: int
    tokens: tuple[int, int]
    gap: float
    scale: float
    is_best: bool

    def within(self, share: float = FLOAT32) -> bool:
        return self.is_best and self.gap <= share * self.scale

    def __str__(self) -> str:
        return f"after {self.at} tokens: {self.tokens[0]} or {self.tokens[1]}, gap {self.gap:.2e} at scale {self.scale:.3g}"


def first_difference(
    target: Target, prompt: Sequence[int], one: Sequence[int], other: Sequence[int], params: SamplingParams, choice: int = 0
) -> Tie | None:
    """None where the two are equal."""
    if list(one) == list(other):
        return None
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    if at == min(len(one), len(other)):
        raise AssertionError(f"one decoding ends after {at} tokens, where the other goes on with the same ones")
    text = [*prompt, *one[:at]]
    slot = target.open()
    for _ in target.prefill(slot, text[:-1]):
        pass
    (output,) = target.forward([(slot, DraftTree.chain(text[-1]))])
    assert output.logits is not None
    logits = output.logits.clone().float()
    target.close(slot)
    scale = float(logits.abs().max()) / (params.temperature or 1.0)
    sampler = Sampler(params, prompt, target.vocab_size, target.eos, "coupled", choice, matcher=target.matcher(params))
    sampler.commit(one[:at])
    if params.temperature == 0:
        scores, best = sampler._processed(sampler.constrain(logits, [()]), [()], [0])[0].topk(2)
    else:
        p = sampler.probabilities(logits, DraftTree.chain(text[-1]))
        scores, best = sampler.race(p[0], 0, 2)
    gap = float(scores[0] - scores[1]) if len(scores) > 1 else float("inf")
    tokens = (one[at], other[at])
    return Tie(at, tokens, gap, scale, set(tokens) == set(torch.as_tensor(best).tolist()))


class Ledger:
    """Compares decodings, keeps the ties that were allowed, and fails on anything else."""

    def __init__(self, target: Target, share: float = FLOAT32):
        self.target = target
        self.share = share
        self.compared = self.tokens = 0
        self.ties: list[str] = []

    def compare(
        self,
        case: str,
        prompt: Sequence[int],
        one: Sequence[int],
        other: Sequence[int],
        params: SamplingParams,
        choice: int = 0,
    ) -> None:
        self.compared += 1
        self.tokens += len(one)
        tie = first_difference(self.target, prompt, one, other, params, choice)
        if tie is None:
            return
        assert tie.within(self.share), f"{case}: {tie}: not a tie within {self.share:g} of the scale"
        self.ties.append(f"{case}: {tie}")

    def __str__(self) -> str:
        head = f"{self.compared} decodings of {self.tokens} tokens compared, {len(self.ties)} parted at a tie"
        return "\n  ".join([head, *self.ties])
