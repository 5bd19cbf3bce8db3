"""An independent small model as the drafter (Leviathan et al. 2023, Chen et al. 2023).

It runs behind a Target of its own, on any backend, and drafts level by level through the sequence's Sampler, so that q is the law
each token was really drawn from. Its cache follows the tokens by itself: what differs from them is cropped, what is missing is
fed. A cache holds one path, so a tree's branches are run again with each level, from their last common node down.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Protocol, Sequence

from torch import Tensor

from ..errors import OutriderWarning
from ..sampling import Sampler
from ..targets.base import Output, Slot, Target
from ..tree import DraftTree
from .base import Ask, Drafter, State, Work
from .growth import Growth, TreeOptions
from .vocabulary import in_words_of

PREFILL_FROM = 16


@dataclass(frozen=True)
class ModelOptions(TreeOptions):
    """min_probability: by default what a draft step costs, as the drafter's share of the target's parameters, at most a half.
    device, dtype: where and how the drafter runs; by default like the target. The others say how drafts grow: `TreeOptions`.
    """

    device: str | None = None
    dtype: str | None = None


class ModelState(State):
    """A slot of the draft model, and the tokens whose KV it holds."""

    def __init__(self, sampler: Sampler, model: Target, like: Slot | None = None):
        super().__init__(sampler)
        self.model = model
        self.slot: Slot = model.open(like, like.length if like else 0)
        self.fed: list[int] = []
        self.agreed = 0  # tokens known to be fed as they are
        self.foreign = False  # the sequence holds a token that the drafter does not have

    def fork(self, sampler: Sampler) -> ModelState:
        other = ModelState(sampler, self.model, self.slot)
        other.fed, other.agreed, other.foreign = list(self.fed), self.agreed, self.foreign
        return other

    def truncate(self, length: int) -> None:
        self.agreed = min(self.agreed, length)
        self.foreign = False

    def close(self) -> None:
        self.model.close(self.slot)

    def catch_up(self, tokens: Sequence[int]) -> list[int]:
        """Crop the cache to what `tokens` begins with; returns the tokens still to feed, the anchor last."""
        common = min(self.agreed, len(tokens) - 1, len(self.fed))
        while common < min(len(self.fed), len(tokens) - 1) and self.fed[common] == tokens[common]:
            common += 1
        if common < self.slot.length:
            self.model.truncate(self.slot, common)
        del self.fed[common:]
        self.agreed = common
        missing = list(tokens[common:])
        self.foreign |= any(token >= self.model.vocab_size for token in missing)
        if not self.foreign and len(missing) > PREFILL_FROM:
            for _ in self.model.prefill(self.slot, missing[:-1]):
                pass
            self.fed += missing[:-1]
            missing = missing[-1:]
        return missing


class ModelDrafter(Drafter):
    """Chains and trees from a smaller causal language model, with the target's vocabulary or another."""

    name = "model"
    Options = ModelOptions
    takes_model = True
    options: ModelOptions

    def __init__(self, model: Target, options: ModelOptions | None = None, cost: float = 0.0):
        """cost: of one draft step, as a share of a step of the target; no token less likely than this is drafted by default."""
        super().__init__(options)
        self.model = model
        self.context_length = model.context_length
        self.least = min(cost, 0.5)

    @classmethod
    def load(cls, target: Target, options: Any, source: str | None = None, **loading: Any) -> ModelDrafter:
        from ..models import load_target, shared_loading

        assert source is not None
        loading = shared_loading(source, loading)
        loading |= {name: value for name in ("device", "dtype") if (value := getattr(options, name)) is not None}
        model = load_target(source, **loading)
        model = in_words_of(target, model)
        if target.n_parameters and model.n_parameters >= target.n_parameters:
            ratio = model.n_parameters / target.n_parameters
            warnings.warn(
                f"the drafter {model.name} has {ratio:.2g} times the parameters of the target {target.name}: each drafted token "
                "costs about as many passes, so speculation cannot pay",
                OutriderWarning,
                stacklevel=2,
            )
        return cls(model, options, model.n_parameters / target.n_parameters if target.n_parameters else 0.0)

    def open(self, sampler: Sampler) -> ModelState:
        return ModelState(sampler, self.model)

    def propose(self, work: Work) -> list[DraftTree]:
        drafts = [self._draft(ask) for ask in work]
        self.steps = grow(self.model, drafts)
        return [draft.growth.tree() for draft in drafts]

    def _draft(self, ask: Ask) -> Draft:
        assert isinstance(ask.state, ModelState)
        growth = Growth(ask.state.sampler, ask.tokens[-1], ask.budget, self.options, self.least)
        missing = ask.state.catch_up(ask.tokens)[:-1]
        if ask.state.foreign:
            growth.frontier = []
        return Draft(growth, ask.state.slot, missing, ask.state.fed)


