"""Multi-token prediction: drafting with the modules that a model was published with (DeepSeek-V3 report, Gloeckle et al. 2024).

One module is applied again and again: it takes what it gave back for the hidden state of the token that it drafted. Several modules are
chained: module k drafts the token at distance k + 2 from what module k - 1 made of the same position, and has a cache of its own. How a
module follows the text is said in `features`; what it computes in `mtp_head`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from ..sampling import Sampler
from ..targets.base import Target
from ..tree import DraftTree
from .base import Ask, Work
from .checkpoint import Checkpoint, resolve
from .features import PAIRS, FeatureDrafter, FeatureState, run_pairs
from .growth import Growth, TreeOptions
from .heads import settle
from .mtp_head import MtpModule, load_modules, model_of, probe


class MtpDrafter(FeatureDrafter):
    """Chains and trees from one module."""

    name = "mtp"
    Options = TreeOptions
    takes_model = True
    head: MtpModule

    def __init__(
        self, head: MtpModule, options: TreeOptions | None = None, cost: float = 0.0, facts: dict[str, Any] | None = None
    ):
        """facts: what `describe` says."""
        super().__init__(head, options or TreeOptions(), cost)
        self.facts = facts or {}

    @classmethod
    def inside(cls, target: Target) -> str | None:
        """The target's own folder."""
        model_of(target)
        return target.name

    @classmethod
    def load(cls, target: Target, options: Any, source: str | None = None, **loading: Any) -> MtpDrafter:
        assert source is not None
        model_of(target)
        checkpoint = Checkpoint.read(resolve(source))
        layout, modules = load_modules(checkpoint, target)
        weights = {id(p): p.numel() for module in modules for p in module.parameters()}
        settle(nn.ModuleList(modules), target)  # all at once: they may share parts
        probe(modules, checkpoint, target)
        cost = (sum(weights.values()) / len(modules) + target.vocab_size * target.hidden_size) / (target.n_parameters or 1)
        facts = {
            "dialect": f"multi-token prediction ({layout.family})",
            "modules": len(modules),
            "decoder": f"{len(modules)} x {type(modules[0].body.layers[0]).__name__}",
            "states": f"the target's last, {'after' if layout.post_norm else 'before'} its final norm",
            "embeddings": "the target's",
            "output matrix": "the target's",
        }
        cost = cost if target.n_parameters else 0.0
        if len(modules) == 1:
            return MtpDrafter(modules[0], options, cost, facts)
        return ChainedDrafter(modules, options, cost, facts)

    def describe(self) -> dict[str, Any]:
        return self.facts


class ChainedDrafter(MtpDrafter):
    """Chains and trees from several modules, one for each distance.

    Row j of module k belongs to position j and holds the token at j + 1 + k, so its last k rows depend on drafted tokens: module k runs
    the whole tree above its level, each node k - depth positions before the last. The KV keeps the rows whose tokens are known in
    every module; the others, at most as many as there are modules, are run again in the next round.
    """

    def __init__(
        self,
        modules: Sequence[MtpModule],
        options: TreeOptions | None = None,
        cost: float = 0.0,
        facts: dict[str, Any] | None = None,
    ):
        super().__init__(modules[0], options, cost, facts)
        self.modules = modules

    def open(self, sampler: Sampler) -> FeatureState:
        return FeatureState(sampler, reach=len(self.modules))

    @torch.inference_mode()
    def propose(self, work: Work) -> list[DraftTree]:
        drafts = [_Chained(ask, self) for ask in work]
        self._catch_up([draft for draft in drafts if draft.growth.frontier])
        self.steps = 0
        for level, module in enumerate(self.modules):
            active = [draft for draft in drafts if draft.growth.frontier]
            if not active:
                break
            found = _run_in_place(module, [(draft.state, *draft.next_pass(level)) for draft in active])
            for draft, states in zip(active, found):
                draft.states = states
            rows = module.logits(torch.cat([draft.states[draft.last_rows()] for draft in active]))
            for draft, logits in zip(active, rows.split([len(draft.growth.frontier) for draft in active])):
                draft.growth.extend(logits)
            self.steps = level + 1
        return [draft.growth.tree() for draft in drafts]

    def _catch_up(self, behind: Sequence[_Chained]) -> None:
        """Run through all modules the rows whose tokens are known in every module."""
        for one in behind:
            one.state.fuse(self.head)
        while behind := [one for one in behind if one.state.kv.length < one.known]:
            most = max(1, PAIRS // len(behind))
            counts = [min(most, one.known - one.state.kv.length) for one in behind]
            features = [one.features(count) for one, count in zip(behind, counts)]
            for level, module in enumerate(self.modules):
                parts = [(one.state, *one.chain(level, n), x) for one, n, x in zip(behind, counts, features)]
                features = _run_in_place(module, parts)
            for one, count in zip(behind, counts):
                one.state.kv.length += count


class _Chained:
    """One sequence's draft while it grows, and the states of the pass before."""

    def __init__(self, ask: Ask, drafter: ChainedDrafter):
        assert isinstance(ask.state, FeatureState)
        self.state, self.tokens = ask.state, ask.tokens
        position = len(ask.tokens) - 1
        if self.state.end > position:
            self.state.truncate(position)
        pairs = max(position - self.state.first, 0) if self.state.end == position else 0
        count = min(len(drafter.modules), pairs)
        self.known = pairs - count
        self.state.kv.length = min(self.state.kv.length, self.known)
        self.count = count  # pairs behind the known ones
        budget = replace(ask.budget, depth=min(ask.budget.depth, count))
        self.growth = Growth(ask.state.sampler, ask.tokens[-1], budget, drafter.options, drafter.least)
        self.states: Tensor  # [n, H] of the last pass
        self.row: dict[int, int] = {}  # in it, of each node

    def features(self, count: int) -> Tensor:
        have = self.state.kv.length
        return self.state.features[have : have + count]

    def chain(self, level: int, count: int) -> tuple[DraftTree, int, int]:
        """The next `count` pairs of a module, all of known tokens."""
        first = self.state.first + self.state.kv.length
        tokens = self.tokens[first + 1 + level : first + 1 + level + count]
        return DraftTree.chain(tokens[0], tokens[1:]), 0, first

    def next_pass(self, level: int) -> tuple[DraftTree, int, int, Tensor]:
        """The pairs behind the known ones of a module: those of the text, then the nodes that lead to the frontier."""
        growth, before = self.growth, self.row
        known = self.count - level
        chain, _, first = self.chain(level, known)
        if level == 0:
            self.row = {0: known - 1}
            return chain, 0, first, self.features(known)
        needed = {0}
        for node in growth.frontier:
            while node not in needed:
                needed.add(node)
                node = growth.parents[node]
        nodes = sorted(needed)
        self.row = {node: known - 1 + i for i, node in enumerate(nodes)}
        tokens = [*chain.tokens, *(growth.tokens[node] for node in nodes[1:])]
        parents = [*chain.parents, *(self.row[growth.parents[node]] for node in nodes[1:])]
        above = [*range(known), *(before[growth.parents[node]] for node in nodes[1:])]
        return DraftTree(tuple(tokens), tuple(parents)), 0, first, self.states[above]

    def last_rows(self) -> list[int]:
        return [self.row[node] for node in self.growth.frontier]


def _run_in_place(module: MtpModule, parts: Any) -> list[Tensor]:
    """One pass of one module, of which the cache does not yet count the rows."""
    states = run_pairs(module, parts)
    for state, tree, *_ in parts:
        state.kv.length -= len(tree)
    return states
