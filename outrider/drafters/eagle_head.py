"""EAGLE heads: one decoder layer (or a few) of a family that transformers has, between a feature and the output matrix.

EAGLE-1 and 2 (Li et al. 2024) put token embedding and feature through one linear layer and the decoder layer behind it; the feature is
the input of the target's output matrix, and so is what comes out. EAGLE-3 (Li et al. 2025) fuses three of the target's states
into a feature, and its attention reads both halves, each normed on its own; what is recycled is the residual stream.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from ..errors import LoadError
from ..targets.attention import NAME, Segment
from ..targets.base import Target
from .checkpoint import Checkpoint
from .eagle_formats import Recipe
from .features import FeatureHead
from .heads import check_vocabulary, in_order, settle


class EagleHead(FeatureHead):
    """What both kinds share. Embeddings and output matrix are the target's where the checkpoint has none."""

    def __init__(self, recipe: Recipe, checkpoint: Checkpoint, target: Target):
        super().__init__()
        self.recipe = recipe
        self.layers = recipe.layers
        self._target = (target,)  # in a tuple: its modules are not ours
        self.width = recipe.config.hidden_size
        self.vocab_size = target.vocab_size
        self.device = target.device
        self.body = _body(recipe, checkpoint)
        table = checkpoint.take("embed_tokens.weight", None, self.width, optional=True)
        self.embed_tokens = None if table is None else nn.Embedding.from_pretrained(table)
        self.lm_head: nn.Linear | None = None
        self.norm: nn.Module = nn.Identity()
        if table is not None:
            check_vocabulary(checkpoint, "embed_tokens.weight", len(table), target)

    @abstractmethod
    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, **how: Any) -> Tensor:
        """States ``[n, H]`` of n pairs in their order. how: as in `decode`."""

    def run(
        self, tokens: Sequence[int], features: Tensor, positions: Sequence[int], segments: list[Segment], stores: bool = False
    ) -> Tensor:
        with self.passing(segments, stores):
            place = torch.tensor(positions, device=features.device)
            return self.forward(self.embed(tokens), features, place)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """``[n, H]``"""
        (target,) = self._target
        if self.embed_tokens is None:
            return target.embed(tokens)
        return self.embed_tokens(torch.tensor(tokens, device=self.embed_tokens.weight.device)).to(target.dtype)

    def recycle(self, states: Tensor) -> Tensor:
        return self.norm(states) if self.recipe.norm_output else states

    def logits(self, states: Tensor) -> Tensor:
        (target,) = self._target
        states = self.norm(states)
        logits = target.head(states) if self.lm_head is None else self.lm_head(states)
        return logits[:, : self.vocab_size]

    # ---- loading ------------------------------------------------------------------------------------------------

    def _linear(self, checkpoint: Checkpoint, name: str, n: int, k: int, bias: bool) -> nn.Linear:
        layer = nn.Linear(k, n, bias=bias, device="meta")
        _fill(layer, checkpoint, lambda part: f"{name}.{part}")
        return layer

    def _norm(self, checkpoint: Checkpoint, name: str, size: int) -> nn.Module:
        like = self.body.layers[-1].post_attention_layernorm
        norm = type(like)(size, eps=self.recipe.config.rms_norm_eps).to("meta")
        _fill(norm, checkpoint, lambda part: f"{name}.{part}")
        return norm

    def settle(self) -> None:
        """Bring the weights to where and how the target computes."""
        (target,) = self._target
        if self.lm_head is not None and self.draft_ids is not None:
            self.draft_ids = in_order([self.lm_head], self.draft_ids, self.vocab_size)
        settle(self, target, widened="embed_tokens.")


