"""Every drafter of the table, in every shape, under every kind of decoding, on the table target.

Where equality is promised the output equals plain decoding. Where drafts are drawn, `Watched` checks the contract that makes
the accept rules exact: what carries a q was drawn through the Sampler, with that very q, and nothing that was drawn is left out.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, Sequence

import dflashes
import eagles
import published
import pytest
import torch
from toys import plain, run

from outrider.drafters import TABLE, Drafter, load_drafter
from outrider.drafters.base import Ask, Work
from outrider.drafters.growth import GROWTHS, TreeOptions
from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.sampling import Sampler, SamplingParams
from outrider.targets.base import Output
from outrider.targets.table import TableTarget
from outrider.tree import Budget, DraftTree

TARGET: dict[str, Any] = {"vocab_size": 10, "seed": 11, "order": 2, "sharpness": 2.5, "context_length": 200}
PROMPTS = [[1, 2, 3, 4, 5] * 4 + [1, 2], [7, 8, 9, 7, 8, 9, 7], [5]]
EXPECTED = "bcdefghij" * 4


def shapes(name: str) -> Iterator[str]:
    """The shapes of a drafter; for one that grows its trees by `Growth`, every way to, or for heads one with chance and one without."""
    for shape in TABLE[name].shapes:
        grown = shape == "tree" and issubclass(TABLE[name].load().Options, TreeOptions)
        yield from (GROWTHS if name == "model" else ("dynamic", "sampled")) if grown else [shape]


OF_TRANSFORMERS = ("mtp",)
"""Built from a layer of the target's family, which this target has not; their own tests run them on one that has."""
NAMES = [(name, shape) for name in TABLE if name not in OF_TRANSFORMERS for shape in shapes(name)]
everyone = pytest.mark.parametrize(("name", "shape"), NAMES, ids=[f"{name}-{shape}" for name, shape in NAMES])


def target() -> TableTarget:
    return TableTarget(**TARGET)


def make(name: str, shape: str, t: TableTarget, **options: Any) -> tuple[Drafter, dict[str, Any]]:
    """The drafter, and the sampling parameters that it needs."""
    entry = TABLE[name]
    cls = entry.load()
    if shape in GROWTHS:
        options |= {"shape": "tree", "growth": shape}
    elif "tree" in entry.shapes:
        options["shape"] = shape
    extra = {"prediction": EXPECTED} if cls.takes_prediction else {}
    if name == "model":
        return ModelDrafter(TableTarget(**TARGET, noise=0.8), ModelOptions(**options)), extra
    if name == "replay":
        options |= {"script": (1, 2, 3, 4, 5) * 30, "wrong_at": 2}
    if cls.takes_model and name != "auto":  # which can do without
        options["model"] = heads_folder(name)
    if name == "eagle":
        options["layers"] = (0, 1, 2)
    if name == "early-exit":
        options["upto"] = 1
    return load_drafter(name, t, options), extra


