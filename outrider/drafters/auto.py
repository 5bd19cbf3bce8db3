"""Several drafters as one. The calibrator asks the one that pays in each round; by itself it asks them in order until one has a guess.

Every part sees every round through `observe`, so that any of them can be asked at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Sequence

from ..errors import LoadError, ParameterError
from ..models import SHIPPED, shipped
from ..sampling import Sampler
from ..targets.base import Output, Target
from ..tree import Budget, DraftTree
from .base import Ask, Drafter, Options, State, Work
from .checkpoint import Checkpoint, resolve
from .suffix import SuffixDrafter, SuffixOptions


@dataclass(frozen=True)
class AutoOptions(Options):
    """shape: tree, where the parts may draft trees, or chain."""

    shape: str = "tree"

    def __post_init__(self) -> None:
        if self.shape not in ("chain", "tree"):
            raise ParameterError(f"option shape must be chain or tree; got {self.shape!r}")


class AutoState(State):
    """A state of each part."""

    def __init__(self, sampler: Sampler, states: Sequence[State]):
        self.states = list(states)
        super().__init__(sampler)

    @property
    def sampler(self) -> Sampler:
        return self._sampler

    @sampler.setter
    def sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler
        for state in self.states:
            state.sampler = sampler

    def fork(self, sampler: Sampler) -> AutoState:
        return AutoState(sampler, [state.fork(sampler) for state in self.states])

    def truncate(self, length: int) -> None:
        for state in self.states:
            state.truncate(length)

    def close(self) -> None:
        for state in self.states:
            state.close()


class AutoDrafter(Drafter):
    """Drafters that fit a target: `suffix`, what its own checkpoint holds, the head that comes with this package, those that are given."""

    name = "auto"
    Options = AutoOptions
    options: AutoOptions
    takes_model = True
    takes_prediction = True

    def __init__(self, parts: Sequence[Drafter], options: AutoOptions | None = None):
        """parts: the cheapest first."""
        super().__init__(options)
        self.parts = list(parts)
        self.layers = list(dict.fromkeys(key for part in parts for key in part.layers))

    @classmethod
    def load(cls, target: Target, options: Any, source: str | None = None, **loading: Any) -> AutoDrafter:
        """source: more drafters, with commas between: names of the table, paths or hub ids of models and heads."""
        from . import load_drafter

        parts: list[Drafter] = [SuffixDrafter(SuffixOptions(shape=options.shape))]
        given = [name for name in (source or "").split(",") if name]
        parts += [load_drafter(name, target, **loading) for name in (*_inside(target), *_beside(target), *given)]
        return cls(parts, options)

    @classmethod
    def inside(cls, target: Target) -> str | None:
        """Nothing more is needed."""
        return ""

    @property
    def drafts_trees(self) -> bool:
        return any(part.drafts_trees for part in self.parts)

    def open(self, sampler: Sampler) -> AutoState:
        return AutoState(sampler, [part.open(sampler) for part in self.parts])

    def propose(self, work: Work) -> list[DraftTree]:
        trees = [DraftTree.chain(ask.tokens[-1]) for ask in work]
        for i in range(len(self.parts)):
            asked = [n for n, tree in enumerate(trees) if len(tree) == 1]
            if asked:
                for n, tree in zip(asked, ask_part(self, i, [work[n] for n in asked], [work[n].budget for n in asked])):
                    trees[n] = tree
        return trees

    def observe(self, work: Sequence[tuple[State, Sequence[int], Output, Sequence[int]]]) -> None:
        for i, part in enumerate(self.parts):
            part.observe([(_states(state)[i], *rest) for state, *rest in work])  # type: ignore[misc]

    def describe(self) -> dict[str, Any]:
        return {"parts": [{"name": part.name, **part.describe()} for part in self.parts]}

    def close(self) -> None:
        for part in self.parts:
            part.close()


def parts_of(drafter: Drafter) -> list[Drafter]:
    """The drafters that can be asked: its parts, or itself."""
    return drafter.parts if isinstance(drafter, AutoDrafter) else [drafter]


def ask_part(drafter: Drafter, i: int, work: Work, budgets: Sequence[Budget]) -> list[DraftTree]:
    """The drafts of part `i` of `drafter`, which has its name on them, within other budgets than those in `work`."""
    if not isinstance(drafter, AutoDrafter):
        return drafter.propose([ask._replace(budget=budget) for ask, budget in zip(work, budgets)])
    part = drafter.parts[i]
    own = [ask._replace(state=_states(ask.state)[i], budget=_within(part, ask, budget)) for ask, budget in zip(work, budgets)]
    asked = [ask for ask in own if ask.budget.depth > 0]
    trees = iter(part.propose(asked) if asked else [])
    made = [next(trees) if ask.budget.depth > 0 else DraftTree.chain(ask.tokens[-1]) for ask in own]
    return [tree if len(tree) == 1 else tree.named(part.name) for tree in made]


def _within(part: Drafter, ask: Ask, budget: Budget) -> Budget:
    """The budget, as deep as the part has positions for."""
    most = budget.depth if part.context_length is None else part.context_length - len(ask.tokens)
    return budget if budget.depth <= most else replace(budget, depth=most)


def _states(state: State) -> list[State]:
    assert isinstance(state, AutoState)
    return state.states


def _beside(target: Target) -> list[str]:
    """The head for it inside this package, unless another model lies in the target's place."""
    names = [name for name in SHIPPED if name == f"eagle3-{target.name}"]
    return [name for name in names if Checkpoint.read(shipped(name)).config.get("hidden_size") == target.hidden_size]


def _inside(target: Target) -> list[str]:
    """The drafters of the table whose weights the target's own checkpoint holds."""
    if not hasattr(target, "model"):
        return []
    from . import medusa, mtp_head

    try:
        checkpoint = Checkpoint.read(resolve(target.name))
    except LoadError:
        return []
    there = {"mtp": mtp_head.find(checkpoint) is not None, "medusa": medusa.detect(checkpoint) == "medusa-2"}
    return [name for name, is_there in there.items() if is_there]
