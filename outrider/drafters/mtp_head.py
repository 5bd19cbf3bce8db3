"""Multi-token-prediction modules as models are published with them: where they are in a checkpoint, and what they compute.

A module takes the hidden state of a position and the token after it, each normed, side by side through one projection, then one
decoder layer of the target's own family and a norm; the target's output matrix makes logits of it (DeepSeek-V3 report, section
2.2). transformers leaves these tensors aside when it loads a model, so they are read from its folder here.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from ..errors import LoadError
from ..targets.attention import NAME, KVSlot, Pass, Segment, passing
from ..targets.base import LayerKey, Target
from ..tree import DraftTree
from .checkpoint import Checkpoint
from .features import FeatureHead


@dataclass(frozen=True)
class Layout:
    """How a family stores its modules, and what it does with their inputs.

    projection: matches the projections' tensors; its groups are the prefix of all modules and, where each has its own, their number.
    own, block: prefixes of a module's own parts and of its decoder layer, after that of all; ``{}`` is the number. parts: names of
    the norm of the embedding, the norm of the hidden state, the projection and the last norm. post_norm: whether the hidden
    state is the one after the target's final norm. hidden_first: whether it comes before the embedding. copies: of what is the
    target's.
    """

    family: str
    projection: str
    own: str
    block: str
    parts: tuple[str, str, str, str]
    post_norm: bool = True
    hidden_first: bool = False
    copies: tuple[str, ...] = ()


LAYOUTS = (
    Layout(
        "DeepSeek-V3, GLM-4.5",
        r"(.*\blayers\.)(\d+)\.eh_proj\.weight",
        "{}.",
        "{}.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    ),
    Layout(
        "Qwen3-Next, Qwen3.5",
        r"(mtp\.)fc\.weight",
        "",
        "layers.{}.",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    ),
    Layout(
        "MiMo",
        r"(model\.mtp_layers\.)(\d+)\.input_proj\.weight",
        "{}.",
        "{}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        post_norm=False,
        hidden_first=True,
    ),
)


@dataclass(frozen=True)
class Found:
    """Where a checkpoint has modules: of which layout, the prefix of all, and their numbers."""

    layout: Layout
    prefix: str
    numbers: tuple[int, ...]

    def holds(self, name: str) -> bool:
        """Whether a tensor belongs to one of them."""
        layout = self.layout
        return name.startswith(tuple(self.prefix + p.format(n) for n in self.numbers for p in (layout.own, layout.block)))


def find(checkpoint: Checkpoint) -> Found | None:
    """The modules in a checkpoint; None where there are none of a known layout."""
    for layout in LAYOUTS:
        matches = [match for name in checkpoint.tensors if (match := re.fullmatch(layout.projection, name))]
        if not matches:
            continue
        prefix = matches[0][1]
        named = (
            {int(match[2]) for match in matches} if matches[0].re.groups > 1 else _numbers(checkpoint, prefix + layout.block)
        )
        return Found(layout, prefix, tuple(sorted(named)))
    return None


def _numbers(checkpoint: Checkpoint, block: str) -> set[int]:
    pattern = re.escape(block).replace(r"\{\}", r"(\d+)")
    return {int(match[1]) for name in checkpoint.tensors if (match := re.match(pattern, name))}


class MtpModule(FeatureHead):
    """One module. What it gives back is normed, and stands for the hidden state when the same or the next module goes on from it."""

    def __init__(self, layout: Layout, target: Target, parts: Sequence[nn.Module], body: Any):
        """parts: norm of the embedding, norm of the hidden state, projection. body: a decoder of one layer, with its last norm."""
        super().__init__()
        self.layers: tuple[LayerKey, ...] = ("final" if layout.post_norm else target.n_layers,)
        self.hidden_first = layout.hidden_first
        self.embedding_norm, self.hidden_norm, self.projection = parts
        self.body = body
        self._target = (target,)  # in a tuple: its modules are not ours

    def fuse(self, hidden: Tensor) -> Tensor:
        (target,) = self._target
        return hidden.to(target.device)

    def run(
        self, tokens: Sequence[int], features: Tensor, positions: Sequence[int], segments: list[Segment], stores: bool = False
    ) -> Tensor:
        (target,) = self._target
        place = torch.tensor(positions, device=features.device)
        with self.passing(segments, stores):
            return self(target.embed(tokens), features, place)

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, **how: Any) -> Tensor:
        """States ``[n, H]`` of n pairs in their order. how: as in `decode`."""
        halves = [self.embedding_norm(embeddings), self.hidden_norm(features)]
        inputs = self.projection(torch.cat(halves[::-1] if self.hidden_first else halves, dim=-1))
        return self.decode(inputs, positions, **how)

    def recycle(self, states: Tensor) -> Tensor:
        return states

    def logits(self, states: Tensor) -> Tensor:
        (target,) = self._target
        return target.head(states)[:, : target.vocab_size]


# ---- loading ----------------------------------------------------------------------------------------------------------


def load_modules(checkpoint: Checkpoint, target: Target) -> tuple[Layout, list[MtpModule]]:
    """The modules of a checkpoint for the target that they belong to. Raises LoadError for what is missing, left over or unknown."""
    found = find(checkpoint)
    if found is None:
        families = "; ".join(layout.family for layout in LAYOUTS)
        raise LoadError(f"{checkpoint.folder} has no multi-token-prediction module of a known layout ({families})")
    model = model_of(target)
    layout, part = found.layout, checkpoint.under(found.prefix)
    _check_numbers(part, found, target)
    modules: list[MtpModule] = []
    shared: dict[str, list[nn.Module]] = {}
    for place, number in enumerate(found.numbers):
        own, block = layout.own.format(number), layout.block.format(number)
        body = _body(model, part, block, place)
        if own not in shared:
            shared[own] = _parts(part, own, layout, body)
        *parts, body.norm = shared[own]
        modules.append(MtpModule(layout, target, parts, body))
        part.ignore(*(own + name for name in layout.copies))
    others = (name for name in part.tensors if not found.holds(found.prefix + name) or name.endswith("rotary_emb.inv_freq"))
    part.ignore(*others)
    part.refuse_rest()
    return layout, modules


def model_of(target: Target) -> Any:
    """The target's model of transformers, whose layers modules are made of. Raises LoadError for other targets."""
    model = getattr(target, "model", None)
    if isinstance(model, nn.Module) and hasattr(model, "get_decoder"):
        return model
    raise LoadError(
        f"multi-token prediction needs a target of transformers, and {target.name} is none: the libraries that run GGUF files do not "
        "offer such modules through their Python interface. Give the model's safetensors folder, or another drafter"
    )


