"""How a draft tree grows, level by level, from a drafter's logits; and the options that say in what shape.

A drafter that has logits of its own (a small model, heads) runs the nodes of `Growth.frontier` and hands the logits to
`Growth.extend`, which draws their children through the sequence's Sampler, until the frontier is empty. What is drawn under a q
is budgeted before it is drawn and kept; only what is chosen without chance is reranked and cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

from torch import Tensor

from ..errors import ParameterError
from ..sampling import Sampler
from ..tree import Budget, DraftTree, RankPath, check_shape, fit_shape, optimal_shape
from .base import Options

GROWTHS = ("dynamic", "best", "static", "sampled")
WIDTH = 4
ACCEPTANCE = (0.6, 0.16, 0.07, 0.04, 0.025, 0.015, 0.01, 0.01)
"""By rank, how often a child is kept: what a middling drafter achieves, for who has not measured."""


@dataclass(frozen=True)
class TreeOptions(Options):
    """shape: chain or tree. depth, nodes: most drafted tokens on a path, and in all, where the round's budget allows more.
    min_probability: nothing less likely than this, with all on the way to it, is drafted. greedy: a chain takes the most
    likely tokens instead of drawing them (at temperature 0 it is the same).

    For trees. growth: ``dynamic``, the live nodes of each level get `width` children and the `width` likeliest of these live on,
    in the end the likeliest of all nodes are kept (EAGLE-2); ``best``, the same without a limit on the live nodes, which
    gives the likeliest nodes of all; ``static``, a fixed shape filled with the most likely tokens; ``sampled``, a fixed shape
    filled with drawn tokens, without replacement. paths: the fixed shape, as ranks from the root (``0 1 0.0 0.1``); without it,
    the best one for `acceptance`, how often the child of each rank is kept (Sequoia).
    """

    shape: str = "chain"
    growth: str | None = None
    width: int | None = None
    depth: int | None = None
    nodes: int | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    acceptance: tuple[float, ...] | None = None
    min_probability: float | None = None
    greedy: bool = False

    def __post_init__(self) -> None:
        if self.shape not in ("chain", "tree"):
            raise ParameterError(f"option shape must be chain or tree; got {self.shape!r}")
        if self.growth is not None and self.growth not in GROWTHS:
            raise ParameterError(f"option growth must be one of {', '.join(GROWTHS)}; got {self.growth!r}")
        for name in ("width", "depth", "nodes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ParameterError(f"option {name} must be a whole number, 1 or more; got {value!r}")
        if self.min_probability is not None and not 0 <= self.min_probability < 1:
            raise ParameterError(f"option min_probability must be at least 0 and below 1; got {self.min_probability}")
        self._check_use()
        if self.paths is not None:
            check_shape(self.paths)
            if self.growth == "sampled" and any(
                (*path[:-1], path[-1] - 1) not in self.paths for path in self.paths if path[-1]
            ):
                raise ParameterError("option paths: with growth=sampled every rank needs the lower ranks beside it")
        if self.acceptance is not None and not (self.acceptance and all(0 <= a <= 1 for a in self.acceptance)):
            raise ParameterError(f"option acceptance must hold probabilities by rank; got {self.acceptance!r}")

    def _check_use(self) -> None:
        """Refuse what the shape would not use."""
        growth = self.growth or "dynamic"
        fixed = growth in ("static", "sampled")
        for name, used, what in (
            ("growth", self.shape == "tree", "shape=tree"),
            ("width", self.shape == "tree" and not fixed, "shape=tree and growth=dynamic or best"),
            ("paths", self.shape == "tree" and fixed, "shape=tree and growth=static or sampled"),
            ("acceptance", self.shape == "tree" and fixed, "shape=tree and growth=static or sampled"),
        ):
            if getattr(self, name) is not None and not used:
                raise ParameterError(f"option {name} needs {what}")
        if self.greedy and self.shape == "tree":
            raise ParameterError("option greedy is for chains; a tree draws its tokens with growth=sampled alone")
        if self.paths is not None and self.acceptance is not None:
            raise ParameterError("give option paths or option acceptance, not both")

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn under a q (at a temperature above 0, and not under `coupled`)."""
        return not self.greedy if self.shape == "chain" else self.growth == "sampled"


