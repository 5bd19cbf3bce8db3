"""The accept rules at their edges; their laws are in test_laws.py."""

from __future__ import annotations

from typing import Any

import laws
import pytest
import torch
from torch import Tensor

from outrider import accept, relaxed
from outrider.accept import Decision, Test
from outrider.errors import ParameterError
from outrider.sampling import Sampler, SamplingParams
from outrider.tree import DraftTree

EXACT = ("rejection", "block")
STAR = DraftTree((0, 0, 1, 2), (-1, 0, 0, 0))


class Always:
    """A source that keeps or refuses everything that is not certain, and draws the first or the last possible token."""

    def __init__(self, keep: bool, last: bool = False):
        self.keep, self.last = keep, last

    def bernoulli(self, p: float) -> bool:
        return p >= 1 or (p > 0 and self.keep)

    def categorical(self, w: Tensor) -> int:
        assert bool(torch.isfinite(w).all()) and bool((w >= 0).all()) and float(w.sum()) > 0
        return int(w.nonzero()[-1 if self.last else 0, 0])

    def coupled(self, w: Tensor, depth: int) -> int:
        return self.categorical(w)


def one_hot(token: int, vocab: int = 4) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), vocab).double()


def test_the_siblings_hold_all_of_p_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        p = torch.rand(3, generator=generator) ** 3
        p = torch.cat([p / p.sum(), torch.zeros(2)])
        rows = p.expand(4, -1)
        decision = accept.rejection(STAR, rows, Always(keep=False))  # type: ignore[arg-type]
        assert len(decision.path) == 2 and p[STAR.tokens[decision.path[1]]] > 0
    some = torch.tensor([0.5, 0.5, 0.0, 0.0])  # the last sibling has no probability: the one before it must be kept
    decision = accept.rejection(STAR, some.expand(4, -1), Always(keep=False))  # type: ignore[arg-type]
    assert decision.path == (0, 2)


@pytest.mark.parametrize("rule", EXACT)
def test_p_equal_to_q_in_float32_keeps_everything(rule: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        p = torch.randn(4, 50, generator=generator).mul(3).softmax(dim=-1)
        drafts = [int(torch.multinomial(row, 1, generator=generator)) for row in p[:3]]
        tree = DraftTree.chain(0, drafts, list(p[:3]))
        assert accept.RULES[rule](tree, p, Always(keep=False)).path == (0, 1, 2, 3)


@pytest.mark.parametrize("rule", EXACT)
def test_p_nearly_q_in_float32_leaves_a_law(rule: str) -> None:
    """Residuals made of rounding errors are laws all the same."""
    generator = torch.Generator().manual_seed(2)
    for trial in range(300):
        q = torch.randn(3, 20, generator=generator).mul(3).softmax(dim=-1)
        p = (q.double() * (1 + 1e-7 * torch.randn(3, 20, generator=generator))).float()
        drafts = [int(torch.multinomial(row, 1, generator=generator)) for row in q[:2]]
        tree = DraftTree.chain(0, drafts, list(q[:2]))
        for keep in (True, False):
            decision = accept.RULES[rule](tree, p, Always(keep, last=bool(trial % 2)))
            assert 0 <= decision.next < 20


@pytest.mark.parametrize("rule", EXACT)
def test_p_and_q_of_different_types(rule: str) -> None:
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).expand(3, -1)
    tree = DraftTree.chain(0, (1, 2), [torch.tensor([0.3, 0.4, 0.3]), torch.tensor([0.3, 0.3, 0.4], dtype=torch.bfloat16)])
    decision = accept.RULES[rule](tree, p, Always(keep=False))
    assert decision.path == (0,) and decision.next == 2


def test_more_siblings_than_q_has_tokens() -> None:
    """A drafter that breaks its contract; what was tried before is exact, and nothing is NaN in float32."""
    q = torch.tensor([0.0, 1.0, 0.0, 0.0])
    tree = DraftTree((0, 1, 2, 3), (-1, 0, 0, 0), (q, None, None, None))
    p = torch.tensor([0.25, 0.25, 0.25, 0.25]).expand(4, -1)
    decision = accept.rejection(tree, p, Always(keep=False, last=True))  # type: ignore[arg-type]
    assert decision == Decision((0,), 3, (Test(1, 0.25, False),))
    unlikely = DraftTree((0, 2), (-1, 0), (q, None))
    assert accept.rejection(unlikely, p, Always(keep=True)).path == (0,)
    assert accept.block(unlikely, p, Always(keep=True)).path == (0,)


