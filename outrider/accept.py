"""The accept rules: which drafted tokens are kept, and which token follows them.

This is the only file that decides whether Outrider is lossless. A rule gets the draft tree, p (the target's law
``[n, V]`` after each node, every processor applied) and a source of draws; q comes with the tree. It returns a Decision.
Whatever was drafted, the emitted tokens (the kept path, then `next`) follow the target's law exactly.

Everything random goes through ``draws.bernoulli``, ``draws.categorical`` and ``draws.coupled``, so that the test suite can
branch on each outcome and compute a rule's law exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Protocol, Sequence

import torch
from torch import Tensor

from .errors import ParameterError
from .tree import DraftTree


class Source(Protocol):
    """Where a rule's random decisions come from; `sampling.Draws` in the engine."""

    def bernoulli(self, p: float) -> bool: ...

    def categorical(self, w: Tensor) -> int: ...

    def coupled(self, w: Tensor, depth: int) -> int: ...


@dataclass(frozen=True)
class Test:
    """One decision about one drafted node. draw: the number in [0, 1) that decided, where chance did: kept if below `probability`."""

    __test__ = False  # not a test class for pytest

    node: int
    probability: float
    kept: bool
    draw: float | None = None


@dataclass(frozen=True)
class Decision:
    """What a rule decided: the kept nodes from the anchor down, the token after them, and each test on the way."""

    path: tuple[int, ...]
    next: int
    tests: tuple[Test, ...] = ()


Rule = Callable[[DraftTree, Tensor, Source], Decision]


