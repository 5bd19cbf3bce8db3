"""What the training loop asks of a drafter that can be trained. Each loss stands beside its drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from ..targets.base import LayerKey, Target
from .store import Sample
from .teacher import Teacher, count_vocabulary


@dataclass(frozen=True)
class Batch:
    """Whole sequences, one behind the other on one axis of n rows.

    tokens: ``[n]``. lengths, prompts: of each sequence its tokens, and how many of them are the prompt's,
    which nothing is guessed of. hidden: the target's states
    ``{key: [n, H]}``, ``"final"`` among them. best: ``[n]``, the token that the target finds the most likely after each.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    hidden: dict[LayerKey, Tensor]
    best: Tensor

    @property
    def first(self) -> list[int]:
        """Of each sequence the row from which the answer's first token is guessed, one before the prompt's last."""
        return [min(max(prompt - 2, 0), n) for prompt, n in zip(self.prompts, self.count)]

    @property
    def count(self) -> list[int]:
        """Of each sequence how many rows have a token two places on."""
        return [max(n - 2, 0) for n in self.lengths]

    def kept(self, step: int) -> list[int]:
        """Of each sequence how many rows guess, in this step, a token of the answer: the token step + 2 places on."""
        return [max(n - f - step, 0) for f, n in zip(self.first, self.count)]

    def rows(self, step: int) -> Tensor:
        """These rows ``[m]``; whether a guess is right is judged at row + step + 1."""
        return self.places(self.first, self.kept(step), self.starts)

    def places(self, first: Sequence[int], count: Sequence[int], starts: Sequence[int] | None = None) -> Tensor:
        """`count` positions from `first` on, of each sequence, one behind the other; with `starts` rows of the batch."""
        begin = [f + s for f, s in zip(first, starts or [0] * len(first))]
        return torch.cat([torch.arange(b, b + n) for b, n in zip(begin, count)]).to(self.tokens.device)

    @property
    def starts(self) -> list[int]:
        """The first row of each sequence."""
        return [sum(self.lengths[:b]) for b in range(len(self.lengths))]


@dataclass(frozen=True)
class Scores:
    """loss: a sum over everything that was guessed. losses, right, seen: of each step the sum, and how many guesses were what the
    target finds the most likely, of how many: all ``[steps]``.
    """

    loss: Tensor
    losses: Tensor
    right: Tensor
    seen: Tensor


class Trainee(nn.Module, ABC):
    """A drafter in training: its trainable parameters, its loss, its files."""

    kind: str
    layers: tuple[LayerKey, ...]
    """States of the target that it reads; ``"final"`` is there for the labels in any case."""
    steps: int
    """How many tokens ahead it learns to guess."""

    @classmethod
    def vocabulary(cls, target: Target, samples: Sequence[Sample], options: Any) -> Tensor:
        """Ids, ascending, of the tokens that it learns to guess. options: of its kind, with `vocabulary`, how many."""
        return count_vocabulary(samples, options.vocabulary, target.vocab_size)

    @abstractmethod
    def forward(self, batch: Batch) -> Scores:
        """What it guesses of the answers, given the text before."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """The drafter's own files, as Outrider loads them. Raises OSError."""

    def read(self, folder: Path) -> dict[str, Tensor] | None:
        """The state that the files of a finished drafter hold; None where that is not known. Raises LoadError."""
        return None

    def facts(self) -> dict[str, Any]:
        """What the card says about it."""
        return {"parameters": sum(p.numel() for p in self.parameters() if p.requires_grad), "steps": self.steps}


def judge(logits: Sequence[Tensor], batch: Batch, teacher: Teacher, decay: float = 1.0) -> Scores:
    """Scores of guesses: for each step logits ``[m, Vd]`` over the reduced vocabulary, at the batch's rows of that step.

    The loss is the cross entropy to the target's law over the reduced vocabulary, renormalised, where the token that it finds the most
    likely of all is in there. Step k counts `decay` to the power k.
    """
    laws = teacher.law(batch.hidden["final"][batch.rows(0) + 1]).split(batch.kept(0))
    losses, right, seen = [], [], []
    for step, guessed in enumerate(logits):
        guessed, token = guessed.float(), batch.best[batch.rows(step) + step + 1]
        law = torch.cat([law[len(law) - n :] for law, n in zip(laws, batch.kept(step))])
        each = guessed.logsumexp(dim=-1) - torch.linalg.vecdot(law, guessed)
        losses.append((each * teacher.known[token]).sum())
        right.append((teacher.ids[guessed.argmax(dim=-1)] == token).sum())
        seen.append(torch.tensor(len(token), device=token.device))
    loss = torch.stack([decay**k * each for k, each in enumerate(losses)]).sum()
    return Scores(loss, torch.stack(losses).detach(), torch.stack(right), torch.stack(seen))
