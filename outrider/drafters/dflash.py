"""DFlash: a small diffusion model that drafts a whole block in one pass (Chen et al. 2026, arXiv 2602.06036).

Its input is the anchor and a row of mask tokens, which see each other in both directions. What it knows of the text comes from the
target: hidden states of several of its layers are fused into one vector for each position, and every layer of the drafter makes keys and
values of it. All drafted tokens come out at once, each by its own law, so q is a product of laws; a tree takes the likeliest
combinations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from ..errors import LoadError, ParameterError
from ..sampling import Sampler
from ..targets.attention import NAME, KVSlot, PassCache, Segment, passing
from ..targets.base import Output, Target
from ..tree import DraftTree
from . import dflash_gguf
from .base import Drafter, Work
from .checkpoint import Checkpoint, resolve
from .dflash_formats import Recipe, read_recipe
from .features import PAIRS, FeatureState, store
from .growth import Growth, TreeOptions
from .heads import check_vocabulary, in_order, settle
from .mtp_head import fill


@dataclass(frozen=True)
class DFlashOptions(TreeOptions):
    """layers: hidden states of the target to read, by layer entry, in place of what the checkpoint says. ignore: keys of config.json
    that change nothing, comma-separated. growth: ``best`` by default. The others say how drafts grow: `TreeOptions`.
    """

    layers: tuple[int, ...] | None = None
    ignore: str | None = None


class Block(Segment):
    """A block of rows that see each other in both directions, and all that the slot keeps."""

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        return None


class DFlashHead(nn.Module):
    """The drafter's weights. Embeddings and, where the checkpoint has none, the output matrix are the target's."""

    def __init__(self, recipe: Recipe, checkpoint: Checkpoint, target: Target):
        super().__init__()
        self.recipe = recipe
        self.layers = recipe.layers
        self._target = (target,)  # in a tuple: its modules are not ours
        self.vocab_size = target.vocab_size
        self.body = _body(recipe, checkpoint)
        self.fc = nn.Linear(len(recipe.layers) * target.hidden_size, recipe.config.hidden_size, bias=False, device="meta")
        self.hidden_norm = type(self.body.norm)(recipe.config.hidden_size, eps=recipe.config.rms_norm_eps).to("meta")
        fill(self.fc, checkpoint, f"{recipe.fc}.")
        fill(self.hidden_norm, checkpoint, f"{recipe.norm}.")
        self.lm_head: nn.Linear | None = None
        self.draft_ids: Tensor | None  # [Vd], rising: the target's ids of a reduced vocabulary
        self.register_buffer("draft_ids", None, persistent=False)
        self._take_vocabulary(checkpoint)

    def _take_vocabulary(self, checkpoint: Checkpoint) -> None:
        """The checkpoint's own output matrix, and the target's ids of its rows where they are a part of the vocabulary."""
        checkpoint.ignore("embed_tokens.weight", "t2d")  # a copy of the target's, and what d2t says as well
        offsets = checkpoint.take("d2t", None, kind="int", optional=True)
        width = self.recipe.config.hidden_size
        if offsets is None and "lm_head.weight" not in checkpoint:
            return
        weight = checkpoint.take("lm_head.weight", None if offsets is None else len(offsets), width)
        self.lm_head = nn.Linear(width, len(weight), bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        if offsets is None:
            check_vocabulary(checkpoint, "lm_head.weight", len(weight), self._target[0])
            return
        ids = torch.arange(len(offsets)) + offsets.long()
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size or len(ids.unique()) != len(ids):
            raise LoadError(
                f"{checkpoint.folder}: tensor d2t does not lead to {len(ids)} different ids below {self.vocab_size}; it must hold offsets, "
                "target id minus draft id"
            )
        self.draft_ids = in_order([self.lm_head], ids, self.vocab_size)

    def fuse(self, hidden: Tensor) -> Tensor:
        """What the layers are told of n positions, ``[n, H]``, from the target's states ``[n, widths]``."""
        return self.hidden_norm(self.fc(hidden.to(self._target[0].device)))

    def remember(self, parts: Sequence[tuple[KVSlot, Tensor, int]]) -> None:
        """Store keys and values of what `fuse` made. Each part: the slot, ``[n, H]``, the position of its first row."""
        segments: list[Segment] = []
        positions: list[int] = []
        for slot, context, start in parts:
            segments.append(Segment(slot, DraftTree.chain(0, [0] * (len(context) - 1)), len(positions)))
            positions += range(start, start + len(context))
        contexts = torch.cat([context for _, context, _ in parts])[None]
        rotary = self.body.rotary_emb(contexts, torch.tensor([positions], device=contexts.device))
        with passing(segments, stores=True):
            for layer in self.body.layers:
                layer.self_attn(contexts, position_embeddings=rotary, attention_mask=None, cache=PassCache())
        for segment in segments:
            segment.slot.length += segment.n

    def forward(self, parts: Sequence[tuple[KVSlot, int, int]]) -> Tensor:
        """Logits ``[sequences, drafts, V]``, or ``Vd`` of a reduced vocabulary. Each part: the slot, the anchor, its position."""
        size, (target,) = self.recipe.block_size, self._target
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        for slot, anchor, position in parts:
            block = [anchor, *[self.recipe.mask] * (size - 1)]
            segments.append(Block(slot, DraftTree.chain(anchor, block[1:]), len(tokens)))
            tokens += block
            positions += range(position, position + size)
        inputs = target.embed(tokens)[None]
        place = torch.tensor([positions], device=inputs.device)
        with passing(segments):
            states = self.body(inputs_embeds=inputs, position_ids=place, cache=PassCache(), use_cache=True).last_hidden_state
        states = states.view(len(parts), size, -1)[:, 0 if self.recipe.from_anchor else 1 :]
        return self.logits(states.flatten(0, 1)).view(len(parts), states.shape[1], -1)

    def logits(self, states: Tensor) -> Tensor:
        (target,) = self._target
        logits = target.head(states) if self.lm_head is None else self.lm_head(states)
        return logits[:, : self.vocab_size]