def rejection(tree: DraftTree, p: Tensor, draws: Source) -> Decision:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023), recursive over siblings (Jeon et al. 2024).

    Siblings are tried in drawing order. One that was drawn from q is kept with probability min(1, p/q); after a refusal p
    becomes the normalised residual max(p - q, 0), and q loses the refused token (drawing without replacement). One that
    was chosen without chance has q = 1 at its token: it is kept with probability p, and its token leaves p on refusal.
    """
    if tree.q is not None:
        p = p.cpu()  # one transfer: the tests below look at p and q many times
    at_token = at_tokens(tree, p)
    path: list[int] = [0]
    tests: list[Test] = []
    while children := tree.children[path[-1]]:
        node = path[-1]
        q = tree.law(node)
        if q is None:
            kept, residual = _try_chosen(tree, children, p[node], at_token, draws, tests)
        else:
            kept, residual = _try_drawn(tree, children, p[node], q.cpu(), draws, tests)
        if kept is None:
            return Decision(tuple(path), draws.categorical(residual), tuple(tests))
        path.append(kept)
    return Decision(tuple(path), draws.categorical(p[path[-1]]), tuple(tests))


def _try_chosen(
    tree: DraftTree, children: tuple[int, ...], p: Tensor, at_token: list[float], draws: Source, tests: list[Test]
) -> tuple[int | None, Tensor]:
    left = 1.0  # probability of everything but the tokens refused so far
    refused: list[int] = []
    for child in children:
        token = tree.tokens[child]
        probability = 0.0 if token in refused else min(1.0, at_token[child] / left)
        kept = draws.bernoulli(probability)
        tests.append(Test(child, probability, kept))
        if kept:
            return child, p
        refused.append(token)
        left = max(left - (at_token[child] if probability else 0.0), 1e-300)
    residual = p.index_fill(0, torch.tensor(refused, device=p.device), 0.0)
    if not bool(residual.amax() > 0):  # the siblings hold all of p: the last refusal was a rounding error
        return max((c for c in children if at_token[c] > 0), default=children[0]), p
    return None, residual


def _try_drawn(
    tree: DraftTree, children: tuple[int, ...], p: Tensor, q: Tensor, draws: Source, tests: list[Test]
) -> tuple[int | None, Tensor]:
    for child in children:
        token = tree.tokens[child]
        drawn_with = float(q[token])
        if drawn_with <= 0:  # cannot have been drawn; what was tried before it is still exact
            break
        probability = min(1.0, float(p[token]) / drawn_with)
        kept = draws.bernoulli(probability)
        tests.append(Test(child, probability, kept))
        if kept:
            return child, p
        residual = (p - q).clamp(min=0)
        if (mass := residual.sum()) <= 0:  # p equals q: a refusal had no probability, so p is the limit of the residual
            break
        p = residual / mass
        q = q.index_fill(0, torch.tensor([token]), 0.0)
        if (mass := q.sum()) <= 0:  # nothing else could have been drawn
            break
        q = q / mass
    return None, p


def block(tree: DraftTree, p: Tensor, draws: Source) -> Decision:
    """Block verification (Sun et al. 2024): the longest exact rule for one chain.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)), the longest kept prefix i is found from the end: the whole chain
    of length g stays with probability w_g, a prefix i < g with r_i / (r_i + 1 - w_i), r_i = sum max(w_i p_i - q_i, 0). The
    next token comes from p after the whole chain, else from the residual max(w_i p_i - q_i, 0).
    """
    if not tree.is_chain:
        raise ParameterError(
            "the accept rule 'block' is defined for chains; use 'traversal', 'rejection' or 'coupled' for trees"
        )
    length = len(tree) - 1
    if length == 0:
        return Decision((0,), draws.categorical(p[0]))
    p_at = at_tokens(tree, p)
    q_at = q_at_tokens(tree)
    w = [1.0]
    for node in range(1, length + 1):
        ratio = p_at[node] / q_at[node] if q_at[node] > 0 else 0.0
        w.append(min(1.0, w[-1] * ratio))
    laws = [tree.law(node) for node in range(length)]
    r = torch.stack([_block_residual(p[i], q, tree.tokens[i + 1], w[i]).sum() for i, q in enumerate(laws)]).tolist()
    tests = []
    for kept in range(length, 0, -1):
        if kept == length:
            probability = w[kept]
        else:
            refused = r[kept] + 1 - w[kept]
            probability = r[kept] / refused if refused > 0 else 1.0
        accepted = draws.bernoulli(probability)
        tests.append(Test(kept, probability, accepted))
        if accepted:
            break
    else:
        kept = 0
    path = tuple(range(kept + 1))
    if kept == length:
        return Decision(path, draws.categorical(p[kept]), tuple(tests))
    residual = _block_residual(p[kept], laws[kept], tree.tokens[kept + 1], w[kept])
    return Decision(path, draws.categorical(residual if r[kept] > 0 else p[kept]), tuple(tests))


def _block_residual(p: Tensor, q: Tensor | None, token: int, w: float) -> Tensor:
    """max(w p - q, 0) ``[V]``; q None is all on `token`, the next of the chain."""
    if q is not None:
        return (w * p - q.to(p.device)).clamp(min=0)
    return (w * p).index_fill(0, torch.tensor([token], device=p.device), 0.0)


def traversal(tree: DraftTree, p: Tensor, draws: Source) -> Decision:
    """Traversal verification (Weng et al. 2025): block verification carried to trees, from the leaves up.

    A node's weight is min(1, w p(x)/q(x)), w its parent's weight; the anchor's is 1. The leftmost leaf is kept, with its
    whole path, with probability of its weight w. After a refusal of child x its parent has, with R = sum max(w p - q, 0), the law
    max(w p - q, 0) / R, the weight R / (R + 1 - w), and q without x; then its next child is looked at, and itself after the last.
    On a chain it is `block`. Where nothing was drawn it is `rejection`, which keeps all that can be kept.
    """
    if tree.q is None:
        return rejection(tree, p, draws)
    p = p.cpu()
    visits = [_Visit(tree, 0, 1.0, p[0])]
    tests: list[Test] = []
    while True:
        here = visits[-1]
        if (below := here.descend(p)) is not None:
            visits.append(below)
            continue
        if here.node:
            kept = draws.bernoulli(here.weight)
            tests.append(Test(here.node, here.weight, kept))
            if not kept:
                visits.pop()
                visits[-1].refuse()
                continue
        return Decision(tuple(visit.node for visit in visits), draws.categorical(here.p), tuple(tests))


class _Visit:
    """A node on the path that `traversal` looks at, with what is left of it after the refusals of its first children."""

    def __init__(self, tree: DraftTree, node: int, weight: float, p: Tensor):
        q = tree.law(node)
        self.tree = tree
        self.node = node
        self.weight = weight
        self.p = p
        self.q = None if q is None else q.cpu()
        self.left = list(tree.children[node]) if weight > 0 else []  # below a weight of 0 nothing can be kept

    def descend(self, p: Tensor) -> _Visit | None:
        """The next child, if there is one that may have been drawn."""
        if not self.left:
            return None
        child = self.left[0]
        token = self.tree.tokens[child]
        drawn_with = 1.0 if self.q is None else float(self.q[token])
        if drawn_with <= 0:  # cannot have been drawn; what was tried before it is still exact
            return None
        return _Visit(self.tree, child, min(1.0, self.weight * float(self.p[token]) / drawn_with), p[child])

    def refuse(self) -> None:
        """Take note that the child last descended to was refused, with all below it."""
        token = self.tree.tokens[self.left.pop(0)]
        residual = _block_residual(self.p, self.q, token, self.weight)
        mass = float(residual.sum())
        if mass <= 0:  # at weight 1 p equals q, and a refusal had no probability; else nothing is left of this node
            self.weight = self.weight if self.weight == 1 else 0.0
            self.left = []
            return
        self.p = residual / mass
        self.weight = mass / (mass + (1 - self.weight))
        if self.q is not None:
            self.q = self.q.index_fill(0, torch.tensor([token]), 0.0)
            total = self.q.sum()
            self.q = self.q / total
            if total <= 0:  # nothing else could have been drawn
                self.left = []


def coupled(tree: DraftTree, p: Tensor, draws: Source) -> Decision:
    """Drafter-invariant sampling (Daliri, Musco, Suresh 2025): the target's token is fixed by the noise of its position.

    The token after each node is argmax(log p + noise) whatever was drafted; a child is kept when it carries that token.
    So one seed gives one text, with any drafter or none.
    """
    path, tests = [0], []
    while True:
        node = path[-1]
        token = draws.coupled(p[node], tree.depths[node])
        kept = next((child for child in tree.children[node] if tree.tokens[child] == token), None)
        tests += [Test(child, float(child == kept), child == kept) for child in tree.children[node]]
        if kept is None:
            return Decision(tuple(path), token, tuple(tests))
        path.append(kept)


def at_tokens(tree: DraftTree, p: Tensor, more: Sequence[tuple[int, int]] = ()) -> list[float]:
    """p of each drafted token at its parent's row; 1.0 for the anchor; then of each (node, token) of `more`. One transfer to the host."""
    if len(tree) == 1 and not more:
        return [1.0]
    rows = torch.tensor([*tree.parents[1:], *(node for node, _ in more)], device=p.device)
    columns = torch.tensor([*tree.tokens[1:], *(token for _, token in more)], device=p.device)
    return [1.0, *p[rows, columns].tolist()]


def q_at_tokens(tree: DraftTree) -> list[float]:
    """q of each drafted token, 1.0 where it was chosen without chance; 1.0 for the anchor. One transfer to the host."""
    laws = [(node, law) for node in range(1, len(tree)) if (law := tree.law(tree.parents[node])) is not None]
    values = [1.0] * len(tree)
    if laws:
        drawn = torch.stack([law[tree.tokens[node]] for node, law in laws]).tolist()
        for (node, _), value in zip(laws, drawn):
            values[node] = value
    return values


RULES: dict[str, Rule] = {"rejection": rejection, "block": block, "traversal": traversal, "coupled": coupled}
"""The exact rules by name. Lossy ones are in `relaxed`."""