@pytest.mark.parametrize("shape", ((2,), (3,), (2, 2), (1, 3), (3, 2)))
def test_temperature_zero_follows_the_best_path(shape: tuple[int, ...]) -> None:
    """One-hot p: the only path there is, at u = 0 and at the largest u, for chosen and for drawn siblings."""
    for seed in range(5):
        case = laws.Case("random", 4, SamplingParams(temperature=0.0), seed=seed)
        sampler = case.sampler("rejection")
        for how, keep in ((laws.chosen, True), (laws.double, False)):
            for _, root in laws.Drafts(case, sampler, how).nodes(shape):
                tree = laws.grow(root)
                p = sampler.probabilities(torch.stack([case.logits(tree.path_tokens(i)) for i in range(len(tree))]), tree)
                text: list[int] = []
                for _ in range(len(shape) + 1):
                    text.append(case.law(text).index(1.0))
                for rule in ("rejection", "coupled"):
                    decision = accept.RULES[rule](tree, p, Always(keep))
                    new = [*tree.path_tokens(decision.path[-1]), decision.next]
                    assert new == text[: len(new)]
                    assert all(tree.tokens[c] != decision.next for c in tree.children[decision.path[-1]])


@pytest.mark.parametrize("rule", (*EXACT, "coupled", "typical"))
def test_an_anchor_alone(rule: str) -> None:
    verdict = {**accept.RULES, **relaxed.RULES}[rule]
    assert verdict(DraftTree.chain(0), one_hot(2)[None], Always(keep=True)) == Decision((0,), 2)


@pytest.mark.parametrize("rule", EXACT)
def test_impossible_drafts(rule: str) -> None:
    """p is 0 at the first token: nothing below it counts, whatever its own p."""
    tree = DraftTree.chain(0, (1, 1, 1))
    p = torch.stack([one_hot(2), one_hot(1), one_hot(1), one_hot(1)])
    decision = accept.RULES[rule](tree, p, Always(keep=True))
    assert decision.path == (0,) and decision.next == 2
    for test in decision.tests:
        assert (test.probability, test.kept) == (0.0, False)


def test_block_refuses_trees() -> None:
    with pytest.raises(ParameterError, match="'block' is defined for chains"):
        accept.block(STAR, torch.full((4, 4), 0.25), Always(keep=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", EXACT)
def test_tests_say_what_was_decided(rule: str) -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]] * 3, dtype=torch.float64)
    q = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)
    tree = DraftTree.chain(0, (0, 1), [q, q])
    seen: set[Any] = set()
    for _, decision, _ in laws.outcomes(lambda source: accept.RULES[rule](tree, p, source)):
        seen.add((decision.path, tuple((t.node, round(t.probability, 12), t.kept) for t in decision.tests)))
    if rule == "rejection":
        assert seen == {((0,), ((1, 0.5, False),)), ((0, 1, 2), ((1, 0.5, True), (2, 1.0, True)))}
    else:  # w = (1, .5, .5), r_1 = max(.25 - .3, 0) = 0, so the whole chain stays or none of it
        assert seen == {((0, 1, 2), ((2, 0.5, True),)), ((0,), ((2, 0.5, False), (1, 0.0, False)))}


def test_p_and_q_at_the_tokens() -> None:
    q = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    tree = DraftTree((0, 1, 2, 2), (-1, 0, 0, 1), (None, q, None, None))
    p = torch.arange(12.0).reshape(4, 3)
    assert accept.at_tokens(tree, p) == [1.0, 1.0, 2.0, 5.0]
    assert accept.q_at_tokens(tree) == pytest.approx([1.0, 1.0, 1.0, 0.7])
    assert accept.at_tokens(DraftTree.chain(0), p) == accept.q_at_tokens(DraftTree.chain(0)) == [1.0]


def test_typical_keeps_the_deepest_plausible_path() -> None:
    p = torch.tensor([[0.5, 0.4, 0.1]] * 5)
    tree = DraftTree((0, 2, 0, 1, 2), (-1, 0, 0, 2, 3))
    threshold = min(0.09, 0.3 * float(torch.exp((p[0] * p[0].log()).sum())))
    assert threshold == pytest.approx(0.09)
    decision = relaxed.typical(tree, p, Always(keep=True))
    assert decision.path == (0, 2, 3, 4) and [t.kept for t in decision.tests] == [True, True, True, True]
    sharp = torch.tensor([[0.999, 0.001, 0.0]] * 5)
    assert relaxed.typical(tree, sharp, Always(keep=True)).path == (0, 2)


def test_coupled_keeps_the_first_of_two_equal_siblings() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), [0], 4, rule="coupled")
    tree = DraftTree((0, 3, 2, 2), (-1, 0, 0, 0))
    decision = accept.coupled(tree, one_hot(2).expand(4, -1), sampler.draws)
    assert decision == Decision((0, 2), 2, (Test(1, 0.0, False), Test(2, 1.0, True), Test(3, 0.0, False)))
