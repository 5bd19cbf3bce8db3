"""Hydra (Ankner et al. 2024): Medusa's heads, grounded in the tokens drafted before theirs, so that a path is a sentence.

Head i gets the target's last hidden state and the embeddings of the anchor and of the drafted tokens before its own. In the
``prefix-mlp`` architecture (Hydra++) a decoder layer over the hidden states of all verified positions comes first, built from the target's
own family; its KV holds verified positions alone.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from ..errors import LoadError
from ..sampling import Sampler
from ..targets.attention import NAME, KVSlot, Segment
from ..targets.base import Output, Target
from ..tree import DraftTree
from .base import State, Work
from .checkpoint import Checkpoint
from .features import FeatureReader, FeatureState, last_states, store
from .heads import Block, Heads, HeadsDrafter, check_vocabulary, linear, reduce, settle

ARCHITECTURES = {"mlp": "Hydra heads", "prefix-mlp": "Hydra++ heads (prefix-mlp)"}
PREFIX = "prefix_embeding_layer."  # as the published files spell it
FLAGS = ("hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "hydra_heads")


def detect(checkpoint: Checkpoint) -> str | None:
    """The architecture of Hydra heads, by config or content; None for anything else."""
    if named := checkpoint.config.get("hydra_head_arch"):
        return str(named)
    if any(name.startswith(PREFIX) for name in checkpoint.tensors):
        return "prefix-mlp"
    return "mlp" if any(name.startswith("hydra_") for name in checkpoint.tensors) else None


class HydraDrafter(HeadsDrafter):
    """Chains and trees from Hydra heads."""

    name = "hydra"

    @classmethod
    def build(cls, checkpoint: Checkpoint, target: Target, options: Any) -> HydraDrafter:
        """From a checkpoint. Raises LoadError for what is no Hydra checkpoint, is not known, or does not fit `target`."""
        architecture = detect(checkpoint)
        if architecture is None:
            raise LoadError(f"{checkpoint.folder} has no Hydra heads: no tensor is called hydra_...")
        if architecture not in ARCHITECTURES:
            raise LoadError(
                f"{checkpoint.folder}: 'hydra_head_arch' is {architecture!r}; of Hydra's heads {' and '.join(ARCHITECTURES)} are supported"
            )
        for key in FLAGS:
            checkpoint.asked.add(key)
        checkpoint.refuse_flags("hydra_")
        if offset := checkpoint.value("hidden_state_offset", int, 0):
            raise LoadError(
                f"{checkpoint.folder}: 'hidden_state_offset' is {offset}; only heads on the last hidden state (0) are supported"
            )
        heads = _heads(checkpoint, target)
        if (ids := checkpoint.take("token_map", None, kind="int", optional=True)) is not None:
            reduce(heads, checkpoint, ids, target)
        prefix = Prefix(checkpoint.under(PREFIX), target) if architecture == "prefix-mlp" else None
        checkpoint.ignore(*(name for name in checkpoint.tensors if name.startswith(PREFIX)))  # has seen to that itself
        checkpoint.refuse_rest()
        if heads.grounded:
            _needs_embeddings(checkpoint, target)
        facts = {
            "dialect": ARCHITECTURES[architecture],
            "heads": len(heads),
            "blocks": len(heads.stacks[0]),  # type: ignore[arg-type]
            "grounded": heads.grounded,
            "states": "the target's last hidden state" + ("s, through a decoder layer" if prefix else ""),
            "embeddings": "the target's" if heads.grounded else "none",
            "output matrices": "its own",
        }
        if prefix is None:
            return HydraDrafter(heads, target, options, facts)
        return PrefixDrafter(heads, prefix, target, options, facts)


class PrefixDrafter(HydraDrafter):
    """Hydra++: what the heads get is the last row of a decoder layer over all hidden states."""

    def __init__(self, heads: Heads, prefix: Prefix, target: Target, options: Any = None, facts: dict[str, Any] | None = None):
        super().__init__(heads, target, options, facts)
        self.prefix = prefix
        settle(prefix, target)
        rows = [0, 1, 2]
        prefix.straighten(
            lambda: prefix.run(rows, target.embed(rows), rows, [Segment(KVSlot(), DraftTree.chain(0, [1, 2]), 0)])
        )

    def open(self, sampler: Sampler) -> State:
        return FeatureState(sampler)

    def observe(self, work: Sequence[tuple[Any, Sequence[int], Output, Sequence[int]]]) -> None:
        store(work, self.layers)

    def bases(self, work: Work) -> list[Tensor | None]:
        return last_states(self.prefix, work)


class Prefix(FeatureReader):
    """One decoder layer of the target's family, with its own final norm, over the target's hidden states."""

    layers = ("final",)

    def __init__(self, checkpoint: Checkpoint, target: Target):
        super().__init__()
        model = getattr(target, "model", None)
        if model is None:
            raise LoadError(
                f"{checkpoint.folder}: prefix-mlp heads need a layer of the target's family, which only targets of transformers have"
            )
        from accelerate import init_empty_weights
        from transformers import AutoModel

        config = copy.deepcopy(model.config.get_text_config())
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = kinds[:1]
        config.num_hidden_layers = 1
        with init_empty_weights(include_buffers=False):
            self.body: Any = AutoModel.from_config(config, attn_implementation=NAME)
        self.body.set_input_embeddings(nn.Identity())
        for name, parameter in list(self.body.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            tensor = checkpoint.take(name, *parameter.shape)
            setattr(self.body.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
        checkpoint.ignore("embed_tokens.weight", *(name for name in checkpoint.tensors if name.endswith("rotary_emb.inv_freq")))
        checkpoint.refuse_rest()

    def fuse(self, hidden: Tensor) -> Tensor:
        return hidden

    def run(
        self, tokens: Sequence[int], features: Tensor, positions: Sequence[int], segments: list[Segment], stores: bool = False
    ) -> Tensor:
        with self.passing(segments, stores):
            return self.decode(features, torch.tensor(positions, device=features.device))


def _heads(checkpoint: Checkpoint, target: Target) -> Heads:
    """``hydra_mlp.i.j`` for block j of head i, ``hydra_lm_head.i`` for its output layer; where there is dropout, every second number
    is missing, and the output layer is ``hydra_lm_head.i.1``. Whether they are grounded follows from their width.
    """
    count, width = checkpoint.count(r"hydra_mlp\.(\d+)\.\d+\.linear\.weight"), target.hidden_size
    stacks, outputs, grounded = [], [], False
    for i in range(count):
        found = [re.fullmatch(rf"hydra_mlp\.{i}\.(\d+)\.linear\.weight", name) for name in checkpoint.tensors]
        numbers = sorted(int(match[1]) for match in found if match)
        if i == 0:
            shape = checkpoint.shape(f"hydra_mlp.0.{numbers[0]}.linear.weight")
            grounded = shape[0] != shape[-1]
        stack = []
        for number in numbers:
            name, first = f"hydra_mlp.{i}.{number}", number == numbers[0]
            inputs = width * (i + 2) if grounded and first else width
            residual = linear(checkpoint, f"{name}.res_connection", width, inputs, True) if grounded and first else None
            stack.append(Block(linear(checkpoint, f"{name}.linear", width, inputs, True), residual))
        stacks.append(stack)
        name = f"hydra_lm_head.{i}.1" if f"hydra_lm_head.{i}.1.weight" in checkpoint else f"hydra_lm_head.{i}"
        outputs.append(linear(checkpoint, name, None, width, True))
        if "token_map" not in checkpoint:
            check_vocabulary(checkpoint, f"{name}.weight", outputs[-1].out_features, target)
    if not count:
        raise LoadError(
            f"{checkpoint.folder} has no tensor hydra_mlp.0.0.linear.weight: it is incomplete, or of another dialect"
        )
    return Heads(stacks, outputs, grounded)


def _needs_embeddings(checkpoint: Checkpoint, target: Target) -> None:
    try:
        target.embed([0])
    except NotImplementedError as error:
        raise LoadError(f"{checkpoint.folder}: grounded heads need the target's embeddings, and {error}") from error
