"""What Medusa's and Hydra's heads share: each guesses the token at one distance from the target's last hidden state.

Head i (from 0) says what stands i + 2 positions after the one whose hidden state it gets; the token between them is known, it is the
anchor. So there are as many drafted tokens on a path as heads. A *grounded* head also gets the embeddings of the anchor and of
the drafted tokens before its own, and is run for each node of the tree; the others are run once for all nodes of a level.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from .. import kernels
from ..errors import LoadError
from ..kernels.choose import choose
from ..kernels.fused import fuse
from ..sampling import Sampler
from ..targets.base import Output, Target
from ..tree import DraftTree
from .base import Ask, Drafter, State, Work
from .checkpoint import Checkpoint, resolve
from .growth import Growth, TreeOptions

MOST_PADDING = 1024
"""Rows that an output matrix may have beyond the tokenizer's ids (or 5 % of them, if that is more)."""


class Block(nn.Module):
    """``residual(x) + SiLU(linear(x))``; without a residual layer x itself is added."""

    def __init__(self, linear: nn.Module, residual: nn.Module | None = None):
        super().__init__()
        self.linear, self.residual = linear, residual

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.residual is None else self.residual(x)) + nn.functional.silu(self.linear(x))


class Heads(nn.Module):
    """One stack of blocks and one output layer for each distance.

    grounded: head i takes ``[n, (i + 2) H]``, the state and the embeddings of the anchor and i drafted tokens; else ``[n, H]``.
    token_map: ``[Vd]``, rising: the target's id of each output of a reduced vocabulary; None for all of it.
    """

    token_map: Tensor | None

    def __init__(self, stacks: Sequence[Sequence[Block]], outputs: Sequence[nn.Module], grounded: bool = False):
        super().__init__()
        self.stacks = nn.ModuleList(nn.Sequential(*stack) for stack in stacks)
        self.outputs = nn.ModuleList(outputs)
        self.grounded = grounded
        self.register_buffer("token_map", None, persistent=False)

    def __len__(self) -> int:
        return len(self.stacks)

    def forward(self, level: int, inputs: Tensor) -> Tensor:
        """Logits of head `level`, ``[n, V]`` over the target's vocabulary, or ``[n, Vd]`` over the reduced one."""
        return self.outputs[level](self.stacks[level](inputs))


class LastState(State):
    """The target's last hidden state ``[H]``, and the position that it belongs to."""

    def __init__(self, sampler: Sampler):
        super().__init__(sampler)
        self.hidden: Tensor | None = None
        self.position = -1

    def fork(self, sampler: Sampler) -> LastState:
        other = type(self)(sampler)
        other.hidden, other.position = self.hidden, self.position
        return other

    def truncate(self, length: int) -> None:
        if self.position >= length:
            self.close()

    def close(self) -> None:
        self.hidden, self.position = None, -1


class HeadsDrafter(Drafter):
    """Chains and trees from `Heads`."""

    Options = TreeOptions
    options: TreeOptions
    layers = ("final",)
    takes_model = True

    def __init__(self, heads: Heads, target: Target, options: TreeOptions | None = None, facts: dict[str, Any] | None = None):
        """heads: with their weights as they were stored. facts: what `describe` says."""
        super().__init__(options)
        self.heads = heads
        self.most_depth = len(heads)
        self.facts = facts or {}
        self._embed = target.embed
        parameters = sum(p.numel() for p in heads.parameters()) / max(len(heads), 1)
        self.least = min(parameters / target.n_parameters, 0.5) if target.n_parameters else 0.0
        settle(heads, target)

    @classmethod
    def load(cls, target: Target, options: Any, source: str | None = None, **loading: Any) -> HeadsDrafter:
        assert source is not None
        return cls.build(Checkpoint.read(resolve(source)), target, options)

    @classmethod
    @abstractmethod
    def build(cls, checkpoint: Checkpoint, target: Target, options: Any) -> HeadsDrafter:
        """From a checkpoint. Raises LoadError for what is no checkpoint of this kind, is not known, or does not fit `target`."""

    def open(self, sampler: Sampler) -> State:
        return LastState(sampler)

    @torch.inference_mode()
    def observe(self, work: Sequence[tuple[Any, Sequence[int], Output, Sequence[int]]]) -> None:
        for state, _, output, rows in work:
            if len(rows):
                state.hidden = output.hidden["final"][rows[-1]].clone()
                state.position = output.start + len(rows) - 1

    def bases(self, work: Work) -> list[Tensor | None]:
        """For each sequence what its heads get in place of the hidden state ``[H]``; None where it was never seen."""
        states: list[Any] = [ask.state for ask in work]
        return [s.hidden if s.position == len(ask.tokens) - 2 else None for s, ask in zip(states, work)]

    @torch.inference_mode()
    def propose(self, work: Work) -> list[DraftTree]:
        growths = [self._growth(ask) for ask in work]
        drafts = []
        for growth, base in zip(growths, self.bases(work)):
            if base is None:
                growth.frontier = []
            else:
                drafts.append(_Draft(growth, base))
        self._ground(drafts)
        for level in range(len(self.heads)):
            drafts = [draft for draft in drafts if draft.growth.frontier]
            if not drafts:
                break
            logits = self.heads(level, torch.cat([draft.inputs for draft in drafts]))
            for draft, rows in zip(drafts, logits.split([len(draft.inputs) for draft in drafts])):
                draft.extend(rows, self.heads.token_map)
            self._ground(drafts)
        return [growth.tree() for growth in growths]

    def _growth(self, ask: Ask) -> Growth:
        budget = replace(ask.budget, depth=min(ask.budget.depth, len(self.heads)))
        return Growth(ask.state.sampler, ask.tokens[-1], budget, self.options, self.least)

    def _ground(self, drafts: Sequence[_Draft]) -> None:
        """Add the embeddings of the frontiers' tokens to their inputs."""
        if not self.heads.grounded:
            return
        drafts = [draft for draft in drafts if draft.growth.frontier]
        tokens = [draft.growth.tokens[node] for draft in drafts for node in draft.growth.frontier]
        if tokens:
            embeddings = self._embed(tokens).split([len(draft.growth.frontier) for draft in drafts])
            for draft, rows in zip(drafts, embeddings):
                draft.add(rows)

    def describe(self) -> dict[str, Any]:
        return self.facts