def _check_numbers(part: Checkpoint, found: Found, target: Target) -> None:
    numbers = found.numbers
    first = target.n_layers if found.layout is LAYOUTS[0] else 0
    if numbers != tuple(range(first, first + max(len(numbers), 1))):
        named = ", ".join(map(str, numbers)) or "none"
        raise LoadError(
            f"{part.folder}: modules {part.prefix}{found.layout.block.format('N')} should be numbered from {first} on without a gap; "
            f"there are {named}: it is incomplete, or made for another target than {target.name}"
        )


def _body(model: Any, part: Checkpoint, block: str, place: int) -> Any:
    """A decoder of the target's own class with one layer, the checkpoint's `block`, and whose last norm is still missing.

    place: which layer it calls itself, so that several modules can share a cache.
    """
    from accelerate import init_empty_weights

    config = _one_layer(
        model.config.get_text_config(), sparse=any(name.startswith(block + "mlp.experts.") for name in part.tensors)
    )
    try:
        with init_empty_weights(include_buffers=False):
            body: Any = type(model.get_decoder())(config)
        layer, norm = body.layers[0], body.norm
    except Exception as error:  # transformers has errors of many kinds for what a family cannot do
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise LoadError(f"{part.folder}: cannot build a layer of {type(model).__name__}: {first}") from error
    assert isinstance(norm, nn.Module)
    body.set_input_embeddings(nn.Identity())
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = place
    fill(layer, part, block)
    return body


