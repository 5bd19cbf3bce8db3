"""EAGLE-3 heads (Li et al. 2025) in training: how a new one begins, its loss (`unrolled`), its files.

Different from the paper: the states that are fused come in very different sizes, so each of their numbers is divided by its root mean
square in the data before the fusing matrix sees it. That is undone in the file, whose matrix takes the states as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import LoadError, ParameterError
from ..files import write_json
from ..targets.base import LayerKey, Target
from ..train.features import Features
from ..train.teacher import Teacher
from .checkpoint import Checkpoint, Stored
from .eagle import EagleOptions, open_checkpoint
from .eagle_formats import read_recipe
from .eagle_head import Eagle3Head
from .unrolled import UnrolledTrainee, trainable

SCALING_SAMPLES = 16
PREFIX = "midlayer."
ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True)
class EagleTraining:
    """vocabulary: tokens that can be drafted, the answers' most frequent; 0: all. steps, decay: of training-time test. layers:
    states of the target to read, by layer entry. kv_heads, intermediate: of the head's layer; by default as many as query
    heads, and the target's. train_output: whether the output matrix learns, too.
    """

    vocabulary: int = 8192
    steps: int = 3
    decay: float = 0.8
    layers: tuple[int, ...] | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    train_output: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ParameterError(f"option steps must be 1 or more; got {self.steps}")
        if not 0 < self.decay <= 1:
            raise ParameterError(f"option decay must be above 0 and at most 1; got {self.decay}")


def layers_of(target: Target, options: EagleTraining) -> tuple[LayerKey, ...]:
    """The states of the target that a head reads: three by default, near its entry, in the middle and near its end."""
    chosen = options.layers or (2, target.n_layers // 2, target.n_layers - 3)
    chosen = tuple(dict.fromkeys(min(max(k, 0), target.n_layers) for k in chosen)) if options.layers is None else chosen
    if outside := [k for k in chosen if not 0 <= k <= target.n_layers]:
        raise ParameterError(f"option layers: {target.name} has layer entries 0 to {target.n_layers}; got {outside[0]}")
    return chosen


class EagleTrainee(UnrolledTrainee):
    """An EAGLE-3 head, and the scale of what it fuses."""

    kind = "eagle3"
    ids: Tensor
    scale: Tensor

    def __init__(self, teacher: Teacher, options: EagleTraining, features: Features):
        super().__init__(teacher, layers_of(teacher.target, options), options.steps, options.decay)
        self.config = _config(teacher, options, self.layers)
        tensors = _first_tensors(teacher, self.config, len(self.layers))
        stored = {name: Stored(tuple(t.shape), lambda t=t: t, "a new head") for name, t in tensors.items()}  # type: ignore[misc]
        checkpoint = Checkpoint(Path("a new head"), self.config, stored)
        recipe = read_recipe(checkpoint, teacher.target, EagleOptions())
        assert recipe.layers == self.layers
        self.head = trainable(Eagle3Head(recipe, checkpoint, teacher.target))
        self.head.lm_head.weight.requires_grad_(options.train_output)
        self.register_buffer("ids", teacher.ids.clone())
        self.register_buffer("scale", _scale(features, self.layers))
        self.to(teacher.target.device)

    def fuse(self, hidden: Tensor) -> Tensor:
        return self.head.fuse(hidden / self.scale)

    def pairs(self, embeddings: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        return self.head(embeddings, features, positions, use_cache=False)

    def recycle(self, states: Tensor) -> Tensor:
        return self.head.recycle(states)

    def guess(self, states: Tensor) -> Tensor:
        return self.head.lm_head(self.head.norm(states))

    def write(self, folder: Path) -> None:
        """SpecForge's dialect, in bfloat16."""
        (teacher,) = self._teacher
        tensors = {"fc.weight": self.head.fc.weight / self.scale, "norm.weight": self.head.norm.weight}
        tensors["lm_head.weight"] = self.head.lm_head.weight
        first = self.head.body.layers[0]
        entry = first.input_layernorm
        tensors[f"{PREFIX}input_layernorm.weight"] = entry.embedding_norm.weight
        tensors[f"{PREFIX}hidden_norm.weight"] = entry.feature_norm.weight
        for name, parameter in first.named_parameters():
            if not name.startswith("input_layernorm."):
                tensors[PREFIX + name] = parameter
        kept = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tensors.items()}
        kept["d2t"] = (self.ids - torch.arange(len(self.ids), device=self.ids.device)).cpu()
        kept["t2d"] = teacher.known.cpu()
        save_file(kept, folder / "model.safetensors")
        write_json(folder / "config.json", self.config)

    def read(self, folder: Path) -> dict[str, Tensor]:
        (teacher,) = self._teacher
        checkpoint = open_checkpoint(str(folder))
        recipe = read_recipe(checkpoint, teacher.target, EagleOptions())
        if recipe.layers != self.layers:
            raise LoadError(f"{folder} reads the states {recipe.layers}; give -O layers={','.join(map(str, recipe.layers))}")
        head = trainable(Eagle3Head(recipe, checkpoint, teacher.target))
        if self.head.lm_head.weight.requires_grad and (head.draft_ids is None or head.draft_ids.tolist() != self.ids.tolist()):
            raise LoadError(f"{folder} drafts other tokens than are frequent in this text: go on without -O train_output")
        state = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
        return {**state, "head.fc.weight": state["head.fc.weight"] * self.scale}

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "layers": list(self.layers), "vocabulary": len(self.ids)}