@functools.cache
def heads_folder(name: str) -> str:
    """Random heads for the target."""
    folder = tempfile.mkdtemp(prefix="outrider-heads-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if name == "eagle":
        return eagles.write(Path(folder), "safeailab", *eagles.make("safeailab", target().hidden_size, 10, heads=2, scale=1.0))
    if name == "dflash":
        made = dflashes.make(target().hidden_size, heads=2, scale=1.0)
        return dflashes.write(Path(folder), *dflashes.in_dialect("speculators", *made, draft=range(10)))
    module = published.make(name, target(), heads=4, spread=2.0)
    return published.write(Path(folder), name, published.config_of(name, 4), published.tensors_of(name, module))


def free_memory(drafter: Drafter) -> None:
    assert getattr(getattr(drafter, "model", None), "open_slots", 0) == 0, "the drafter left a slot open"


GREEDY = [
    {"max_tokens": 40},
    {"max_tokens": 25, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 1},
    {"max_tokens": 30, "frequency_penalty": -0.6, "logit_bias": {3: 1.0}, "min_tokens": 9},
]
SAMPLED = [
    {"max_tokens": 30, "temperature": 1.0},
    {"max_tokens": 20, "temperature": 0.7, "top_k": 4, "min_p": 0.05, "frequency_penalty": 0.4, "min_tokens": 5},
    {"max_tokens": 25, "temperature": 1.5, "top_p": 0.8, "repetition_penalty": 1.3},
]


@everyone
@pytest.mark.parametrize("values", GREEDY)
def test_greedy_equals_plain(name: str, shape: str, values: dict[str, Any]) -> None:
    t = target()
    for rule in ("rejection", "coupled", "block", "traversal"):
        drafter, extra = make(name, shape, t)
        if rule == "block" and drafter.drafts_trees:
            continue
        params = SamplingParams(**values, **extra)
        found, rounds = run(t, drafter, PROMPTS, params, rule, 5)
        assert found == plain(t, PROMPTS, params, rule), rule
        proposed = sum(r.proposed for own in rounds for r in own)
        assert (proposed == 0) == (name == "none"), "a test of a drafter that drafts nothing shows nothing"
        free_memory(drafter)


@everyone
@pytest.mark.parametrize("values", SAMPLED)
def test_coupled_equals_plain(name: str, shape: str, values: dict[str, Any]) -> None:
    t = target()
    for seed in range(5 if name == "model" or not TABLE[name].load().takes_model else 2):
        drafter, extra = make(name, shape, t)
        params = SamplingParams(**values, **extra, seed=seed)
        wanted = plain(t, PROMPTS, params, "coupled")
        found, _ = run(t, drafter, PROMPTS, params, "coupled", 5)
        assert found == wanted, "the batch"
        for number, prompt in enumerate(PROMPTS):
            solo, _ = run(t, drafter, [prompt], params, "coupled", 5)
            assert solo == wanted[number : number + 1], "alone"
        free_memory(drafter)


# ---- the contract of drawn drafts --------------------------------------------------------------------------------------


class ContractError(AssertionError):
    """The drafter does what could bias the output."""


class Watched(Drafter):
    """Passes everything on to another drafter and checks what it draws and what it returns."""

    name = "watched"

    def __init__(self, inner: Drafter):
        super().__init__()
        self.inner = inner
        self.layers = inner.layers
        self.context_length = inner.context_length
        self.drawn: dict[int, list[tuple[tuple[int, ...], list[int], torch.Tensor | None]]] = {}
        self.laws = 0

    def open(self, sampler: Sampler) -> Any:
        draws = self.drawn[id(sampler)] = []
        original = sampler.draw

        def draw(logits: torch.Tensor, paths: Sequence[Sequence[int]], k: Any = 1, *how: Any) -> Any:
            drawn = original(logits, paths, k, *how)
            draws.extend((tuple(path), tokens, q) for path, (tokens, q, _) in zip(paths, drawn))
            return drawn

        sampler.draw = draw  # type: ignore[method-assign]
        return self.inner.open(sampler)

    def propose(self, work: Work) -> list[DraftTree]:
        for ask in work:
            self.drawn[id(ask.state.sampler)].clear()
        trees = self.inner.propose(work)
        if len(trees) != len(work):
            raise ContractError("one tree for each sequence")
        for (state, tokens, budget, _), tree in zip(work, trees):
            self.check(tree, tokens, budget, self.drawn[id(state.sampler)])
        return trees

    def observe(self, work: Sequence[tuple[Any, Sequence[int], Output, Sequence[int]]]) -> None:
        self.inner.observe(work)

    def check(self, tree: DraftTree, tokens: Sequence[int], budget: Budget, draws: list) -> None:
        if tree.tokens[0] != tokens[-1]:
            raise ContractError("node 0 is not the anchor")
        if len(tree) - 1 > budget.nodes or tree.depth > budget.depth:
            raise ContractError("beyond the budget")
        under_a_law = {}
        for node, children in enumerate(tree.children):
            law = tree.law(node)
            if law is None:
                continue
            self.laws += 1
            path = tree.path_tokens(node)
            source = next((entry for entry in draws if entry[2] is law), None)
            if source is None:
                raise ContractError(f"the q of node {node} does not come from Sampler.draw")
            if source[0] != path:
                raise ContractError(f"the q of node {node} was drawn for another path")
            if [tree.tokens[child] for child in children] != source[1]:
                raise ContractError(f"the children of node {node} are not the tokens that were drawn, in drawing order")
            under_a_law[id(law)] = True
        for path, drawn, law in draws:
            if law is not None and drawn and id(law) not in under_a_law:
                raise ContractError(f"{drawn} was drawn after {path}, but left out")


def supports(t: TableTarget, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, rule: str) -> Iterator[bool]:
    """Whether each of the emitted tokens is possible, computed one token at a time."""
    sampler = Sampler(params, prompt, t.vocab_size, t.eos, rule)
    text = list(prompt)
    for token in tokens:
        p = sampler.probabilities(t.logits(text)[None], DraftTree.chain(text[-1]))
        yield bool(p[0, token] > 0)
        sampler.commit([token])
        text.append(token)


@everyone
@pytest.mark.parametrize("rule", ["rejection", "block", "traversal", "coupled"])
@pytest.mark.parametrize("values", SAMPLED)
def test_drawn_drafts_keep_the_contract(name: str, shape: str, rule: str, values: dict[str, Any]) -> None:
    t = target()
    for draft in (1, 3, 8):
        drafter, extra = make(name, shape, t)
        if rule == "block" and drafter.drafts_trees:
            return
        watched = Watched(drafter)
        params = SamplingParams(**values, **extra, seed=draft)
        found, rounds = run(t, watched, PROMPTS, params, rule, draft)
        for prompt, outcome in zip(PROMPTS, found):
            assert all(supports(t, prompt, outcome.tokens, params, rule)), "a token with probability 0 was emitted"
        for own in rounds:
            for r in own:
                assert all(r.p[node] > 0 for node in r.path), "a token with probability 0 was kept"
        if drafter.takes_model and name != "auto":
            assert (watched.laws > 0) == (rule != "coupled" and drafter.options.draws)
        free_memory(drafter)


class Bad(ModelDrafter):
    """A model drafter that breaks the contract in one way."""

    def __init__(self, way: str):
        super().__init__(TableTarget(**TARGET, noise=0.8))
        self.way = way

    def propose(self, work: Work) -> list[DraftTree]:
        return [self.spoil(tree) for tree in super().propose(work)]

    def spoil(self, tree: DraftTree) -> DraftTree:
        if tree.q is None or len(tree) < 3:
            return tree
        if self.way == "a q of its own":
            return replace(tree, q=tuple(None if q is None else (q * 1.0) for q in tree.q))
        if self.way == "another q":
            first, second, *rest = tree.q
            return replace(tree, q=(second, first, *rest))
        if self.way == "another token":
            return replace(tree, tokens=(*tree.tokens[:-1], (tree.tokens[-1] + 1) % 10))
        if self.way == "left out":
            return replace(tree, tokens=tree.tokens[:-1], parents=tree.parents[:-1], q=(*tree.q[:-2], None), score=None)
        if self.way == "as if chosen":
            return replace(tree, q=None)
        if self.way == "another anchor":
            return replace(tree, tokens=((tree.tokens[0] + 1) % 10, *tree.tokens[1:]))
        assert self.way == "too much"
        return DraftTree((*tree.tokens, 1), (*tree.parents, 0), (*tree.q, None))


WAYS = {
    "a q of its own": "does not come from",
    "another q": "another path",
    "another token": "not the tokens that were drawn",
    "left out": "left out",
    "as if chosen": "left out",
    "another anchor": "anchor",
    "too much": "budget",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_bad_drafter_is_caught(way: str, rule: str) -> None:
    t = target()
    with pytest.raises(ContractError, match=WAYS[way]):
        run(t, Watched(Bad(way)), PROMPTS, SamplingParams(temperature=1.0), rule, 4)
    assert t.open_slots == 0


# ---- states ------------------------------------------------------------------------------------------------------------


def sampler(values: dict[str, Any], prompt: Sequence[int], t: TableTarget, emitted: Sequence[int] = ()) -> Sampler:
    made = Sampler(SamplingParams(**values), prompt, t.vocab_size, t.eos, "coupled", tokenizer=t.tokenizer)
    made.commit(emitted)
    return made


@everyone
@pytest.mark.parametrize("kept", [0, 1, 9, 17, 22])
def test_truncate_and_fork(name: str, shape: str, kept: int) -> None:
    """A state that was cut back, or forked, goes on like a new one."""
    t = target()
    drafter, extra = make(name, shape, t)
    values = {"temperature": 1.0, "seed": 4, **extra}
    budget = Budget(6, 6)
    first, then = PROMPTS[0], [*PROMPTS[0][:kept], 8, 7, 1, 2, 3, 4, 5, 1, 2]

    state = drafter.open(sampler(values, first, t))
    drafter.propose([Ask(state, first, budget)])
    state.truncate(kept)
    state.sampler = sampler(values, then, t)
    fresh = drafter.open(sampler(values, then, t))
    a, b = drafter.propose([Ask(state, then, budget), Ask(fresh, then, budget)])
    assert (a.tokens, a.parents) == (b.tokens, b.parents)

    for longer in (then, [*then, 3], [*then, 3, 4, 5]):
        fork = state.fork(sampler(values, longer, t))
        other = drafter.open(sampler(values, longer, t))
        a, b = drafter.propose([Ask(fork, longer, budget), Ask(other, longer, budget)])
        assert (a.tokens, a.parents) == (b.tokens, b.parents)
        fork.close()
        other.close()
    again = [*then, 3, 4]  # the forks left the first one alone
    state.sampler = sampler(values, again, t)
    other = drafter.open(sampler(values, again, t))
    a, b = drafter.propose([Ask(state, again, budget), Ask(other, again, budget)])
    assert (a.tokens, a.parents) == (b.tokens, b.parents)
    for each in (state, fresh, other, state):
        each.close()
    free_memory(drafter)


@everyone
def test_off_for_a_while(name: str, shape: str) -> None:
    """A drafter that was not asked for several rounds comes back, and the output is plain decoding's."""

    from outrider.decode import Pace, decode
    from outrider.decode import Sequence as Decoded

    class Now(Pace):
        calls = 0

        def budgets(self, sequences: Sequence[Any]) -> list[Budget]:
            self.calls += 1
            on = self.calls % 5 in (0, 1)
            return [Budget(4, 4) if on != (s.number == 1) else Budget(0, 0) for s in sequences]

    t = target()
    drafter, extra = make(name, shape, t)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=9, ignore_eos=True, **extra)
    sequences = [Decoded(t, prompt, params, "coupled", 0, i) for i, prompt in enumerate(PROMPTS)]
    proposed = sum(r.proposed for r in decode(t, drafter, sequences, Now()))
    assert [tuple(s.output) for s in sequences] == [o.tokens for o in plain(t, PROMPTS, params, "coupled")]
    assert (proposed > 0) == (name != "none")
    assert t.open_slots == 0
    free_memory(drafter)
