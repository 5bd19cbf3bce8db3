"""The draft tree, and what is derived from it: depths, children, paths, the ancestor mask.

Node 0 is the *anchor*: the last emitted token, not yet in the target's KV cache. A chain is the tree in which every
node has at most one child; an anchor-only tree is plain decoding. Parents come before their children, siblings stand
in the order in which they were drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Sequence

import torch
from torch import Tensor

from .errors import DraftError


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Proposed tokens with their parents.

    tokens: token ids, the anchor first.
    parents: index of each node's parent, -1 for the anchor; ``parents[i] < i``.
    q: for each node the law ``[V]`` from which its CHILDREN were drawn, one after the other without replacement, or
        None where they are a point mass (chosen without chance). None instead of the tuple: no node has a law.
    score: the drafter's own guess of how likely each node is given its parent; for traces and planning only.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: tuple[Tensor | None, ...] | None = None
    score: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if n == 0 or len(self.parents) != n or self.parents[0] != -1:
            raise DraftError("a draft tree needs an anchor (parents[0] == -1) and one parent for each token")
        if any(not 0 <= parent < i for i, parent in enumerate(self.parents[1:], 1)):
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
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

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
        sees = torch.eye(n, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            sees[node] |= sees[parent]
        return sees.to(device)

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
        )


@dataclass(frozen=True)
class Budget:
    """What the loop allows a drafter this round.

    nodes: at most this many drafted nodes (the anchor is not counted).
    depth: at most this many tokens on any path below the anchor.
    price: what one more row costs, as a share of a plain step; a node less likely than this is not worth drafting.
    """

    nodes: int
    depth: int
    price: float = 0.0