class Eagle1Head(EagleHead):
    """EAGLE-1 and 2: ``fc([embedding, feature])`` is what the layers get; the output matrix reads their result as it is."""

    def __init__(self, recipe: Recipe, checkpoint: Checkpoint, target: Target):
        super().__init__(recipe, checkpoint, target)
        if target.hidden_size != self.width:
            raise LoadError(
                f"{checkpoint.folder}: the head is {self.width} wide and {target.name} is {target.hidden_size}: it was made for "
                "another target"
            )
        self.fc = self._linear(checkpoint, "fc", self.width, 2 * self.width, recipe.fc_bias)
        self.body.layers[0].input_layernorm = nn.Identity()
        _fill(self.body, checkpoint, lambda name: name)

    def fuse(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.device)

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, **how: Any) -> Tensor:
        return self.decode(self.fc(torch.cat([embeddings, features], dim=-1)), positions, **how)


class EntryNorm(nn.Module):
    """Takes the place of the first layer's input norm: the normed embedding and the normed feature side by side, ``[..., 2H]``."""

    def __init__(self, embedding_norm: nn.Module, feature_norm: nn.Module):
        super().__init__()
        self.embedding_norm = embedding_norm
        self.feature_norm = feature_norm
        self.embeddings: Tensor  # of the pass in progress

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([self.embedding_norm(self.embeddings), self.feature_norm(features)], dim=-1)


class Eagle3Head(EagleHead):
    """EAGLE-3: features fused from several of the target's states, and a first layer that attends with embedding and feature."""

    def __init__(self, recipe: Recipe, checkpoint: Checkpoint, target: Target):
        super().__init__(recipe, checkpoint, target)
        taken, wide = len(recipe.layers), target.hidden_size
        self.fc = self._linear(checkpoint, "fc", self.width, taken * wide, recipe.fc_bias)
        self.norm = self._norm(checkpoint, "norm", self.width)
        self.input_norm = self._norm(checkpoint, "input_norm", taken * wide) if recipe.input_norm else None
        norms = [self._norm(checkpoint, f"fc_norm.{i}", wide) for i in range(taken)] if recipe.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self._fill_first(checkpoint)
        turns = self.body.rotary_emb.inv_freq
        if (factors := checkpoint.take("rope_factors", len(turns), optional=True)) is not None:
            turns /= factors.to(turns)  # llama.cpp's way to say how a rotation is stretched
        self._fill_vocabulary(checkpoint, target)

    def _fill_first(self, checkpoint: Checkpoint) -> None:
        """The layers' weights; the first one's attention is twice as wide at its entrance."""
        first, prefix = self.body.layers[0], self.recipe.prefix
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(first.self_attn, name)
            wide = nn.Linear(2 * self.width, plain.out_features, bias=plain.bias is not None, device="meta")
            setattr(first.self_attn, name, wide)
        _fill(
            self.body, checkpoint, lambda name: name.replace("layers.0.", prefix, 1) if name.startswith("layers.0.") else name
        )
        hidden_norm = self._norm(checkpoint, f"{prefix}hidden_norm", self.width)
        self.hidden_norm = hidden_norm if self.recipe.norm_before_residual else nn.Identity()
        first.input_layernorm = EntryNorm(
            first.input_layernorm, nn.Identity() if self.recipe.norm_before_residual else hidden_norm
        )

    def _fill_vocabulary(self, checkpoint: Checkpoint, target: Target) -> None:
        """Output matrix and reduced vocabulary."""
        offsets = checkpoint.take("d2t", None, kind="int", optional=True)
        known = checkpoint.take("t2d", None, kind="bool", optional=True)
        if known is not None:
            check_vocabulary(checkpoint, "t2d", len(known), target)
        if offsets is not None:
            self._set_vocabulary(checkpoint, offsets, known)
        if "lm_head.weight" in checkpoint:
            size = len(offsets) if offsets is not None else None
            weight = checkpoint.take("lm_head.weight", size, self.width)
            if offsets is None:
                check_vocabulary(checkpoint, "lm_head.weight", len(weight), target)
            self.lm_head = nn.Linear(self.width, len(weight), bias=False, device="meta")
            self.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        elif offsets is not None:
            checkpoint.take("lm_head.weight", len(offsets), self.width)  # says that it is missing
        elif checkpoint.value("tie_word_embeddings", bool, False) and self.embed_tokens is not None:
            self.lm_head = nn.Linear(self.width, len(self.embed_tokens.weight), bias=False, device="meta")
            self.lm_head.weight = nn.Parameter(self.embed_tokens.weight, requires_grad=False)
        elif self.width != target.hidden_size:
            raise LoadError(
                f"{checkpoint.folder} has no lm_head.weight, and the head is {self.width} wide, so it cannot use the output matrix of "
                f"{target.name}, which takes {target.hidden_size}"
            )
        elif checkpoint.value("tie_word_embeddings", bool, False) and not _is_tied(target):
            raise LoadError(
                f"{checkpoint.folder}: tie_word_embeddings makes the output matrix the embeddings, but it has none, and those of "
                f"{target.name} are not its output matrix"
            )

    def _set_vocabulary(self, checkpoint: Checkpoint, offsets: Tensor, known: Tensor | None) -> None:
        ids = torch.arange(len(offsets)) + offsets.long()
        limit = len(known) if known is not None else self.vocab_size
        if len(ids) == 0 or not 0 <= int(ids.min()) <= int(ids.max()) < limit or len(ids.unique()) != len(ids):
            raise LoadError(
                f"{checkpoint.folder}: tensor d2t does not lead to {len(ids)} different ids below {limit}; it must hold offsets, "
                "target id minus draft id"
            )
        if known is not None and not torch.equal(known.nonzero()[:, 0], ids.sort().values):
            raise LoadError(f"{checkpoint.folder}: tensors d2t and t2d name different tokens ({len(ids)}, {int(known.sum())})")
        self.draft_ids = ids

    def fuse(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.device)
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(hidden)

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, **how: Any) -> Tensor:
        self.body.layers[0].input_layernorm.embeddings = embeddings[None]
        return self.decode(self.hidden_norm(features), positions, **how)


