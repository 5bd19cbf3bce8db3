"""What the loop asks of a drafter: guess what comes next, as a tree.

A drafter cannot break correctness. It returns its guesses as point masses (``q`` None), or it has drawn them through
the sequence's Sampler and returns the law that `Sampler.draw` gave it, unpruned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Sequence

from ..tree import Budget, DraftTree

if TYPE_CHECKING:
    from ..sampling import Sampler
    from ..targets.base import LayerKey, Output, Slot, Target


class State:
    """What a drafter keeps for one sequence: its own KV, features, an automaton."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def fork(self, sampler: Sampler) -> State:
        """A copy for another continuation of the same tokens. The default starts afresh and catches up by itself."""
        return type(self)(sampler)

    def truncate(self, length: int) -> None:
        """Forget everything after the first `length` tokens (the next turn of a conversation changed them)."""

    def close(self) -> None:
        """Free what this holds. Closing twice is harmless."""


@dataclass(frozen=True)
class Options:
    """A drafter's options; the command line's ``-o name=value`` fills them. Each drafter has its own subclass."""


DrafterOptions = Options  # the name of the class, where a drafter's own `Options` hides it


class Ask(NamedTuple):
    """What the loop asks for one sequence. Read the fields by name: there will be more.

    tokens: all of the sequence; the last is the anchor. budget: what may be drafted. slot: the sequence's place in the target's
    cache, for drafters that are a part of the target.
    """

    state: State
    tokens: Sequence[int]
    budget: Budget
    slot: Slot | None = None


Work = Sequence[Ask]


class Drafter(ABC):
    """Shared by all sequences: weights, options, global statistics."""

    name: ClassVar[str]
    Options: ClassVar[type[DrafterOptions]] = Options
    layers: Sequence[LayerKey] = ()
    """Target hidden states that `observe` needs."""
    context_length: int | None = None
    """Most tokens of a sequence it can draft for; the loop draws no draft beyond it."""
    most_depth: int | None = None
    """Most tokens that it can draft on a path, where that is limited."""
    steps: int = 0
    """Passes that its last drafts took, catching up apart; 0 where they cost as much as their levels say. One that was stopped may have run
    a pass of which nothing was worth keeping."""
    takes_model: ClassVar[bool] = False
    """Whether it has weights of its own: a folder or hub id that `load` gets as `source`."""
    takes_prediction: ClassVar[bool] = False
    """Whether it uses the text that the caller expects (`SamplingParams.prediction`)."""

    def __init__(self, options: DrafterOptions | None = None):
        self.options = options if options is not None else self.Options()

    @property
    def drafts_trees(self) -> bool:
        """Whether its drafts may have siblings; the default accept rule follows from it."""
        return getattr(self.options, "shape", "chain") == "tree"

    @classmethod
    def load(cls, target: Target, options: DrafterOptions, source: str | None = None, **loading: Any) -> Drafter:
        """A drafter for `target`. source: path or hub id of its weights, for drafters that have some."""
        return cls(options)

    @classmethod
    def inside(cls, target: Target) -> str | None:
        """The source of this drafter's weights where the target's own checkpoint holds them."""
        return None

    @abstractmethod
    def open(self, sampler: Sampler) -> State:
        """A new sequence. The prompt reaches it through `propose` (and `observe`)."""

    @abstractmethod
    def propose(self, work: Work) -> list[DraftTree]:
        """One tree for each sequence: within its budget, the anchor (``tokens[-1]``) as node 0, or anchor-only."""

    def observe(self, work: Sequence[tuple[State, Sequence[int], Output, Sequence[int]]]) -> None:
        """Called after every prefill chunk and every round, on every open drafter, whoever proposed.

        For each sequence: its state, all its tokens, the target's Output, and the rows of it that were kept. Kept row
        number j belongs to ``tokens[output.start + j]``. Store what you need; run no model here.
        """

    def describe(self) -> dict[str, Any]:
        """What `outrider check` shows about its weights: what they are, and what is the target's."""
        return {}

    def close(self) -> None:
        """Free the drafter's own weights."""


class NoDrafter(Drafter):
    """Plain decoding: an anchor-only tree in every round."""

    name = "none"

    def open(self, sampler: Sampler) -> State:
        return State(sampler)

    def propose(self, work: Work) -> list[DraftTree]:
        return [DraftTree.chain(ask.tokens[-1]) for ask in work]