class _Draft:
    """One sequence's draft while it grows, and its heads' inputs: one row for all nodes of the frontier, or one for each."""

    def __init__(self, growth: Growth, base: Tensor):
        self.growth = growth
        self.inputs = base[None]  # [1, W] or [len(frontier), W]
        self._rows = [0]  # for each node of the frontier its parent's row

    def extend(self, logits: Tensor, ids: Tensor | None) -> None:
        above = self.growth.frontier
        self.growth.extend(logits.expand(len(above), -1), ids)
        row = {node: i for i, node in enumerate(above)}
        self._rows = [row[self.growth.parents[node]] for node in self.growth.frontier]

    def add(self, embeddings: Tensor) -> None:
        """Go on from the parents' inputs with the embeddings ``[len(frontier), H]`` of the nodes' own tokens."""
        self.inputs = torch.cat([self.inputs[self._rows], embeddings.to(self.inputs.dtype)], dim=-1)


# ---- loading ----------------------------------------------------------------------------------------------------------


def linear(checkpoint: Checkpoint, name: str, outputs: int | None, inputs: int, bias: bool) -> nn.Linear:
    """The layer `name` of a checkpoint, its weights in their own type. bias: whether it has one."""
    weight = checkpoint.take(f"{name}.weight", outputs, inputs)
    layer = nn.Linear(inputs, len(weight), bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias:
        layer.bias = nn.Parameter(checkpoint.take(f"{name}.bias", len(weight)), requires_grad=False)
    return layer


def check_vocabulary(checkpoint: Checkpoint, name: str, size: int, target: Target) -> None:
    """Raise LoadError unless a matrix of so many rows can be one of the target's vocabulary, padding included."""
    most = target.vocab_size + max(MOST_PADDING, target.vocab_size // 20)
    if not target.vocab_size <= size <= most:
        raise LoadError(
            f"{checkpoint.folder}: tensor {checkpoint.prefix}{name} is for a vocabulary of {size} tokens, but {target.name} has "
            f"{target.vocab_size}: it was made for another target"
        )


def reduce(heads: Heads, checkpoint: Checkpoint, ids: Tensor, target: Target) -> None:
    """Let the outputs stand for these ids of the target's vocabulary. Raises LoadError where they cannot."""
    for output in heads.outputs:
        if len(ids) != output.out_features:
            raise LoadError(
                f"{checkpoint.folder}: token_map has {len(ids)} ids, but an output matrix {output.out_features} rows"
            )
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(ids.unique()) != len(ids):
        raise LoadError(
            f"{checkpoint.folder}: token_map does not hold different ids below {target.vocab_size}, the vocabulary of {target.name}"
        )
    heads.token_map = in_order(list(dict.fromkeys(heads.outputs)), ids.long(), target.vocab_size)


def in_order(outputs: Sequence[Any], ids: Tensor, limit: int) -> Tensor:
    """Put the rows of output layers that stand for these ids ``[Vd]`` in the ids' rising order, without those from `limit` on.
    Returns their ids.
    """
    rows = ids.argsort()
    rows = rows[ids[rows] < limit]
    if not torch.equal(rows, torch.arange(len(ids))):
        for layer in outputs:
            for name, parameter in layer.named_parameters():
                setattr(layer, name, nn.Parameter(parameter.data[rows], requires_grad=False))
            layer.out_features = len(rows)
    return ids[rows]


def settle(module: nn.Module, target: Target, widened: str = " ") -> None:
    """Bring a module's weights to where and how the target computes; on a CPU in the products that are the fastest there.

    widened: what the names of parameters begin with that are widened as they are read, and stay as they are where weights are packed.
    """
    packs = bool(getattr(target, "choices", ()))
    if packs:
        kernels.pack_linears(module, target.dtype, choose(module, target.dtype))
    for name, parameter in module.named_parameters():
        if not (packs and name.startswith(widened)):
            parameter.data = parameter.data.to(target.device, target.dtype)
    if packs and target.dtype == torch.float32 and kernels.VARIANT != "off":
        fuse(module)
    module.to(target.device)  # the buffers, in their own types: rotary frequencies need all their digits
    module.eval()
