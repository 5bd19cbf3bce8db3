"""What a draft tree costs: building it with its mask and positions, and a pass over it beside a pass over a chain.

    python benchmarks/trees.py TARGET [--rows 16] [--context 128] [--name NAME]

The mask and positions are the ones that the transformers target makes for a pass. The passes have as many rows each, alternate,
and are rolled back.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any, Callable

import torch
from common import median, save

from outrider.targets.attention import KVSlot, Segment
from outrider.targets.transformers import TransformersTarget
from outrider.tree import DraftTree


def random_tree(nodes: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents of a tree of `nodes` drafted nodes, some deep, some wide."""
    rng = random.Random(seed)
    parents = [-1, *(rng.randrange(max(0, i - 6), i) for i in range(1, nodes + 1))]
    return tuple(rng.randrange(1000) for _ in parents), tuple(parents)


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def building(nodes: int, repeats: int = 300) -> float:
    """Median seconds of making a tree, its positions and its mask."""
    slot, like = KVSlot(), torch.zeros(1)
    slot.length = 1000
    shapes = [random_tree(nodes, seed) for seed in range(repeats)]

    def one(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
        tree = DraftTree(tokens, parents)
        torch.tensor([[slot.length + depth for depth in tree.depths]])
        assert Segment(slot, tree, first=0).mask(None, like) is not None
        assert len(tree.children) == nodes + 1

    return median([seconds(lambda shape=shape: one(*shape)) for shape in shapes])  # type: ignore[misc]


def passes(target: TransformersTarget, rows: int, context: int, repeats: int) -> dict[str, float]:
    """Median seconds of a pass over `rows` rows, as a chain and as a tree."""
    slot = target.open()
    for _ in target.prefill(slot, [(7 * i) % 1000 + 3 for i in range(context)]):
        pass
    tokens, parents = random_tree(rows - 1, 1)
    works = {"chain": DraftTree.chain(tokens[0], tokens[1:]), "tree": DraftTree(tokens, parents)}
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 2):
        for name, tree in works.items() if turn % 2 else reversed(works.items()):
            times[name].append(seconds(lambda tree=tree: target.forward([(slot, DraftTree(tree.tokens, tree.parents))])))  # type: ignore[misc]
            target.commit(slot, [])
    target.close(slot)
    return {name: median(own[2:]) for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--name", default="trees")
    arguments = parser.parse_args()
    building(64, 50)
    built = building(64)
    print(f"a tree of 64 nodes with positions and mask: {1e3 * built:.3f} ms", flush=True)
    target = TransformersTarget.load(arguments.target, dtype=arguments.dtype)
    found = passes(target, arguments.rows, arguments.context, arguments.repeats)
    ratio = found["tree"] / found["chain"]
    print(f"{arguments.rows} rows: chain {1e3 * found['chain']:.1f} ms, tree {1e3 * found['tree']:.1f} ms, ratio {ratio:.3f}")
    result = {
        "target": arguments.target.rstrip("/").split("/")[-1],
        "dtype": arguments.dtype,
        "context": arguments.context,
        "rows": arguments.rows,
        "build_64_nodes_ms": 1e3 * built,
        "chain_ms": 1e3 * found["chain"],
        "tree_ms": 1e3 * found["tree"],
        "tree_over_chain": ratio,
    }
    save(arguments.name, result)


if __name__ == "__main__":
    main()
