"""How draft trees grow from logits: the shapes, their budgets, and what is decided before a token is drawn."""

from __future__ import annotations

import itertools
import random
from typing import Any, Iterator

import pytest
import torch

from outrider.drafters import make_options
from outrider.drafters.growth import ACCEPTANCE, Growth, TreeOptions
from outrider.errors import ParameterError
from outrider.sampling import Sampler, SamplingParams
from outrider.targets.table import TableTarget
from outrider.tree import Budget, DraftTree, check_shape, expected_tokens, fit_shape, optimal_shape

TABLE = TableTarget(vocab_size=9, seed=5, sharpness=1.5, order=3)
MEDUSA = "0 0.0 1 0.1 2 0.0.0 1.0 0.2 0.0.1"


def options(**values: Any) -> TreeOptions:
    return make_options(TreeOptions, values, "any")


def grow(options: TreeOptions, budget: Budget, rule: str = "rejection", least: float = 0.0, **params: Any) -> DraftTree:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 3, **params}), [1, 2], 9, rule=rule)
    growth = Growth(sampler, 2, budget, options, least)
    depth = 0
    while growth.frontier:
        assert all(len(path_of(growth, node)) == depth for node in growth.frontier), "the frontier is one level"
        growth.extend(torch.stack([TABLE.logits([1, 2, *path_of(growth, node)]) for node in growth.frontier]))
        depth += 1
    tree = growth.tree()
    assert len(tree) <= budget.nodes + 1 and tree.depth <= budget.depth
    for children in tree.children:
        assert len({tree.tokens[child] for child in children}) == len(children)
    return tree


def path_of(growth: Growth, node: int) -> list[int]:
    path = []
    while node:
        path.append(growth.tokens[node])
        node = growth.parents[node]
    return path[::-1]


def chance(path: tuple[int, ...]) -> float:
    """Of a path, under the drafter's own law."""
    total = 1.0
    for i, token in enumerate(path):
        total *= float(TABLE.logits([1, 2, *path[:i]]).softmax(dim=0)[token])
    return total


def likeliest(nodes: int, depth: int, least: float = 0.0) -> set[tuple[int, ...]]:
    every = [path for size in range(1, depth + 1) for path in itertools.product(range(9), repeat=size)]
    return {path for path in sorted(every, key=lambda path: -chance(path))[:nodes] if chance(path) >= least}


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tree.path_tokens(node) for node in range(1, len(tree))}


# ---- shapes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, {"temperature": 0.0}, {"rule": "coupled"}])
def test_chains(values: dict[str, Any]) -> None:
    for budget, given, length in ((Budget(5, 3), {}, 3), (Budget(2, 7), {}, 2), (Budget(7, 7), {"depth": 4}, 4)):
        tree = grow(options(**given), budget, **values)
        assert tree.is_chain and len(tree) == length + 1
        assert (tree.q is None) == bool(values)
        assert tree.score == pytest.approx(
            [1.0, *(chance(tree.path_tokens(i)) / chance(tree.path_tokens(i - 1)) for i in range(1, length + 1))]
        )


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 20])
def test_best_has_the_likeliest_nodes_of_all(nodes: int) -> None:
    for depth, least in ((1, 0.0), (2, 0.0), (3, 0.0), (3, 0.05)):
        tree = grow(options(shape="tree", growth="best", width=9, min_probability=least), Budget(nodes, depth))
        assert paths(tree) == likeliest(nodes, depth, least) and tree.q is None
        priced = grow(options(shape="tree", growth="best", width=9), Budget(nodes, depth, price=least))
        assert paths(priced) == paths(tree)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("nodes", [3, 8, 30])
def test_dynamic_is_eagle_2(width: int, nodes: int) -> None:
    """`width` children for each of `width` live nodes a level; then the likeliest of all candidates."""
    live: list[tuple[int, ...]] = [()]
    candidates: list[tuple[int, ...]] = []
    for _ in range(4):
        new = []
        for path in live:
            ranked = sorted(range(9), key=lambda token: -chance((*path, token)))
            new += [(*path, token) for token in ranked[:width]]
        candidates += new
        live = sorted(new, key=lambda path: -chance(path))[:width]
    wanted = set(sorted(candidates, key=lambda path: -chance(path))[:nodes])
    given = options(shape="tree", width=width)
    for values in ({}, {"temperature": 0.0}):
        assert paths(grow(given, Budget(nodes, 4), **values)) == wanted
    assert paths(grow(options(shape="tree", width=width, nodes=nodes, depth=4), Budget(64, 64))) == wanted


