"""Expected accepted length of the accept rules on random p and q, exactly: every draft, every outcome of the shipped rules.

    python benchmarks/acceptance.py [--laws 1000] [--vocab 3]

For every context p and q are drawn anew: logits of p are normal, those of q lie between them and independent ones. Drafts are
drawn without replacement. A difference below 1e-12 counts as none.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any, Iterator

import torch
from common import save

from outrider import accept
from outrider.tree import DraftTree

SHAPES = {
    "chain of 2": (1, 1),
    "chain of 3": (1, 1, 1),
    "2 siblings": (2,),
    "2 siblings, 1 below each": (2, 1),
    "1, then 2 siblings": (1, 2),
    "2 siblings, 2 below each": (2, 2),
}


class Laws:
    """p and q ``[V]`` for every context, drawn at first use."""

    def __init__(self, seed: int, vocab: int):
        self._generator = torch.Generator().manual_seed(seed)
        self._vocab = vocab
        self._near, self._sharp = torch.rand(2, generator=self._generator, dtype=torch.float64).tolist()
        self._memo: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __getitem__(self, path: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        if path not in self._memo:
            a, b = torch.randn(2, self._vocab, generator=self._generator, dtype=torch.float64) * (0.5 + 2.5 * self._sharp)
            self._memo[path] = a.softmax(0), (self._near * a + (1 - self._near) * b).softmax(0)
        return self._memo[path]


class Branch:
    """Random decisions that follow a script; at the first one beyond it the other outcome is noted in `open`."""

    def __init__(self, script: tuple[bool, ...]):
        self._script = script
        self._taken: list[bool] = []
        self.open: list[tuple[bool, ...]] = []
        self.weight = 1.0

    def bernoulli(self, p: float) -> bool:
        p, at = min(p, 1.0), len(self._taken)
        outcome = self._script[at] if at < len(self._script) else p > 0
        if at >= len(self._script) and 0 < p < 1:
            self.open.append((*self._taken, not outcome))
        self._taken.append(outcome)
        self.weight *= p if outcome else 1 - p
        return outcome

    def categorical(self, w: torch.Tensor) -> int:
        return 0  # the token after the path does not count

    def coupled(self, w: torch.Tensor, depth: int) -> int:
        raise NotImplementedError


def siblings(q: list[float], k: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Ordered draws of k tokens without replacement."""
    for tokens in itertools.permutations(range(len(q)), k):
        weight, left = 1.0, 1.0
        for token in tokens:
            weight *= q[token] / left if left > 0 else 0.0
            left -= q[token]
        yield weight, tokens


def drafts(laws: Laws, shape: tuple[int, ...]) -> Iterator[tuple[float, DraftTree]]:
    """Every tree of this shape, level by level."""

    def level(weight: float, nodes: list[tuple[int, int, tuple[int, ...]]], first: int, depth: int) -> Iterator[Any]:
        if depth == len(shape):
            yield weight, nodes
            return
        above = range(first, len(nodes))
        for drawn in itertools.product(*(list(siblings(laws[nodes[n][2]][1].tolist(), shape[depth])) for n in above)):
            new = [(token, n, (*nodes[n][2], token)) for n, (_, tokens) in zip(above, drawn) for token in tokens]
            yield from level(weight * math.prod(w for w, _ in drawn), nodes + new, len(nodes), depth + 1)

    for weight, nodes in level(1.0, [(0, -1, ())], 0, 0):
        inner = {parent for _, parent, _ in nodes}
        q = tuple(laws[path][1] if i in inner else None for i, (_, _, path) in enumerate(nodes))
        yield weight, DraftTree(tuple(t for t, _, _ in nodes), tuple(p for _, p, _ in nodes), q)


def accepted(rule: accept.Rule, tree: DraftTree, p: torch.Tensor) -> float:
    """Expected number of accepted tokens of one draft."""
    total = 0.0
    scripts: list[tuple[bool, ...]] = [()]
    while scripts:
        branch = Branch(scripts.pop())
        decision = rule(tree, p, branch)
        total += branch.weight * (len(decision.path) - 1)
        scripts += branch.open
    return total


def compare(shape: tuple[int, ...], laws: int, vocab: int) -> dict[str, Any]:
    """`rejection` against the joint rule on this shape."""
    other = accept.block if set(shape) == {1} else accept.traversal
    base, gains = [], []
    for seed in range(laws):
        law, sums = Laws(seed, vocab), [0.0, 0.0]
        for weight, tree in drafts(law, shape):
            p = torch.stack([law[tree.path_tokens(node)][0] for node in range(len(tree))])
            for i, rule in enumerate((accept.rejection, other)):
                sums[i] += weight * accepted(rule, tree, p)
        base.append(sums[0])
        gains.append(sums[1] - sums[0])
    losses = [-gain for gain in gains if gain < -1e-12]
    return {
        "rule": other.__name__,
        "laws": laws,
        "rejection": sum(base) / laws,
        "mean_gain": sum(gains) / laws,
        "greatest_gain": max(gains),
        "share_lower": len(losses) / laws,
        "mean_loss_where_lower": sum(losses) / len(losses) if losses else 0.0,
        "greatest_loss": max(losses, default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laws", type=int, default=1000)
    parser.add_argument("--vocab", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"vocab": args.vocab, "shapes": {}}
    for name in args.shape or SHAPES:
        row = result["shapes"][name] = compare(SHAPES[name], args.laws, args.vocab)
        print(
            f"{name:26}{row['rule']:11}{row['rejection']:8.4f}{row['mean_gain']:+9.4f}{row['share_lower']:8.1%}{row['greatest_loss']:9.4f}",
            flush=True,
        )
    save("acceptance", result)


if __name__ == "__main__":
    main()