def _scale(features: Features, layers: Sequence[LayerKey]) -> Tensor:
    """``[widths]``: the root mean square of each number of the states."""
    batch = features.batch(range(min(SCALING_SAMPLES, len(features.samples))))
    hidden = torch.cat([batch.hidden[key] for key in layers], dim=-1)
    return hidden.pow(2).mean(dim=0).sqrt().clamp_min(1e-6)


def _config(teacher: Teacher, options: EagleTraining, layers: Sequence[LayerKey]) -> dict[str, Any]:
    """config.json of a head with a layer of Llama's family, in the target's proportions."""
    target = teacher.target
    model = getattr(target, "model", None)
    like: Any = model.config.get_text_config() if model is not None else None
    heads = getattr(like, "num_attention_heads", None) or max(target.hidden_size // 64, 1)
    size = getattr(like, "head_dim", None) or target.hidden_size // heads
    rope = getattr(like, "rope_parameters", None) or {}
    kv_heads = heads if options.kv_heads is None else options.kv_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ParameterError(f"option kv_heads must divide the {heads} query heads; got {kv_heads}")
    numbers = [k if target.n_layers in layers else int(k) - 1 for k in layers]  # SpecForge numbers outputs
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": options.intermediate or getattr(like, "intermediate_size", None) or 4 * target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(like, "rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(teacher.ids),
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": numbers, "use_aux_hidden_state": True},
        "torch_dtype": "bfloat16",
    }


def _first_tensors(teacher: Teacher, config: dict[str, Any], taken: int) -> dict[str, Tensor]:
    """A new head: its matrices at random, so that sizes stay as they are, and the target's own output matrix."""
    if teacher.matrix is None:
        raise ParameterError(
            f"{teacher.target.name} has an output head that is more than a matrix; an EAGLE-3 head cannot begin from it"
        )
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))

    def matrix(n: int, k: int, gain: float = 1.0) -> Tensor:
        return torch.randn(n, k) * gain * k**-0.5

    def ones() -> Tensor:
        return torch.ones(width)

    layer = {
        "self_attn.q_proj.weight": matrix(heads, 2 * width),
        "self_attn.k_proj.weight": matrix(kv, 2 * width),
        "self_attn.v_proj.weight": matrix(kv, 2 * width),
        "self_attn.o_proj.weight": matrix(width, heads),
        "mlp.gate_proj.weight": matrix(inner, width),
        "mlp.up_proj.weight": matrix(inner, width),
        "mlp.down_proj.weight": matrix(width, inner),
        "post_attention_layernorm.weight": ones(),
        "input_layernorm.weight": ones(),
        "hidden_norm.weight": ones(),
    }
    tensors = {PREFIX + name: tensor for name, tensor in layer.items()}
    tensors |= {"fc.weight": matrix(width, taken * width), "lm_head.weight": teacher.matrix.cpu().clone()}
    tensors["norm.weight"] = torch.full((width,), _state_scale(teacher))
    known = teacher.known.cpu()
    ids = teacher.ids.cpu()
    return {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": known}


@torch.no_grad()
def _state_scale(teacher: Teacher) -> float:
    """The size of the numbers that the target's output matrix takes."""
    states, _ = teacher.look(range(min(16, teacher.target.vocab_size)), ())
    return float(states["final"].pow(2).mean().sqrt())
