"""A multi-token-prediction module in training, on a frozen trunk: how a new one begins, its loss (`unrolled`), its files.

The module is that of Qwen3-Next's layout (DeepSeek-V3 report, section 2.2): the target's last state and the next token's embedding, each
normed, through one projection and a decoder layer of the target's own family; the target's output matrix reads it. It is applied again
to what it gave back, as it is when it drafts.
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
from .checkpoint import Checkpoint, Stored
from .mtp_head import LAYOUTS, find, load_modules, model_of
from .unrolled import UnrolledTrainee, trainable

LAYOUT = LAYOUTS[1]
PREFIX = "mtp."


@dataclass(frozen=True)
class MtpTraining:
    """vocabulary: tokens over which the loss is taken, the answers' most frequent; 0: all. (The module can draft every token.) steps,
    decay: of training-time test.
    """

    vocabulary: int = 8192
    steps: int = 3
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ParameterError(f"option steps must be 1 or more; got {self.steps}")
        if not 0 < self.decay <= 1:
            raise ParameterError(f"option decay must be above 0 and at most 1; got {self.decay}")


def layers_of(target: Target, options: MtpTraining) -> tuple[LayerKey, ...]:
    """Of the target's states the last alone."""
    return ("final",)


class MtpTrainee(UnrolledTrainee):
    """One module."""

    kind = "mtp"

    def __init__(self, teacher: Teacher, options: MtpTraining, features: Features):
        super().__init__(teacher, ("final",), options.steps, options.decay)
        tensors = _first_tensors(teacher)
        stored = {name: Stored(tuple(t.shape), lambda t=t: t, "a new module") for name, t in tensors.items()}  # type: ignore[misc]
        checkpoint = Checkpoint(Path("a new module"), {}, stored)
        assert find(checkpoint) is not None
        _, (module,) = load_modules(checkpoint, teacher.target)
        self.module = trainable(module)
        self.to(teacher.target.device)

    def fuse(self, hidden: Tensor) -> Tensor:
        return hidden

    def pairs(self, embeddings: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        return self.module(embeddings.float(), features, positions, use_cache=False)

    def recycle(self, states: Tensor) -> Tensor:
        return states

    def guess(self, states: Tensor) -> Tensor:
        (teacher,) = self._teacher
        return teacher.logits(states)

    def write(self, folder: Path) -> None:
        """In bfloat16."""
        module = self.module
        parts = (module.embedding_norm, module.hidden_norm, module.projection, module.body.norm)
        tensors = {f"{PREFIX}{name}.weight": part.weight for name, part in zip(LAYOUT.parts, parts)}
        block = PREFIX + LAYOUT.block.format(0)
        tensors |= {block + name: p for name, p in module.body.layers[0].state_dict().items()}
        kept = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tensors.items()}
        save_file(kept, folder / "model.safetensors")
        write_json(folder / "config.json", {"mtp_num_modules": 1})


def _first_tensors(teacher: Teacher) -> dict[str, Tensor]:
    """A new module: its layer as the target's class begins one, a projection that keeps sizes, a last norm of the states' size."""
    target = teacher.target
    model: Any = model_of(target)
    width = target.hidden_size
    states, _ = teacher.look(range(min(16, target.vocab_size)), ())
    size = float(states["final"].pow(2).mean().sqrt())
    norms = {name: torch.ones(width) for name in LAYOUT.parts if "norm" in name}
    norms[LAYOUT.parts[-1]] = torch.full((width,), size)
    layer = type(model.get_decoder().layers[-1])(model.config.get_text_config(), 0)
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    tensors = {f"{PREFIX}{name}.weight": value for name, value in norms.items()}
    tensors[f"{PREFIX}{LAYOUT.parts[2]}.weight"] = torch.randn(width, 2 * width) * (2 * width) ** -0.5
    return tensors | {PREFIX + LAYOUT.block.format(0) + name: p.detach().float() for name, p in layer.state_dict().items()}
