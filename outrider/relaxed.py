"""Lossy accept rules: faster, but the text is no longer the target's own. Chosen only by name, marked in every output."""

from __future__ import annotations

import torch
from torch import Tensor

from .accept import Decision, Rule, Source, Test
from .tree import DraftTree

EPSILON = 0.09
DELTA = 0.3


def typical(tree: DraftTree, p: Tensor, draws: Source) -> Decision:
    """Typical acceptance (Cai et al. 2024, Medusa): keep what the target finds plausible, whoever proposed it.

    A drafted token is plausible when p(x) > min(EPSILON, DELTA exp(-H(p))), H in nats. The deepest path of plausible tokens
    stays (the first of equals); the next token is drawn from p. EPSILON and DELTA are the values of Medusa's code.
    """
    nodes = range(1, len(tree))
    entropy = torch.special.entr(p).sum(dim=-1)
    threshold = (DELTA * torch.exp(-entropy)).clamp(max=EPSILON).tolist()
    at_token = [1.0, *(p[[tree.parents[i] for i in nodes], [tree.tokens[i] for i in nodes]].tolist() if len(tree) > 1 else [])]
    kept = [True] + [False] * (len(tree) - 1)
    tests = []
    for node in nodes:
        parent = tree.parents[node]
        kept[node] = kept[parent] and at_token[node] > threshold[parent]
        tests.append(Test(node, float(kept[node]), kept[node]))
    deepest = max((node for node in range(len(tree)) if kept[node]), key=lambda node: (tree.depths[node], -node))
    return Decision(tree.path(deepest), draws.categorical(p[deepest]), tuple(tests))


RULES: dict[str, Rule] = {"typical": typical}
"""The lossy rules by name."""
