"""A vocabulary of three words, small enough to follow an accept rule by hand; and the engine's rule followed through every outcome."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Iterable, Sequence

import torch
from torch import Tensor

from ..accept import Decision, Rule, Source, at_tokens, q_at_tokens
from ..branching import outcomes
from ..errors import ParameterError
from ..tree import DraftTree

WORDS = ("yes", "no", "maybe")


@dataclass(frozen=True)
class Laws:
    """What the target (p) and the drafter (q) say comes next, for each of `WORDS`."""

    p: tuple[float, ...] = (0.5, 0.3, 0.2)
    q: tuple[float, ...] = (0.2, 0.7, 0.1)

    def __post_init__(self) -> None:
        for name, law in (("p", self.p), ("q", self.q)):
            if len(law) != len(WORDS) or min(law) < 0 or abs(sum(law) - 1) > 1e-9:
                raise ParameterError(
                    f"{name} must be {len(WORDS)} probabilities that add up to 1; got {' '.join(map(str, law))}"
                )


@dataclass(frozen=True)
class Way:
    """One way in which a round can go: what was drafted, whether it was kept, the first word that was emitted, how likely it is."""

    drafted: int
    kept: bool
    emitted: int
    probability: float


def ways(rule: Rule, laws: Laws) -> list[Way]:
    """Every way of a round in which one word is drawn from q and `rule` decides, the ways that differ in the bonus word alone as one."""
    found: dict[tuple[int, bool, int], float] = {}
    p = torch.tensor([laws.p, laws.p], dtype=torch.float64)  # after the anchor, and after the draft
    q = torch.tensor(laws.q, dtype=torch.float64)
    for drafted, chance in enumerate(laws.q):
        if chance <= 0:
            continue
        tree = DraftTree.chain(0, [drafted], q=[q])
        for probability, decision, _ in outcomes(partial(rule, tree, p)):
            kept = len(decision.path) > 1
            key = drafted, kept, drafted if kept else decision.next
            found[key] = found.get(key, 0.0) + chance * probability
    return [Way(*key, probability) for key, probability in sorted(found.items())]


def kept(ways: Sequence[Way]) -> list[float]:
    """For each word the probability that it is drafted and kept."""
    return _sums(way for way in ways if way.kept)


def recovered(ways: Sequence[Way]) -> list[float]:
    """For each word the probability that it comes in the place of a refused one."""
    return _sums(way for way in ways if not way.kept)


def emitted(ways: Sequence[Way]) -> list[float]:
    """For each word the probability that it is what the reader gets."""
    return _sums(ways)


def _sums(ways: Iterable[Way]) -> list[float]:
    sums = [0.0] * len(WORDS)
    for way in ways:
        sums[way.emitted] += way.probability
    return sums


# ---- rules that are wrong, for the closing question --------------------------------------------------------------------


def redraw_from_p(tree: DraftTree, p: Tensor, draws: Source) -> Decision:
    """WRONG: keeps with probability min(1, p/q), as it should, but replaces a refused word by a draw from p."""
    probability = min(1.0, at_tokens(tree, p)[1] / q_at_tokens(tree)[1])
    return (
        Decision((0, 1), draws.categorical(p[1])) if draws.bernoulli(probability) else Decision((0,), draws.categorical(p[0]))
    )


def keep_the_likeliest(tree: DraftTree, p: Tensor, draws: Source) -> Decision:
    """WRONG: keeps a word where the target finds none more likely, else draws from p."""
    likeliest = int(p[0].argmax()) == tree.tokens[1]
    return Decision((0, 1), draws.categorical(p[1])) if likeliest else Decision((0,), draws.categorical(p[0]))