def test_a_fixed_shape_is_filled_by_rank() -> None:
    shape = tuple(tuple(map(int, path.split("."))) for path in MEDUSA.split())
    wanted = set()
    for ranks in shape:
        path: tuple[int, ...] = ()
        for rank in ranks:
            path = (*path, sorted(range(9), key=lambda token: -chance((*path, token)))[rank])
        wanted.add(path)
    given = options(shape="tree", growth="static", paths=MEDUSA)
    assert paths(grow(given, Budget(20, 20))) == wanted
    gaps = options(shape="tree", growth="static", paths="1 1.2")  # ranks may be left out
    assert {len(path) for path in paths(grow(gaps, Budget(20, 20)))} == {1, 2} and len(paths(grow(gaps, Budget(9, 9)))) == 2


def test_a_sampled_tree_has_its_shape_whatever_is_drawn() -> None:
    for seed in range(20):
        tree = grow(options(shape="tree", growth="sampled", paths=MEDUSA), Budget(20, 20), seed=seed)
        assert len(tree) == 10 and [len(children) for children in tree.children] == [3, 3, 1, 0, 2, 0, 0, 0, 0, 0]
        for node, children in enumerate(tree.children):
            assert (tree.law(node) is None) == (not children)
        small = grow(options(shape="tree", growth="sampled", paths=MEDUSA), Budget(4, 2), seed=seed)
        assert [len(children) for children in small.children] == [2, 2, 0, 0, 0]


@pytest.mark.parametrize("growth", ["dynamic", "best", "static", "sampled"])
@pytest.mark.parametrize("values", [{}, {"temperature": 0.0}, {"rule": "coupled"}, {"top_k": 2}])
def test_budgets(growth: str, values: dict[str, Any]) -> None:
    for nodes, depth in ((0, 0), (1, 1), (3, 1), (4, 9), (30, 3)):
        tree = grow(options(shape="tree", growth=growth), Budget(nodes, depth), **values)
        assert (len(tree) == 1) == (nodes == 0)
        assert (tree.q is None) == (growth != "sampled" or values not in ({}, {"top_k": 2}) or nodes == 0)


@pytest.mark.parametrize("shape", [{}, {"shape": "tree", "growth": "sampled"}])
@pytest.mark.parametrize("how", ["price", "min_probability", "least"])
def test_what_is_drawn_is_decided_before(shape: dict[str, Any], how: str) -> None:
    """Below a node whose likeliest child is too unlikely nothing is drawn; what was drawn elsewhere is kept, however unlikely."""
    unlikely = 0
    for seed in range(30):
        given = options(**shape, min_probability=0.12) if how == "min_probability" else options(**shape)
        tree = grow(given, Budget(9, 9, 0.12 if how == "price" else 0.0), least=0.12 if how == "least" else 0.0, seed=seed)
        for node, children in enumerate(tree.children):
            path = tree.path_tokens(node)
            best = max(chance((*path, token)) for token in range(9))
            assert not children or best >= 0.12
            unlikely += chance(path) < 0.12
            if not shape and tree.depth < 9:
                assert bool(children) == (best >= 0.12)
    assert unlikely > 3


def test_a_price_takes_the_place_of_the_default_and_a_step_ends_the_draft() -> None:
    """No level is begun below nodes that together are less likely than a step costs; what was drafted stays."""
    given = options(greedy=True)
    whole = grow(given, Budget(6, 6, price=1e-9), least=0.9)
    assert len(grow(given, Budget(6, 6), least=0.9)) < len(whole) == 7
    for step in (0.0, 0.02, 0.2, 0.9):
        reached = [level for level in range(1, 6) if chance(whole.path_tokens(level)) < step]
        assert grow(given, Budget(6, 6, price=1e-9, step=step)).depth == min(reached, default=6)
    bushy = options(shape="tree", growth="best", width=2)
    depths = [grow(bushy, Budget(6, 6, price=1e-9, step=step)).depth for step in (0.0, 0.2, 1.0)]
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[2] == 1


def test_logits_that_are_no_distribution_end_a_branch() -> None:
    for growth in ("dynamic", "best", "static", "sampled"):
        sampler = Sampler(SamplingParams(temperature=1.0), [1, 2], 9)
        growing = Growth(sampler, 2, Budget(9, 9), options(shape="tree", growth=growth))
        growing.extend(torch.zeros(1, 9))
        assert len(growing.frontier) > 1
        logits = torch.zeros(len(growing.frontier), 9)
        logits[0, 4] = float("nan")
        growing.extend(logits)
        assert not growing.tree().children[1] and growing.tree().depth == 2


