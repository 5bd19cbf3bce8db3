"""The loss of heads that feed on their own guesses (EAGLE-3, multi-token prediction): training-time test.

A head runs over all pairs of a text with the target's features, then again with its own output in the features' place, as often as it is
to guess tokens ahead (EAGLE-3, Li et al. 2025, section 3.2). The tokens stay the text's own. Step k judges the guess of the token
k + 2 positions after the feature.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Sequence

import torch
from torch import Tensor

from ..targets.base import LayerKey
from ..train.attention import NAME, Unrolled, unrolling
from ..train.teacher import Teacher
from ..train.trainee import Batch, Scores, Trainee, judge


class UnrolledTrainee(Trainee):
    """A head that runs pairs of feature and token."""

    def __init__(self, teacher: Teacher, layers: Sequence[LayerKey], steps: int, decay: float):
        super().__init__()
        self._teacher = (teacher,)  # in a tuple: its modules are not ours
        self.layers, self.steps, self.decay = tuple(layers), steps, decay

    @abstractmethod
    def fuse(self, hidden: Tensor) -> Tensor:
        """Features ``[n, H]`` of the target's states, `layers` side by side."""

    @abstractmethod
    def pairs(self, embeddings: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """States ``[n, H]`` of pairs."""

    @abstractmethod
    def recycle(self, states: Tensor) -> Tensor:
        """What takes the feature's place in the next step."""

    @abstractmethod
    def guess(self, states: Tensor) -> Tensor:
        """Logits ``[n, Vd]`` over the reduced vocabulary."""

    def forward(self, batch: Batch) -> Scores:
        (teacher,) = self._teacher
        nowhere = [0] * len(batch.lengths)
        run, logits = Unrolled(batch.count, batch.first), []
        with unrolling(run):
            rows = batch.places(nowhere, batch.count, batch.starts)
            features = self.fuse(torch.cat([batch.hidden[key][rows] for key in self.layers], dim=-1))
            states = self.pairs(teacher.embed(batch.tokens[rows + 1]), features, batch.places(nowhere, batch.count))
            kept = [s[f:] for s, f in zip(states.split(batch.count), batch.first)]  # what follows is of the answers alone
            logits.append(self.guess(torch.cat(kept)))
            for step in range(1, self.steps):
                run.next(batch.kept(step))
                before = self.recycle(torch.cat([s[:n] for s, n in zip(kept, run.rows)]))
                place = batch.places(batch.first, run.rows) + step
                states = self.pairs(teacher.embed(batch.tokens[batch.rows(step) + step + 1]), before, place)
                kept = list(states.split(list(run.rows)))
                logits.append(self.guess(states))
        return judge(logits, batch, teacher, self.decay)


def trainable(module: Any) -> Any:
    """The module with weights that gradients flow to, in float32, and attention that can be unrolled in the layers of its `body`."""
    for parameter in module.parameters():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    module.body.set_attn_implementation(NAME)
    return module.train()