def _one_layer(config: Any, sparse: bool) -> Any:
    """The config of one layer of the family: full attention, with experts or without."""
    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    for key, value in (
        ("layer_types", ["full_attention"]),
        ("mlp_layer_types", ["sparse" if sparse else "dense"]),
        ("mlp_only_layers", [] if sparse else [0]),
        ("first_k_dense_replace", 0 if sparse else 1),
        ("decoder_sparse_step", 1),
        ("num_nextn_predict_layers", 0),  # remote code builds the target's own modules from it
    ):
        if getattr(one, key, None) is not None:
            setattr(one, key, value)
    one._attn_implementation = NAME
    return one


def _parts(part: Checkpoint, own: str, layout: Layout, body: Any) -> list[nn.Module]:
    """Both input norms, the projection, and the last norm."""
    size = body.config.hidden_size
    embedding_norm, hidden_norm, last_norm = (copy.deepcopy(body.norm) for _ in range(3))
    projection = nn.Linear(2 * size, size, bias=False, device="meta")
    modules = [embedding_norm, hidden_norm, projection, last_norm]
    for module, name in zip(modules, layout.parts):
        fill(module, part, f"{own}{name}.")
    return modules


def fill(module: nn.Module, part: Checkpoint, prefix: str) -> None:
    """Give every parameter and every buffer that is saved the tensor of its name."""
    parameters = dict(module.named_parameters())
    for name, value in module.state_dict(keep_vars=True).items():
        owner, _, leaf = name.rpartition(".")
        tensor = _experts(part, prefix + owner, leaf, value.shape)
        if tensor is None:
            tensor = part.take(prefix + name, *value.shape)
        if name in parameters:
            setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
        else:
            setattr(module.get_submodule(owner), leaf, tensor.to(value.dtype))


def _experts(part: Checkpoint, owner: str, leaf: str, shape: Sequence[int]) -> Tensor | None:
    """The matrices of all experts ``[experts, n, k]``, as transformers has them, from one tensor for each expert; None for others."""
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
    if names is None or len(shape) != 3 or f"{owner}.{leaf}" in part:
        return None
    count, n, k = shape
    return torch.stack(
        [torch.cat([part.take(f"{owner}.{i}.{name}.weight", n // len(names), k) for name in names]) for i in range(count)]
    )


@torch.inference_mode()
def probe(modules: Sequence[MtpModule], checkpoint: Checkpoint, target: Target) -> None:
    """Run a few pairs, all at once and one after the other: a layer must attend through our function, without a mask of its own.
    Raises LoadError.
    """
    tokens, positions = [0, 1, 2], [0, 1, 2]
    features = torch.linspace(-1, 1, 3 * target.hidden_size, dtype=target.dtype, device=target.device).view(3, -1)

    def run(module: MtpModule) -> tuple[Pass, Tensor]:
        with passing([Segment(KVSlot(), DraftTree.chain(0, [1, 2]), 0)]) as done:
            return done, module(target.embed(tokens), features, torch.tensor(positions))

    for place, module in enumerate(modules):
        try:
            done, at_once = run(module)
            slot, in_turn = KVSlot(), []
            for i in positions:
                in_turn.append(module.run([tokens[i]], features[i : i + 1], [i], [Segment(slot, DraftTree.chain(0), 0)]))
                slot.length += 1
            module.logits(at_once)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            raise LoadError(f"{checkpoint.folder}: a layer of {target.name} cannot be run as a module ({error})") from error
        tolerance = (1e-3 if target.dtype in (torch.float32, torch.float64) else 0.1) * float(at_once.abs().max())
        same = bool((at_once - torch.cat(in_turn)).abs().max() <= tolerance)
        if not (done.causal and not done.masked and list(done.windows) == [place] and same):
            raise LoadError(f"{checkpoint.folder}: a layer of {target.name} does more than a module's layer may; not supported")
        module.straighten(lambda module=module: run(module)[1])  # type: ignore[misc]
