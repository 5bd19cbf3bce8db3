"""Which samples a step trains on: a function of the step's number and the seed alone, so that a run can go on anywhere."""

from __future__ import annotations

import functools
from typing import Sequence

import torch


class Order:
    """All samples in one random order after another, cut into batches without a gap."""

    def __init__(self, samples: Sequence[int], batch: int, seed: int):
        self.samples, self.batch, self.seed = list(samples), batch, seed
        self._epoch = functools.lru_cache(maxsize=2)(self._permuted)

    def _permuted(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return [self.samples[i] for i in torch.randperm(len(self.samples), generator=generator).tolist()]

    def __call__(self, step: int) -> list[int]:
        """The samples of this step, from 0."""
        places = range(step * self.batch, (step + 1) * self.batch)
        return [self._epoch(place // len(self.samples))[place % len(self.samples)] for place in places]


def split(count: int, held_out: int) -> tuple[list[int], list[int]]:
    """Samples to train on and samples to judge by, by number; the same where there are too few for both.

    The first ones judge, so that they stay the same while data grows, and a run that begins with another's weights has not learnt them.
    """
    if count <= held_out + 1:
        return list(range(count)), list(range(count))[:held_out]
    return list(range(held_out, count)), list(range(held_out))