class Growth:
    """One sequence's draft while it grows.

    tokens, parents: the nodes so far, the anchor first; a node keeps its number until the end. frontier: the nodes whose logits
    the next step needs; empty when the draft is complete. likely: how likely each node is, with all on the way to it.
    """

    def __init__(self, sampler: Sampler, anchor: int, budget: Budget, options: TreeOptions, least: float = 0.0):
        """least: what `options.min_probability` is where neither it nor a price is given."""
        self.sampler = sampler
        self.tokens = [anchor]
        self.parents = [-1]
        self.frontier: list[int] = []
        self._least = budget.least(options.min_probability, least)
        self._step = budget.step
        self._nodes = budget.nodes if options.nodes is None else min(budget.nodes, options.nodes)
        self._depth = min(budget.depth, self._nodes) if options.depth is None else min(budget.depth, self._nodes, options.depth)
        self._growth = "chain" if options.shape == "chain" else options.growth or "dynamic"
        self._width = options.width or WIDTH
        self._greedy = not options.draws and (options.greedy or sampler.rule != "coupled")
        self._shape = self._fixed_shape(options) if self._growth in ("static", "sampled") else {}
        self._ranks: list[RankPath] = [()]
        self._paths: list[tuple[int, ...]] = [()]
        self._chances = [1.0]
        self.likely = [1.0]  # of the whole path
        self._enough = -math.inf  # no node is kept that is not likelier, where the likeliest are kept
        self._q: list[Tensor | None] = [None]
        if self._nodes > 0 and self._depth > 0 and (not self._fixed or self._shape):
            self.frontier = [0]

    @property
    def _fixed(self) -> bool:
        return self._growth in ("static", "sampled")

    def _fixed_shape(self, options: TreeOptions) -> dict[RankPath, list[int]]:
        """For each inner node of the fixed shape, the ranks of its children."""
        if options.paths is not None:
            paths = fit_shape(options.paths, self._nodes, self._depth)
        else:
            paths = optimal_shape(options.acceptance or ACCEPTANCE, self._nodes, self._depth, self._least)
        ranks: dict[RankPath, list[int]] = {}
        for path in sorted(paths):
            ranks.setdefault(path[:-1], []).append(path[-1])
        return ranks

    def extend(self, logits: Tensor, ids: Tensor | None = None) -> None:
        """Draw the children of the frontier from its nodes' logits ``[len(frontier), V]``; the frontier moves a level down.

        ids: ``[V]``, rising, the tokens that the columns stand for; None: 0, 1, ...
        """
        above, self.frontier = self.frontier, []
        counts = [self._children(node) for node in above]
        chosen = self._greedy or self.sampler.greedy
        if not chosen and self._least > 0:  # what may be drawn is decided before it is drawn
            best = _best_chances(self.sampler.constrain(logits, [self._paths[node] for node in above], ids))
            counts = [0 if self.likely[n] * b < self._least else k for n, b, k in zip(above, best, counts)]
        drawn = self.sampler.draw(logits, [self._paths[node] for node in above], counts, self._greedy, ids)
        new, total = [], 0.0
        for node, (tokens, q, chances) in zip(above, drawn):
            self._q[node] = q
            for rank in self._shape.get(self._ranks[node], range(len(tokens))):
                if rank >= len(tokens):
                    break
                likely = self.likely[node] * chances[rank]
                if chosen and likely < self._least:
                    continue
                total += likely
                if likely > self._enough:
                    new.append(self._add(node, rank, tokens[rank], chances[rank]))
        self.frontier = self._live(new) if total >= self._step else []

    def _children(self, node: int) -> int:
        if self._growth == "chain":
            return 1
        if self._fixed:
            return self._shape[self._ranks[node]][-1] + 1
        return self._width

    def _add(self, parent: int, rank: int, token: int, chance: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self._ranks.append((*self._ranks[parent], rank))
        self._paths.append((*self._paths[parent], token))
        self._chances.append(chance)
        self.likely.append(self.likely[parent] * chance)
        self._q.append(None)
        return len(self.tokens) - 1

    def _live(self, new: Sequence[int]) -> list[int]:
        """Which of the new nodes are to have children."""
        if not new or len(self._ranks[new[0]]) >= self._depth:
            return []
        if self._growth == "chain":
            return list(new)
        if self._fixed:
            return [node for node in new if self._ranks[node] in self._shape]
        if len(self.tokens) > self._nodes:
            self._enough = sorted(self.likely[1:], reverse=True)[self._nodes - 1]
        able = [node for node in new if self.likely[node] > self._enough]  # a child is no likelier than its parent
        if self._growth == "dynamic":
            able = sorted(sorted(able, key=lambda node: -self.likely[node])[: self._width])
        return able

    def tree(self) -> DraftTree:
        """The draft. Dynamic trees keep the likeliest nodes: no node is likelier than its parent, so every path stays whole."""
        tree = DraftTree(
            tokens=tuple(self.tokens),
            parents=tuple(self.parents),
            q=tuple(self._q) if any(q is not None for q in self._q) else None,
            score=tuple(self._chances),
        )
        if len(tree) <= self._nodes + 1:
            return tree
        best = sorted(range(1, len(tree)), key=lambda node: (-self.likely[node], node))[: self._nodes]
        kept = {0, *best}
        return tree.prune([node in kept for node in range(len(tree))])


def _best_chances(logits: Tensor) -> list[float]:
    """The largest softmax probability of each row of logits ``[n, V]``. One transfer."""
    raw = logits if logits.dtype.itemsize >= 4 else logits.float()
    return (raw.amax(dim=-1) - raw.logsumexp(dim=-1)).exp().tolist()