class Runner(Protocol):
    """What runs a draft's rows: a `Target`, or a part of one."""

    def forward(self, work: Sequence[tuple[Slot, DraftTree]]) -> list[Output]: ...

    def commit(self, slot: Slot, path: Sequence[int]) -> None: ...


def grow(model: Runner, drafts: Sequence[Draft]) -> int:
    """Let the drafts grow, a level with each pass, until they are complete; the number of passes."""
    passes = 0
    while active := [draft for draft in drafts if draft.growth.frontier]:
        outputs = model.forward([(draft.slot, draft.rows()) for draft in active])
        for draft, output in zip(active, outputs):
            assert output.logits is not None
            draft.advance(model, output.logits)
        passes += 1
    return passes


class Draft:
    """One sequence's draft, and what of it the next pass runs: the nodes from `root`, their last common one, to the frontier."""

    def __init__(self, growth: Growth, slot: Slot, missing: list[int], fed: list[int]):
        """slot: where the rows run. missing: tokens to feed before the anchor. fed: gets the tokens whose KV the slot keeps."""
        self.growth = growth
        self.slot = slot
        self.missing = missing
        self.fed = fed
        self.root = 0
        self.row: dict[int, int] = {}

    def rows(self) -> DraftTree:
        """The next pass: the missing tokens, and the nodes from the root to the frontier."""
        needed = {self.root}
        for node in self.growth.frontier:
            while node not in needed:
                needed.add(node)
                node = self.growth.parents[node]
        nodes, before = sorted(needed), len(self.missing)
        self.row = {node: before + i for i, node in enumerate(nodes)}
        below = [self.row[self.growth.parents[node]] for node in nodes[1:]]
        return DraftTree((*self.missing, *(self.growth.tokens[n] for n in nodes)), (*range(-1, before), *below))

    def advance(self, model: Runner, logits: Tensor) -> None:
        """Grow by a level from the logits ``[n, V]`` of the last pass, and keep the KV of what every later node goes through."""
        growth, passed = self.growth, self.row
        at = [passed[node] for node in growth.frontier]
        growth.extend(logits[at[0] : at[0] + 1] if len(at) == 1 else logits[at])
        path = self._to_common() if growth.frontier else self._likeliest()
        model.commit(self.slot, [*range(len(self.missing)), *(passed[node] for node in path)])
        self.fed += [*self.missing, *(growth.tokens[node] for node in path)]
        self.missing = []

    def _to_common(self) -> list[int]:
        """Move the root to the last node that the whole frontier has in common; the nodes on the way, without the new root."""
        parents, nodes = self.growth.parents, set(self.growth.frontier)
        while len(nodes) > 1:
            deepest = max(nodes)
            nodes.remove(deepest)
            nodes.add(parents[deepest])
        old, self.root = self.root, nodes.pop()
        path, node = [], self.root
        while node != old:
            node = parents[node]
            path.append(node)
        return path[::-1]

    def _likeliest(self) -> list[int]:
        """The likeliest path of the last pass: its KV may be of use in the next round."""
        path = [self.root]
        for node in sorted(self.row, key=lambda node: (-self.growth.likely[node], node)):
            if self.growth.parents[node] == path[-1] and node != self.root:
                path.append(node)
        return path