# ---- static shapes ---------------------------------------------------------------------------------------------------------


def shapes(nodes: int, depth: int, width: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every shape of at most this size in which a rank has the lower ranks beside it."""

    def subtrees(nodes: int, depth: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        def children(rank: int, left: int) -> Iterator[tuple[tuple[int, ...], ...]]:
            yield ()
            if rank < width and left and depth:
                for below in subtrees(left - 1, depth - 1):
                    for others in children(rank + 1, left - 1 - len(below)):
                        yield ((rank,), *((rank, *path) for path in below), *others)

        yield from children(0, nodes)

    yield from subtrees(nodes, depth)


def test_the_optimal_shape_against_every_shape() -> None:
    rng = random.Random(2)
    for trial in range(12):
        acceptance = tuple(rng.random() for _ in range(3))
        acceptance = tuple(a / sum(acceptance) * 0.9 for a in (sorted(acceptance, reverse=True) if trial % 2 else acceptance))
        price = rng.choice((0.0, 0.0, 0.05, 0.2))
        for nodes, depth in ((1, 1), (4, 2), (6, 3), (6, 6)):
            best = max(expected_tokens(shape, acceptance) - price * len(shape) for shape in set(shapes(nodes, depth, 3)))
            found = optimal_shape(acceptance, nodes, depth, price)
            check_shape(found)
            assert len(found) <= nodes and all(len(path) <= depth for path in found)
            assert expected_tokens(found, acceptance) - price * len(found) == pytest.approx(best, abs=1e-12)


def test_expected_tokens() -> None:
    assert expected_tokens((), (0.5,)) == 1.0
    assert expected_tokens(((0,), (0, 0), (1,), (1, 5)), (0.5, 0.25)) == pytest.approx(1 + 0.5 + 0.25 + 0.25)


def test_fitting_keeps_whole_paths() -> None:
    rng = random.Random(1)
    every = [path for size in range(1, 6) for path in itertools.product(range(3), repeat=size)]
    for _ in range(50):
        nodes, depth = rng.randrange(1, 30), rng.randrange(1, 6)
        kept = fit_shape(every, nodes, depth)
        check_shape(kept)
        assert len(kept) <= nodes and all(len(path) <= depth for path in kept)
        assert all((*path[:-1], path[-1] - 1) in kept for path in kept if path[-1])
    assert sum(ACCEPTANCE) < 1


# ---- options ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"shape": "bush"}, "shape must be chain or tree"),
        ({"shape": "tree", "growth": "wild"}, "growth must be one of dynamic, best, static, sampled"),
        ({"growth": "best"}, "growth needs shape=tree"),
        ({"width": "3"}, "width needs shape=tree"),
        ({"shape": "tree", "growth": "static", "width": 3}, "width needs"),
        ({"shape": "tree", "paths": "0 1"}, "paths needs"),
        ({"shape": "tree", "acceptance": "0.5"}, "acceptance needs"),
        ({"shape": "tree", "width": 0}, "width must be"),
        ({"depth": 0}, "depth must be"),
        ({"nodes": True}, "nodes must be"),
        ({"shape": "tree", "greedy": True}, "greedy is for chains"),
        ({"min_probability": 1.0}, "min_probability must be"),
        ({"shape": "tree", "growth": "static", "paths": "0 1.0"}, "not its parent"),
        ({"shape": "tree", "growth": "static", "paths": "0 0"}, "twice"),
        ({"shape": "tree", "growth": "static", "paths": ((-1,),)}, "ranks from 0"),
        ({"shape": "tree", "growth": "static", "paths": "a"}, "option paths must be"),
        ({"shape": "tree", "growth": "sampled", "paths": "0 2"}, "lower ranks"),
        ({"shape": "tree", "growth": "static", "paths": "0", "acceptance": "0.5"}, "not both"),
        ({"shape": "tree", "growth": "static", "acceptance": "0.5 1.5"}, "acceptance must hold"),
        ({"shape": "tree", "growth": "static", "acceptance": ""}, "acceptance must hold"),
    ],
)
def test_bad_options(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ParameterError, match=match):
        options(**values)


def test_options_from_text() -> None:
    made = options(shape="tree", growth="sampled", acceptance="0.5, 0.25", depth="3")
    assert (made.acceptance, made.depth) == ((0.5, 0.25), 3)
    assert options(shape="tree", growth="static", paths="0 1 0.0 0.10").paths == ((0,), (1,), (0, 0), (0, 10))
