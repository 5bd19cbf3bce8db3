"""The draft tree, and what is derived from it: depths, children, paths, the ancestor mask.

Node 0 is the *anchor*: the last emitted token, not yet in the target's KV cache. A chain is the tree in which every
node has at most one child; an anchor-only tree is plain decoding. Parents come before their children, siblings stand
in the order in which they were drawn.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Callable, Collection, Iterable, Iterator, Protocol, Sequence, TypeVar

import numpy as np
import torch
from torch import Tensor

from .errors import DraftError, ParameterError


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Proposed tokens with their parents.

    tokens: token ids, the anchor first.
    parents: index of each node's parent, -1 for the anchor; ``parents[i] < i``.
    q: for each node the law ``[V]`` from which its CHILDREN were drawn, one after the other without replacement, or
        None where they are a point mass (chosen without chance). None instead of the tuple: no node has a law.
    score: the drafter's own guess of how likely each node is given its parent; for traces and planning only.
    drafter: who proposed it, where there are several.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: tuple[Tensor | None, ...] | None = None
    score: tuple[float, ...] | None = None
    drafter: str | None = None

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if n == 0 or len(self.parents) != n or self.parents[0] != -1:
            raise DraftError("a draft tree needs an anchor (parents[0] == -1) and one parent for each token")
        if not self.is_chain and any(not 0 <= parent < i for i, parent in enumerate(self.parents[1:], 1)):
            raise DraftError("in a draft tree every parent must come before its children")
        if self.q is not None and len(self.q) != n:
            raise DraftError("a draft tree needs one q (or None) for each node")
        if self.score is not None and len(self.score) != n:
            raise DraftError("a draft tree needs one score for each node")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(
        cls,
        anchor: int,
        drafts: Sequence[int] = (),
        q: Sequence[Tensor | None] | None = None,
        score: Sequence[float] | None = None,
    ) -> DraftTree:
        """A chain of `drafts` below `anchor`; ``q[i]`` and ``score[i]`` belong to ``drafts[i]``, as they are drawn."""
        return cls(
            tokens=(anchor, *drafts),
            parents=tuple(range(-1, len(drafts))),
            q=None if q is None else (*q, None),
            score=None if score is None else (1.0, *score),
        )

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the anchor, in tokens."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, in drawing order."""
        below: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], 1):
            below[parent].append(node)
        return tuple(map(tuple, below))

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def depth(self) -> int:
        """Length of the longest path below the anchor, in tokens."""
        return max(self.depths)

    def law(self, node: int) -> Tensor | None:
        """The law ``[V]`` of `node`'s children, or None for a point mass."""
        return None if self.q is None else self.q[node]

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the anchor to `node`, both included."""
        path = [node]
        while path[-1]:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """The drafted tokens from the anchor (excluded) to `node` (included)."""
        return tuple(self.tokens[i] for i in self.path(node)[1:])

    def ancestors(self, device: torch.device | str = "cpu") -> Tensor:
        """Which nodes each node sees: a bool matrix ``[n, n]``, true where the column is the row itself or above it."""
        n = len(self)
        if self.is_chain:
            return torch.ones(n, n, dtype=torch.bool, device=device).tril()
        sees = np.eye(n, dtype=bool)
        for node, parent in enumerate(self.parents[1:], 1):
            sees[node] |= sees[parent]
        return torch.from_numpy(sees).to(device)

    def named(self, drafter: str) -> DraftTree:
        """The same tree, proposed by `drafter`."""
        tree = object.__new__(DraftTree)
        tree.__dict__.update(self.__dict__, drafter=drafter)
        return tree

    def first(self, drafted: int) -> DraftTree:
        """The tree without what comes after the first `drafted` nodes below the anchor.

        Raises DraftError for a node that was drawn under a q, as `prune` does.
        """
        kept = drafted + 1
        if kept >= len(self):
            return self
        if self.q is not None and any(self.q[parent] is not None for parent in self.parents[kept:]):
            raise DraftError("a drafted token that was drawn under a q cannot be pruned; budget before drawing")
        return DraftTree(
            self.tokens[:kept], self.parents[:kept], self.q and self.q[:kept], self.score and self.score[:kept], self.drafter
        )

    def prune(self, keep: Sequence[bool]) -> DraftTree:
        """The tree without the nodes marked False and whatever hangs below them.

        Raises DraftError for a node that was drawn under a q: leaving it out would bias the output.
        """
        kept: list[int] = []
        new_index: dict[int, int] = {-1: -1}
        for node, parent in enumerate(self.parents):
            if node == 0 or (keep[node] and parent in new_index):
                new_index[node] = len(kept)
                kept.append(node)
            elif self.law(parent) is not None:
                raise DraftError("a drafted token that was drawn under a q cannot be pruned; budget before drawing")
        if len(kept) == len(self):
            return self
        return DraftTree(
            tokens=tuple(self.tokens[i] for i in kept),
            parents=tuple(new_index[self.parents[i]] for i in kept),
            q=None if self.q is None else tuple(self.q[i] for i in kept),
            score=None if self.score is None else tuple(self.score[i] for i in kept),
            drafter=self.drafter,
        )


@dataclass(frozen=True)
class Budget:
    """What the loop allows a drafter this round.

    nodes: at most this many drafted nodes (the anchor is not counted).
    depth: at most this many tokens on any path below the anchor.
    price: what one more row costs, in tokens; a node less likely than this is not worth drafting. With a price the drafter's own
        default for that is not asked; with 0 it is.
    step: what another step of the drafter costs, in tokens that it must be expected to bring; a drafter that pays for each level
        stops where what it has drafted is less likely than this.
    """

    nodes: int
    depth: int
    price: float = 0.0
    step: float = 0.0

    def least(self, asked: float | None, default: float) -> float:
        """How likely a node must be to be drafted. asked: what the user wants; default: of the drafter, for who names no price."""
        if asked is None:
            asked = 0.0 if self.price else default
        return max(asked, self.price)


# ---- best first ----------------------------------------------------------------------------------------------------


class Guess(Protocol):
    """A continuation and its chance, given all before it."""

    @property
    def token(self) -> int: ...

    @property
    def chance(self) -> float: ...


G = TypeVar("G", bound=Guess)


def best_first(root: G, follow: Callable[[G], Iterable[G]], nodes: int, depth: int, least: float) -> DraftTree:
    """The likeliest nodes of all that `follow` leads to: at most `nodes`, none less likely than `least` with all on its way.

    root: the anchor. follow: what may come after a guess; for drafters that know it at once. Point masses, in the order of their
    probability.
    """
    tokens, parents, depths, chances = [root.token], [-1], [0], [1.0]
    waiting: list[tuple[float, int, int, G]] = []  # minus the path's probability, serial number, parent, guess
    serial = node = 0
    path, guess = 1.0, root
    while len(tokens) <= nodes:
        for child in follow(guess) if depths[node] < depth else ():
            if path * child.chance >= least:
                heapq.heappush(waiting, (-path * child.chance, serial := serial + 1, node, child))
        if not waiting:
            break
        negative, _, parent, guess = heapq.heappop(waiting)
        path, node = -negative, len(tokens)
        tokens.append(guess.token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        chances.append(guess.chance)
    return DraftTree(tuple(tokens), tuple(parents), score=tuple(chances))


# ---- static shapes -------------------------------------------------------------------------------------------------

RankPath = tuple[int, ...]
"""A node of a static tree by the ranks of its ancestors and its own: (0, 2) is the third child of the first child."""


def check_shape(paths: Collection[RankPath]) -> None:
    """Raise ParameterError unless every node of a static shape has its parent, and nothing stands twice."""
    known = {(), *paths}
    for path in paths:
        if not path or any(not isinstance(rank, int) or rank < 0 for rank in path):
            raise ParameterError(f"a path of a static tree holds ranks from 0 on; got {path!r}")
        if path[:-1] not in known:
            raise ParameterError(f"the static tree has {path!r}, but not its parent {path[:-1]!r}")
    if len(known) != len(paths) + 1:
        raise ParameterError("the static tree has a path twice")


def fit_shape(paths: Iterable[RankPath], nodes: int, depth: int) -> tuple[RankPath, ...]:
    """What of a static shape is kept under a budget: where there are too many, the nodes with the lowest ranks on their path.

    A kept node keeps its ancestors, and its siblings of lower rank.
    """
    kept = sorted((path for path in paths if len(path) <= depth), key=lambda path: (sum(path) + len(path), path))
    return tuple(sorted(kept[:nodes], key=lambda path: (len(path), path)))


def expected_tokens(paths: Iterable[RankPath], acceptance: Sequence[float]) -> float:
    """Tokens that a pass over a static shape emits on average, the bonus token included.

    acceptance: the probability that the child of rank r is the kept one, given that its parent is kept; 0 beyond its end.
    """
    total = 1.0
    for path in paths:
        kept = 1.0
        for rank in path:
            kept *= acceptance[rank] if rank < len(acceptance) else 0.0
        total += kept
    return total


def optimal_shape(acceptance: tuple[float, ...], nodes: int, depth: int, price: float = 0.0) -> tuple[RankPath, ...]:
    """The static shape of at most `nodes` nodes and `depth` levels that emits the most tokens (Chen et al. 2024, Sequoia).

    acceptance: as `expected_tokens` has it. price: tokens that each node costs; with one, fewer nodes may be the best.
    """
    depth = min(depth, nodes)
    best, taken = _sequoia(acceptance, _power(nodes), _power(depth))

    def shape(level: int, m: int, above: RankPath) -> Iterator[RankPath]:
        for rank in range(len(acceptance)):
            if not (size := int(taken[level, rank, m])):
                return
            yield (*above, rank)
            yield from shape(level - 1, size - 1, (*above, rank))
            m -= size

    size = int((best[depth, 1 : nodes + 2] - price * np.arange(nodes + 1)).argmax())
    return tuple(sorted(shape(depth, size, ()), key=lambda path: (len(path), path)))


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=64)
def _sequoia(acceptance: tuple[float, ...], nodes: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """The paper's dynamic programme, for every smaller tree too.

    best[l, m]: kept nodes of a subtree of at most l levels below its root and m nodes, root included. taken[l, b, m]: of m nodes
    for a root's children of rank b and above, how many go to the one of rank b and what is below it; 0: there is no such child.
    """
    best = np.zeros((depth + 1, nodes + 2))
    best[0, 1:] = 1.0
    taken = np.zeros((depth + 1, len(acceptance), nodes + 1), dtype=np.int64)
    left = np.arange(nodes + 1)[:, None] - np.arange(1, nodes + 1)  # [m, y]: what y nodes for one child leave of m
    for level in range(1, depth + 1):
        rest = np.zeros(nodes + 1)  # kept nodes of the children of the ranks from here on
        for rank in reversed(range(len(acceptance))):
            values = np.where(left >= 0, acceptance[rank] * best[level - 1, 1 : nodes + 1] + rest[left], 0.0)
            rest = values.max(axis=1)
            taken[level, rank] = np.where(rest > 0, values.argmax(axis=1) + 1, 0)
        best[level, 1:] = 1.0 + rest
    return best, taken
