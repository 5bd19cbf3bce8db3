"""Every outcome of a program that makes random decisions, with its probability: the program runs once for each.

So the law of a shipped accept rule is computed exactly: it gets a `Branch` for its source of draws. The tests and the lab do so.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence

import torch


class Broken(AssertionError):
    """The engine does not do what it promises."""


def require(condition: bool, message: object) -> None:
    if not condition:
        raise Broken(message)


class Branch:
    """Random decisions that follow a script; at the first one beyond it the other outcomes are noted in `open`."""

    def __init__(self, script: Sequence[int] = ()):
        self.script = script
        self.taken: list[int] = []
        self.open: list[tuple[int, ...]] = []
        self.weight = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        """An index of a weight above 0; all others become branches."""
        require(all(w >= 0 for w in weights) and sum(weights) > 0, f"no law: {weights}")
        possible = [i for i, w in enumerate(weights) if w > 0]
        at = len(self.taken)
        if at < len(self.script):
            pick = self.script[at]
        else:
            pick = possible[0]
            self.open += [(*self.taken, i) for i in possible[1:]]
        self.taken.append(pick)
        self.weight *= weights[pick] / sum(weights)
        return pick

    def bernoulli(self, p: float) -> bool:
        p = min(p, 1.0)
        return self.choose((1 - p, p)) == 1

    def categorical(self, w: torch.Tensor) -> int:
        return self.choose(w.tolist())

    def coupled(self, w: torch.Tensor, depth: int) -> int:
        raise Broken("not a rule with streams")


def outcomes(run: Callable[[Any], Any], source: type[Branch] = Branch) -> Iterator[tuple[float, Any, Any]]:
    """Every outcome of ``run(source)`` that has a probability: (probability, result, source)."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        branch = source(scripts.pop())
        result = run(branch)
        yield branch.weight, result, branch
        scripts += branch.open