class DFlashDrafter(Drafter):
    """Chains and trees from a `DFlashHead`."""

    name = "dflash"
    Options = DFlashOptions
    takes_model = True
    options: DFlashOptions

    def __init__(self, head: DFlashHead, options: DFlashOptions | None = None):
        super().__init__(options)
        self.head = head
        self.layers = head.layers

    @classmethod
    def load(cls, target: Target, options: Any, source: str | None = None, **loading: Any) -> DFlashDrafter:
        assert source is not None
        place = resolve(source)
        checkpoint = dflash_gguf.read(place) if place.is_file() else Checkpoint.read(place)
        recipe = read_recipe(checkpoint, target, options.layers, options.ignore)
        head = DFlashHead(recipe, checkpoint, target)
        checkpoint.ignore(*(name for name in checkpoint.tensors if name.endswith("rotary_emb.inv_freq")))
        checkpoint.refuse_rest()
        settle(head, target)
        _probe(head, checkpoint, target)
        return cls(head, options)

    def describe(self) -> dict[str, Any]:
        recipe = self.head.recipe
        return {
            "dialect": recipe.dialect,
            "block": recipe.block_size,
            "drafts": recipe.block_size - (not recipe.from_anchor),
            "layers": list(recipe.layers),
            "decoder": f"{recipe.config.num_hidden_layers} x {recipe.config.model_type}",
            "embeddings": "the target's",
            "output matrix": "the target's" if self.head.lm_head is None else "its own",
        }

    def open(self, sampler: Sampler) -> FeatureState:
        return FeatureState(sampler, reach=0)  # keys and values depend on no token

    def observe(self, work: Sequence[tuple[Any, Sequence[int], Output, Sequence[int]]]) -> None:
        store(work, self.layers)

    @torch.inference_mode()
    def propose(self, work: Work) -> list[DraftTree]:
        growths = []
        able: list[tuple[Growth, FeatureState, int]] = []
        options = self.options if self.options.growth or self.options.shape == "chain" else replace(self.options, growth="best")
        drafts = self.head.recipe.block_size - (not self.head.recipe.from_anchor)
        for ask in work:
            assert isinstance(ask.state, FeatureState)
            budget = replace(ask.budget, depth=min(ask.budget.depth, drafts))
            growths.append(Growth(ask.state.sampler, ask.tokens[-1], budget, options))
            position = len(ask.tokens) - 1
            if ask.state.end > position:
                ask.state.truncate(position)
            if growths[-1].frontier and ask.state.end == position and position > ask.state.first:
                able.append((growths[-1], ask.state, position))
        if able:
            self._catch_up([state for _, state, _ in able])
            found = self.head([(state.kv, growth.tokens[0], position) for growth, state, position in able])
            for (growth, _, _), logits in zip(able, found):
                for row in logits:
                    if growth.frontier:
                        growth.extend(row.expand(len(growth.frontier), -1), self.head.draft_ids)
        return [growth.tree() for growth in growths]

    def _catch_up(self, behind: Sequence[FeatureState]) -> None:
        """Store the keys and values of every position whose states are known."""
        for state in behind:
            state.fuse(self.head)
        while behind := [state for state in behind if state.kv.length < state.fused]:
            most = max(1, PAIRS // len(behind))
            parts = []
            for state in behind:
                have = state.kv.length
                parts.append((state.kv, state.features[have : have + most], state.first + have))
            self.head.remember(parts)


def _body(recipe: Recipe, checkpoint: Checkpoint) -> Any:
    """The decoder of Qwen3, which DFlash's layers are."""
    from accelerate import init_empty_weights
    from transformers import AutoModel

    try:
        with init_empty_weights(include_buffers=False):
            body: Any = AutoModel.from_config(recipe.config, attn_implementation=NAME)
    except Exception as error:  # transformers has errors of many kinds for what a config cannot be
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise LoadError(f"{checkpoint.folder}: cannot build its layers: {first}") from error
    body.set_input_embeddings(nn.Identity())
    fill(body, checkpoint, "")
    return body


@torch.inference_mode()
def _probe(head: DFlashHead, checkpoint: Checkpoint, target: Target) -> None:
    """Draft once. Raises LoadError when the target lacks what the drafter borrows, or does not fit."""
    hidden = torch.linspace(-1, 1, 2 * head.fc.in_features, dtype=target.dtype, device=target.device).view(2, -1)
    slot = KVSlot()
    try:
        head.remember([(slot, head.fuse(hidden), 0)])
        head([(slot, 0, 2)])
    except (NotImplementedError, ParameterError) as error:
        raise LoadError(f"{checkpoint.folder}: {error}, and the drafter has none of its own") from error
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise LoadError(
            f"{checkpoint.folder}: the drafter cannot be run with {target.name} ({error}): it was made for another target"
        ) from error
