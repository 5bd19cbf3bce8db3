"""What is derived from a draft tree, against brute force; malformed trees; pruning."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import DraftError
from outrider.tree import DraftTree


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(1, 12))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, n))]
    tokens = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    return DraftTree(tuple(tokens), tuple(parents), score=tuple(i / n for i in range(n)))


def above(tree: DraftTree, node: int) -> list[int]:
    return [] if node == 0 else [*above(tree, tree.parents[node]), tree.parents[node]]


@given(trees())
@settings(max_examples=200, deadline=None)
def test_derived(tree: DraftTree) -> None:
    n = len(tree)
    assert tree.depths == tuple(len(above(tree, i)) for i in range(n))
    assert tree.depth == max(len(above(tree, i)) for i in range(n))
    assert tree.children == tuple(tuple(c for c in range(1, n) if tree.parents[c] == i) for i in range(n))
    assert tree.is_chain == all(len(c) == 1 for c in tree.children[:-1]) == (tree.depth == n - 1)
    for i in range(n):
        assert tree.path(i) == (*above(tree, i), i)
        assert tree.path_tokens(i) == tuple(tree.tokens[j] for j in (*above(tree, i), i) if j)
        assert tree.law(i) is None
    assert tree.ancestors().tolist() == [[j == i or j in above(tree, i) for j in range(n)] for i in range(n)]
    assert tree.ancestors().dtype == torch.bool


@given(trees(), st.data())
@settings(max_examples=200, deadline=None)
def test_prune_keeps_what_is_kept_with_all_above_it(tree: DraftTree, data: st.DataObject) -> None:
    n = len(tree)
    keep = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    left = [i for i in range(n) if all(keep[j] or j == 0 for j in tree.path(i))]
    pruned = tree.prune(keep)
    assert [pruned.path_tokens(i) for i in range(len(pruned))] == [tree.path_tokens(i) for i in left]
    assert pruned.score == tuple(tree.score[i] for i in left)  # type: ignore[index]
    assert pruned.tokens[0] == tree.tokens[0] and tree.prune([True] * n) is tree
    size = data.draw(st.integers(0, n - 1))
    first, named = tree.first(size), tree.named("someone")
    assert asdict(first) == asdict(tree.prune([node <= size for node in range(n)])) and first.depths == tree.depths[: size + 1]
    assert asdict(named) == {**asdict(tree), "drafter": "someone"} and tree.drafter is None


@given(trees(), st.data())
@settings(max_examples=200, deadline=None)
def test_prune_refuses_what_was_drawn_under_a_q(tree: DraftTree, data: st.DataObject) -> None:
    n = len(tree)
    laws = tuple(torch.rand(10) if data.draw(st.booleans()) else None for _ in range(n))
    keep = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    tree = DraftTree(tree.tokens, tree.parents, laws)
    left = [i for i in range(n) if all(keep[j] or j == 0 for j in tree.path(i))]
    if any(laws[tree.parents[i]] is not None for i in range(1, n) if i not in left):
        with pytest.raises(DraftError, match="cannot be pruned"):
            tree.prune(keep)
    else:
        pruned = tree.prune(keep)
        assert [pruned.law(i) for i in range(len(pruned))] == [laws[i] for i in left]


def test_chain() -> None:
    q = [torch.rand(5), None]
    chain = DraftTree.chain(4, (1, 2), q, (0.5, 0.25))
    assert (chain.tokens, chain.parents, chain.score) == ((4, 1, 2), (-1, 0, 1), (1.0, 0.5, 0.25))
    assert chain.law(0) is q[0] and chain.law(1) is None and chain.law(2) is None
    assert chain.is_chain and chain.depth == 2
    anchor = DraftTree.chain(4)
    assert len(anchor) == 1 and anchor.depth == 0 and anchor.is_chain and anchor.children == ((),)
    assert anchor.ancestors().tolist() == [[True]] and anchor.path(0) == (0,) and anchor.path_tokens(0) == ()


@pytest.mark.parametrize(
    ("tokens", "parents", "more"),
    [
        ((), (), {}),
        ((1,), (0,), {}),
        ((1,), (), {}),
        ((1, 2), (-1,), {}),
        ((1, 2), (-1, -1), {}),
        ((1, 2), (-1, 1), {}),
        ((1, 2, 3), (-1, 2, 0), {}),
        ((1, 2), (-1, 5), {}),
        ((1, 2), (-1, 0), {"q": (None,)}),
        ((1, 2), (-1, 0), {"score": (1.0,)}),
    ],
)
def test_malformed(tokens: tuple[int, ...], parents: tuple[int, ...], more: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(DraftError):
        DraftTree(tokens, parents, **more)  # type: ignore[arg-type]
