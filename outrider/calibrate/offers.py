"""What a drafter promises and offers for a round, and what of it is worth verifying."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from ..tree import DraftTree


class Offer(NamedTuple):
    """A draft with what it is worth. reach: the chance of each node, the anchor's first; order: its nodes, the likeliest first;
    taken: how many of these are worth verifying; least: how many of them are verified to learn from it.
    """

    worth: float
    part: int
    tree: DraftTree
    reach: list[float]
    order: list[int]
    taken: int
    least: int = 0


class Ahead(NamedTuple):
    """What a drafter that pays for each level promises: the worth of its best depth, in tokens; how likely a draft must be for a further
    step; how many tokens such a round emits; and by how many tokens a second it is judged, if nothing is worth that by as many as it gives.
    """

    worth: float
    depth: int
    step: float
    emitted: float
    rate: float

    def rounds(self, tokens: float) -> float:
        """That it takes for so many tokens."""
        return max(tokens / self.emitted, 1.0)


def to_learn(offer: Offer, least: int, worth: float) -> Offer:
    """The offer, so many nodes of which are verified whatever the others' are worth."""
    return offer._replace(taken=least, least=least, worth=worth)


def worth_of(offer: Offer | None) -> float:
    return 0.0 if offer is None else offer.worth


def better(one: Offer | None, other: Offer) -> Offer | None:
    """The offer that is worth more, if it is worth anything."""
    return other if other.worth > worth_of(one) else one


def by_level(offer: Offer) -> list[float]:
    """For each level of a draft, the chance that it is reached from the one above."""
    reach = [0.0] * (offer.tree.depth + 1)
    for chance, depth in zip(offer.reach, offer.tree.depths):
        reach[depth] += chance
    return [min(here / above, 1.0) if above else 0.0 for above, here in pairwise(reach)]


def cut_to(offer: Offer) -> DraftTree:
    """The draft without what is not worth verifying."""
    tree, taken = offer.tree, offer.taken
    if tree.is_chain:
        return tree.first(taken)
    best = {0, *offer.order[:taken]}
    return tree.prune([node in best for node in range(len(tree))])
