"""Medusa and Hydra heads in training: how new ones begin, their loss, their files.

Head k guesses the token k + 2 places after the state that it gets (Medusa-1, Cai et al. 2024; Hydra, Ankner et al. 2024). As there, a
head begins as the identity before the target's output matrix. Different from the papers: output matrices may be of a reduced vocabulary,
and the loss is the cross entropy to the target's law, not to one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import ParameterError
from ..files import write_json
from ..targets.base import LayerKey, Target
from ..train.features import Features
from ..train.teacher import Teacher
from ..train.trainee import Batch, Scores, Trainee, judge
from .heads import Block, Heads


@dataclass(frozen=True)
class HeadsTraining:
    """vocabulary: tokens that can be drafted, the answers' most frequent; 0: all. heads: how many tokens ahead. blocks: residual
    blocks of a head. decay: head k counts this to the power k. train_output: whether the output matrices learn, too.
    """

    vocabulary: int = 8192
    heads: int = 3
    blocks: int = 1
    decay: float = 0.8
    train_output: bool = False

    def __post_init__(self) -> None:
        if self.heads < 1 or self.blocks < 1:
            raise ParameterError(f"options heads and blocks must be 1 or more; got {self.heads} and {self.blocks}")
        if not 0 < self.decay <= 1:
            raise ParameterError(f"option decay must be above 0 and at most 1; got {self.decay}")


def layers_of(target: Target, options: HeadsTraining) -> tuple[LayerKey, ...]:
    """Of the target's states the last alone."""
    return ("final",)


class MedusaTrainee(Trainee):
    """Heads on the target's last state."""

    kind = "medusa"
    grounded = False
    ids: Tensor

    def __init__(self, teacher: Teacher, options: HeadsTraining, features: Features):
        super().__init__()
        self._teacher = (teacher,)  # in a tuple: its modules are not ours
        self.layers, self.steps, self.decay = ("final",), options.heads, options.decay
        if teacher.matrix is None:
            raise ParameterError(
                f"{teacher.target.name} has an output head that is more than a matrix; heads cannot begin from it"
            )
        self.heads = Heads(
            [self._stack(head, options.blocks) for head in range(options.heads)],
            [self._output(teacher.matrix) for _ in range(options.heads)],
            self.grounded,
        )
        self.heads.outputs.requires_grad_(options.train_output)
        self.register_buffer("ids", teacher.ids.clone())
        self.to(teacher.target.device)

    def _stack(self, head: int, blocks: int) -> list[Block]:
        width = self._teacher[0].target.hidden_size
        stack = [Block(nn.Linear(width, width)) for _ in range(blocks)]
        for block in stack:
            nn.init.zeros_(block.linear.weight)  # type: ignore[arg-type]
            nn.init.zeros_(block.linear.bias)  # type: ignore[arg-type]
        return stack

    def _output(self, matrix: Tensor) -> nn.Linear:
        output = nn.Linear(matrix.shape[1], matrix.shape[0], bias=self.grounded)
        output.weight = nn.Parameter(matrix.clone())
        if self.grounded:
            nn.init.zeros_(output.bias)
        return output

    def _parts(self) -> list[tuple[Any, Any]]:
        """Of each head its blocks and its output matrix."""
        return list(zip(self.heads.stacks, self.heads.outputs))

    def forward(self, batch: Batch) -> Scores:
        (teacher,) = self._teacher
        logits = []
        for head in range(self.steps):
            rows = batch.rows(head)
            inputs = batch.hidden["final"][rows]
            if self.grounded:
                inputs = torch.cat([inputs, *(teacher.embed(batch.tokens[rows + 1 + k]) for k in range(head + 1))], dim=-1)
            logits.append(self.heads.outputs[head](self.heads.stacks[head](inputs)))
        return judge(logits, batch, teacher, self.decay)

    def write(self, folder: Path) -> None:
        """vLLM's layout, which knows reduced vocabularies, in bfloat16."""
        tensors: dict[str, Tensor] = {}
        for i, (stack, output) in enumerate(self._parts()):
            for j, block in enumerate(stack):
                tensors |= {f"blocks.{i}.layers.{j}.{part}": p for part, p in block.linear.named_parameters()}
            tensors[f"lm_heads.{i}.weight"] = output.weight
        self._save(folder, tensors, {"medusa_fc_bias": True, "num_heads": self.steps})

    def _save(self, folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        kept = {name: t.detach().to("cpu", torch.bfloat16).clone() for name, t in tensors.items()}
        (teacher,) = self._teacher
        if len(self.ids) < teacher.target.vocab_size:
            kept["token_map"] = self.ids.cpu()
        save_file(kept, folder / "model.safetensors")
        write_json(folder / "config.json", config)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "vocabulary": len(self.ids)}


class HydraTrainee(MedusaTrainee):
    """Heads that also get the embeddings of the tokens before the one that they guess."""

    kind = "hydra"
    grounded = True

    def _stack(self, head: int, blocks: int) -> list[Block]:
        """The first block takes the state and the embeddings; what it adds to begins as the state alone."""
        stack = super()._stack(head, blocks)
        width = self._teacher[0].target.hidden_size
        first = Block(nn.Linear(width * (head + 2), width), nn.Linear(width * (head + 2), width))
        with torch.no_grad():
            assert isinstance(first.residual, nn.Linear)
            first.residual.weight.zero_()
            first.residual.weight[:, :width] = torch.eye(width)
            first.residual.bias.zero_()
        return [first, *stack[1:]]

    def write(self, folder: Path) -> None:
        """The authors' names, in bfloat16, and the ids of a reduced vocabulary in ``token_map``."""
        tensors: dict[str, Tensor] = {}
        for i, (stack, output) in enumerate(self._parts()):
            for j, block in enumerate(stack):
                tensors |= {f"hydra_mlp.{i}.{j}.linear.{part}": p for part, p in block.linear.named_parameters()}
                if block.residual is not None:
                    tensors |= {f"hydra_mlp.{i}.{j}.res_connection.{part}": p for part, p in block.residual.named_parameters()}
            tensors |= {f"hydra_lm_head.{i}.{part}": p for part, p in output.named_parameters()}
        self._save(folder, tensors, {"hydra_num_heads": self.steps, "hydra_head_arch": "mlp"})
