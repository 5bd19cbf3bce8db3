"""An independent draft model distilled from the target: some of its layers, and perhaps fewer tokens; its loss, its files.

It begins with a subset of the target's layers (as in Draft & Verify, Zhang et al. 2024, which leaves layers out) and learns the target's law
at every token of the answers. Its text is the data's own, which the target said (as in DistillSpec, Zhou et al. 2024).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ParameterError
from ..models import PACKAGED, get
from ..targets.base import LayerKey, Target
from ..train.attention import NAME, Unrolled, unrolling
from ..train.features import Features
from ..train.teacher import Teacher
from ..train.trainee import Batch, Scores, Trainee, judge


@dataclass(frozen=True)
class ModelTraining:
    """layers: of the target, that the draft model begins with; by default `count` of them, evenly from the first to the last.
    vocabulary: tokens over which the loss is taken, the answers' most frequent; 0: all.
    """

    layers: tuple[int, ...] | None = None
    count: int = 4
    vocabulary: int = 8192

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ParameterError(f"option count must be 1 or more; got {self.count}")


def layers_of(target: Target, options: ModelTraining) -> tuple[LayerKey, ...]:
    """It reads no states of the target."""
    return ()


class ModelTrainee(Trainee):
    """A small causal language model."""

    kind = "draft-model"
    steps = 1

    def __init__(self, teacher: Teacher, options: ModelTraining, features: Features):
        super().__init__()
        self._teacher = (teacher,)  # in a tuple: its modules are not ours
        self.layers = ()
        self.taken = _taken(teacher.target, options)
        self.model = _subset(teacher.target, self.taken)
        self._tokenizer: Any = getattr(teacher.target.tokenizer, "_tokenizer", None)
        self.to(teacher.target.device)

    def forward(self, batch: Batch) -> Scores:
        """The row before the one whose guess is judged knows the same text as the target's own row."""
        (teacher,) = self._teacher
        nowhere = [0] * len(batch.lengths)
        with unrolling(Unrolled(batch.lengths)):
            place = batch.places(nowhere, batch.lengths)
            states = self.model.model(
                input_ids=batch.tokens[None], position_ids=place[None], use_cache=False
            ).last_hidden_state[0]
        rows = batch.rows(0) + 1
        output = self.model.get_output_embeddings()
        return judge([nn.functional.linear(states[rows], output.weight[teacher.ids])], batch, teacher)

    def write(self, folder: Path) -> None:
        """A folder that transformers loads, in bfloat16."""
        model = copy.deepcopy(self.model).to("cpu", torch.bfloat16)
        model.save_pretrained(folder)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "layers of the target": list(self.taken)}


def _taken(target: Target, options: ModelTraining) -> tuple[int, ...]:
    if options.layers is None:
        count = min(options.count, target.n_layers)
        return tuple(round(i * (target.n_layers - 1) / max(count - 1, 1)) for i in range(count))
    if not options.layers or [k for k in options.layers if not 0 <= k < target.n_layers]:
        raise ParameterError(
            f"option layers must name layers of {target.name}, 0 to {target.n_layers - 1}; got {options.layers}"
        )
    return options.layers


def _subset(target: Target, taken: tuple[int, ...]) -> Any:
    """The target's model with these layers alone, in float32 and by itself: the target's own may be packed."""
    from transformers import AutoModelForCausalLM

    if not hasattr(target, "model"):
        raise ParameterError(f"a draft model begins with layers of the target, and {target.name} is no model of transformers")
    source = str(get(target.name)) if target.name in PACKAGED else target.name
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    decoder = model.get_decoder()
    kept = [decoder.layers[k] for k in taken]
    for place, layer in enumerate(kept):
        layer.self_attn.layer_idx = place
    decoder.layers = nn.ModuleList(kept)
    config = model.config.get_text_config()
    config.num_hidden_layers = len(kept)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[k] for k in taken]
    model.set_attn_implementation(NAME)
    return model.train()
