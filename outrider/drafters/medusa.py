"""Medusa (Cai et al. 2024): heads on the target's last hidden state, each of which guesses one token further ahead, from it alone.

Known are the authors' own checkpoints (``medusa_lm_head.pt`` or safetensors beside a config), Medusa-2 checkpoints, which hold the model
that was trained together with its heads, and the layout that vLLM once read. How many heads and blocks there are is counted in
the tensors: published configs are wrong about it.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LoadError, OutriderWarning, ParameterError
from ..targets.base import Target
from .checkpoint import Checkpoint, write_config
from .heads import Block, Heads, HeadsDrafter, check_vocabulary, linear, reduce

WEIGHTS = "medusa_lm_head.pt"
INSIDE = "medusa_head."
"""Where a Medusa-2 checkpoint has its heads, beside the model's own tensors."""
DIALECTS = {
    "medusa": "Medusa-1 heads (FasterDecoding)",
    "medusa-2": "Medusa-2 heads, in the checkpoint of their model (FasterDecoding)",
    "vllm": "Medusa heads in vLLM's old layout",
}
FLAGS = ("medusa_num_heads", "medusa_num_layers", "medusa_head", "medusa_fc_bias", "medusa_choices")


def detect(checkpoint: Checkpoint) -> str | None:
    """The dialect of Medusa heads, by its content; None for anything else."""
    if any(name.startswith(INSIDE) for name in checkpoint.tensors):
        return "medusa-2"
    if any(re.fullmatch(r"\d+\.\d+\.(linear\.)?weight", name) for name in checkpoint.tensors):
        return "medusa"
    return "vllm" if any(re.fullmatch(r"blocks\.\d+\.layers\.\d+\.weight", name) for name in checkpoint.tensors) else None


class MedusaDrafter(HeadsDrafter):
    """Chains and trees from Medusa heads."""

    name = "medusa"

    @classmethod
    def inside(cls, target: Target) -> str | None:
        folder = Path(target.name)
        is_one = (folder / "config.json").is_file() and detect(Checkpoint.read(folder)) == "medusa-2"
        return target.name if is_one else None

    @classmethod
    def build(cls, checkpoint: Checkpoint, target: Target, options: Any) -> MedusaDrafter:
        """From a checkpoint. Raises LoadError for what is no Medusa checkpoint, is not known, or does not fit `target`."""
        dialect, heads = read_heads(checkpoint, target)
        facts = {
            "dialect": DIALECTS[dialect],
            "heads": len(heads),
            "blocks": len(heads.stacks[0]),  # type: ignore[arg-type]
            "states": "the target's last hidden state",
            "output matrices": "its own",
        }
        if heads.token_map is not None:
            facts["vocabulary"] = len(heads.token_map)
        drafter = cls(heads, target, options, facts)
        if dialect == "medusa-2" and not _same(checkpoint.folder, target.name):
            warnings.warn(
                f"the heads in {checkpoint.folder} were trained together with the model in it, and {target.name} is another one: they "
                f"may guess badly; use -t {checkpoint.folder}",
                OutriderWarning,
                stacklevel=2,
            )
        return drafter


def read_heads(checkpoint: Checkpoint, target: Target) -> tuple[str, Heads]:
    """The dialect, and the heads with their weights as they are stored. Raises as `MedusaDrafter.build` does."""
    dialect = detect(checkpoint)
    if dialect is None:
        raise LoadError(f"{checkpoint.folder} has no Medusa heads ({', '.join(DIALECTS.values())})")
    for key in FLAGS:
        checkpoint.asked.add(key)
    checkpoint.refuse_flags("medusa_")
    return dialect, _vllm_heads(checkpoint, target) if dialect == "vllm" else _own_heads(checkpoint, target, dialect)


def _own_heads(checkpoint: Checkpoint, target: Target, dialect: str) -> Heads:
    """``i.l.linear`` for block l of head i, then ``i.L`` for its output matrix."""
    part = checkpoint.under(INSIDE) if dialect == "medusa-2" else checkpoint
    count, blocks = part.count(r"(\d+)\.\d+\.weight"), part.count(r"0\.(\d+)\.linear\.weight")
    width = target.hidden_size
    stacks = [[Block(linear(part, f"{i}.{block}.linear", width, width, True)) for block in range(blocks)] for i in range(count)]
    outputs = [linear(part, f"{i}.{blocks}", None, width, False) for i in range(count)]
    for i, output in enumerate(outputs):
        check_vocabulary(part, f"{i}.{blocks}.weight", output.out_features, target)
    part.refuse_rest()
    if not count:
        raise LoadError(f"{checkpoint.folder} has Medusa blocks, but no output matrix {part.prefix}0.{blocks}.weight")
    return Heads(stacks, outputs)


def bare(checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of heads as the authors' own code reads them, which `_own_heads` does too.

    Raises LoadError as for drafting, and ParameterError for a reduced vocabulary, for which that code has no place.
    """
    _, heads = read_heads(checkpoint, target)
    if heads.token_map is not None:
        raise ParameterError(
            f"{checkpoint.folder} has heads over a vocabulary of {len(heads.token_map)} tokens (token_map), for which the format medusa has no "
            "place"
        )
    tensors: dict[str, Tensor] = {}
    for i in range(len(heads)):
        blocks: Any = heads.stacks[i]
        for number, block in enumerate(blocks):
            layer = block.linear
            bias = layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
            tensors |= {f"{i}.{number}.linear.weight": layer.weight.data, f"{i}.{number}.linear.bias": bias.data}
        output: Any = heads.outputs[i]
        tensors[f"{i}.{len(blocks)}.weight"] = output.weight.data
    config = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": len(heads.stacks[0]),  # type: ignore[arg-type]
        "base_model_name_or_path": target.name,
        "version": "2",
    }
    return config, tensors


def write(place: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A folder with the two files that the authors' code reads. Raises OSError."""
    write_config(place, config)
    try:
        torch.save({name: values.contiguous() for name, values in tensors.items()}, place / WEIGHTS)
    except RuntimeError as error:  # of a full disk
        raise OSError(str(error)) from error


def _vllm_heads(checkpoint: Checkpoint, target: Target) -> Heads:
    """``blocks.i.layers.l``, ``lm_heads.i`` (or one ``lm_head`` for all), and the ids of a reduced vocabulary in ``token_map``."""
    count, width = checkpoint.count(r"blocks\.(\d+)\.layers\.0\.weight"), target.hidden_size
    blocks = checkpoint.count(r"blocks\.0\.layers\.(\d+)\.weight")
    bias = checkpoint.value("medusa_fc_bias", bool, "blocks.0.layers.0.bias" in checkpoint)
    stacks = [
        [Block(linear(checkpoint, f"blocks.{i}.layers.{block}", width, width, bias)) for block in range(blocks)]
        for i in range(count)
    ]
    if checkpoint.value("original_lm_head", bool, False):
        names = ["lm_head"] * count
    else:
        names = [f"lm_heads.{i}" for i in range(count)]
    made = {name: linear(checkpoint, name, None, width, False) for name in dict.fromkeys(names)}
    heads = Heads(stacks, [made[name] for name in names])
    ids = checkpoint.take("token_map", None, kind="int", optional=True)
    if ids is not None:
        reduce(heads, checkpoint, ids, target)
    for name, output in made.items() if ids is None else ():
        check_vocabulary(checkpoint, f"{name}.weight", output.out_features, target)
    checkpoint.refuse_rest()
    return heads


def _same(folder: Path, name: str) -> bool:
    return Path(name).exists() and Path(name).resolve() == folder.resolve()