def _body(recipe: Recipe, checkpoint: Checkpoint) -> Any:
    """The family's own decoder without embeddings and last norm, its weights still to be filled in."""
    from accelerate import init_empty_weights
    from transformers import AutoModel

    family = recipe.config.model_type
    try:
        with init_empty_weights(include_buffers=False):
            body: Any = AutoModel.from_config(recipe.config, attn_implementation=NAME)
    except Exception as error:  # transformers has errors of many kinds for what a family cannot do
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise LoadError(f"{checkpoint.folder}: cannot build a {family} layer: {first}") from error
    layer = body.layers[0] if hasattr(body, "layers") else None
    parts = [getattr(getattr(layer, "self_attn", None), name, None) for name in ("q_proj", "k_proj", "v_proj")]
    named = (layer, "input_layernorm"), (layer, "post_attention_layernorm"), (body, "norm"), (recipe.config, "rms_norm_eps")
    if not all(isinstance(part, nn.Linear) for part in parts) or not all(hasattr(owner, name) for owner, name in named):
        raise LoadError(f"{checkpoint.folder}: layers of the family {family!r} are not built like Llama's, which EAGLE needs")
    body.set_input_embeddings(nn.Identity())
    body.norm = nn.Identity()
    return body


def _is_tied(target: Target) -> bool:
    """Whether the target's output matrix is that of its embeddings."""
    some = target.embed([0, 1, 2])
    logits, products = target.head(some)[:, :3], some @ some.T
    return bool(torch.allclose(logits, products, rtol=0.01, atol=0.01 * float(products.abs().max())))


def _fill(module: nn.Module, checkpoint: Checkpoint, name_of: Any) -> None:
    """Give every parameter that has no value yet the tensor of the checkpoint that `name_of` says."""
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        tensor = checkpoint.take(name_of(name), *parameter.shape)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
