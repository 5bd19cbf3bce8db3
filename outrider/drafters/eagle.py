"""EAGLE: a head of one decoder layer that goes on from the target's own hidden states.

EAGLE-1 (Li et al. 2024), EAGLE-2's dynamic trees (Li et al. 2024), EAGLE-3 (Li et al. 2025). The head is read from a checkpoint of any
known dialect (`eagle_formats`) and built from transformers' own layers (`eagle_head`); how it follows the text is said in
`features`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import LoadError, ParameterError
from ..targets.attention import KVSlot, Pass, Segment, passing
from ..targets.base import Target
from ..tree import DraftTree
from . import eagle_gguf
from .checkpoint import Checkpoint, resolve
from .eagle_formats import DIALECTS, read_recipe
from .eagle_head import Eagle1Head, Eagle3Head, EagleHead
from .features import FeatureDrafter
from .growth import TreeOptions


@dataclass(frozen=True)
class EagleOptions(TreeOptions):
    """layers: hidden states of the target to read, by layer entry (the number of layers: after the last), where the checkpoint's
    own numbers mean something else. norm_before_residual, norm_output, rope_theta: in place of what the checkpoint says or its
    dialect assumes. ignore: keys of config.json that change nothing, comma-separated. The others say how drafts grow:
    `TreeOptions`.
    """

    layers: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    rope_theta: float | None = None
    ignore: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_theta is not None and not self.rope_theta > 0:
            raise ParameterError(f"option rope_theta must be above 0; got {self.rope_theta}")


class EagleDrafter(FeatureDrafter):
    """Chains and trees from an EAGLE head."""

    name = "eagle"
    Options = EagleOptions
    takes_model = True
    head: EagleHead

    @classmethod
    def load(cls, target: Target, options: Any, source: str | None = None, **loading: Any) -> EagleDrafter:
        assert source is not None
        return cls.build(open_checkpoint(source), target, options)

    @classmethod
    def build(cls, checkpoint: Checkpoint, target: Target, options: EagleOptions) -> EagleDrafter:
        """From a checkpoint. Raises LoadError for a dialect, a tensor or a key that is not known, or that does not fit."""
        head = read_head(checkpoint, target, options)
        n_parameters = sum(p.numel() for name, p in head.named_parameters() if not name.startswith("embed_tokens."))
        if head.lm_head is None:
            n_parameters += target.vocab_size * target.hidden_size
        head.settle()
        probe(head, checkpoint, target)
        return cls(head, options, n_parameters / target.n_parameters if target.n_parameters else 0.0)

    def describe(self) -> dict[str, Any]:
        """What `outrider check` shows about the head."""
        recipe = self.head.recipe
        return {
            "dialect": DIALECTS[recipe.dialect].title,
            "layers": list(recipe.layers),
            "decoder": f"{recipe.config.num_hidden_layers} x {recipe.config.model_type}",
            "embeddings": "the target's" if self.head.embed_tokens is None else "its own",
            "output matrix": "the target's" if self.head.lm_head is None else "its own",
            "vocabulary": self.head.vocab_size if self.head.draft_ids is None else len(self.head.draft_ids),
        }


def open_checkpoint(source: str) -> Checkpoint:
    """What a folder, a hub id or a GGUF file holds. Raises LoadError."""
    place = resolve(source)
    return eagle_gguf.read(place) if place.is_file() else Checkpoint.read(place)


def read_head(checkpoint: Checkpoint, target: Target, options: EagleOptions) -> EagleHead:
    """The head with its weights as they are stored. Raises as `EagleDrafter.build` does."""
    recipe = read_recipe(checkpoint, target, options)
    if recipe.dialect == "eagle":
        for name in ("layers", "norm_before_residual", "norm_output"):
            if getattr(options, name) is not None:
                raise ParameterError(f"option {name} is for EAGLE-3; {checkpoint.folder} is {DIALECTS['eagle'].title}")
    head = (Eagle1Head if recipe.dialect == "eagle" else Eagle3Head)(recipe, checkpoint, target)
    checkpoint.ignore(*(name for name in checkpoint.tensors if name.endswith("rotary_emb.inv_freq")))
    checkpoint.refuse_rest()
    return head


@torch.inference_mode()
def probe(head: EagleHead, checkpoint: Checkpoint, target: Target) -> None:
    """Run a few pairs, all at once and one after the other: the family must take what it is given as it is, and attend through our
    function without a mask of its own. Raises LoadError.
    """
    family, tokens = head.recipe.config.model_type, [0, 1, 2]
    features = torch.linspace(-1, 1, 3 * head.width, dtype=target.dtype, device=target.device).view(3, -1)
    given: list[torch.Tensor] = []

    def run(slot: KVSlot, rows: list[int]) -> tuple[Pass, torch.Tensor]:
        segment = Segment(slot, DraftTree.chain(0, rows[1:]), 0)
        with passing([segment]) as done:
            place = torch.tensor(rows, device=target.device)
            states = head(head.embed(rows), features[rows], place)
        slot.length += segment.n
        return done, states

    hooks = [
        head.body.register_forward_pre_hook(lambda _, __, named: given.append(named["inputs_embeds"]), with_kwargs=True),
        head.body.layers[0].register_forward_pre_hook(
            lambda _, plain, named: given.append(plain[0] if plain else named["hidden_states"]), with_kwargs=True
        ),
    ]
    try:
        done, at_once = run(KVSlot(), tokens)
        slot = KVSlot()
        in_turn = torch.cat([run(slot, [token])[1] for token in tokens])
        head.logits(at_once)
    except (NotImplementedError, ParameterError) as error:
        raise LoadError(f"{checkpoint.folder}: {error}, and the head has none of its own") from error
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise LoadError(f"{checkpoint.folder}: layers of the family {family!r} cannot be run as a head ({error})") from error
    finally:
        for hook in hooks:
            hook.remove()
    attends = done.causal and not done.masked and set(done.windows) == set(range(len(head.body.layers)))
    tolerance = (1e-3 if target.dtype in (torch.float32, torch.float64) else 0.1) * float(at_once.abs().max())
    if not attends or not torch.equal(given[0], given[1]) or bool((at_once - in_turn).abs().max() > tolerance):
        raise LoadError(f"{checkpoint.folder}: layers of the family {family!r} do more than EAGLE's layers may; not supported")
    head.straighten(lambda: run(KVSlot(), tokens)[1])
