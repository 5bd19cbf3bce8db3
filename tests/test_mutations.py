"""Faults planted in the engine on purpose, and the check that catches each: the tests must be able to tell right from wrong.

A mutant is the shipped source with one place replaced, so it follows the code; where the place is gone, the test fails.
"""

from __future__ import annotations

import inspect
import itertools
import textwrap
from typing import Any, Callable, Iterator

import laws
import pytest
import torch
from laws import Broken, Case, Node, check_law

from outrider import accept, sampling
from outrider.sampling import Draws, Sampler, SamplingParams
from outrider.tree import DraftTree

Mutate = Callable[..., None]


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mutate]:
    """``mutate(owner, name, old, new, ...)`` replaces text in the source of a function for the time of a test."""

    def change(owner: Any, name: str, *edits: str) -> None:
        function = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in zip(edits[::2], edits[1::2], strict=True):
            assert source.count(old) == 1, f"{name} does not contain once: {old}"
            source = source.replace(old, new)
        space: dict[str, Any] = {}
        code = "from __future__ import annotations\n" + source
        exec(compile(code, f"<mutant of {name}>", "exec"), function.__globals__, space)
        monkeypatch.setattr(owner, name, space[name])

    yield change


def caught(check: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(Broken):
        check(*args, **kwargs)


def case(kind: str = "random", vocab: int = 4, seed: int = 2, **params: Any) -> Case:
    return Case(kind, vocab, SamplingParams(**{"temperature": 1.0, **params}), seed=seed)


def check_laws(rule: str, shape: tuple[int, ...], how: laws.How = laws.drawn, **params: Any) -> None:
    for seed in range(4):
        check_law(rule, case(seed=seed, **params), shape, how)


UNFILTERED = "self._processed({}, {}, {}).div(self.params.temperature).softmax(dim=-1)"
FILTERS = ({"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.5})


# ---- 1. a filter on q but not on p ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_filter_on_q_but_not_on_p(mutate: Mutate, rule: str, params: dict[str, Any]) -> None:
    faults = "return self._law(logits, paths, tree.depths)"
    check_laws(rule, (1, 1), **params)
    laws.check_processors(SamplingParams(temperature=1.0, **params))
    mutate(Sampler, "probabilities", faults, "return " + UNFILTERED.format("logits", "paths", "tree.depths"))
    caught(check_laws, rule, (1, 1), **params)
    caught(check_laws, rule, (1, 1), laws.chosen, **params)
    caught(laws.check_processors, SamplingParams(temperature=1.0, **params))


# ---- 2. the draft comes from the filtered q, the ratio uses the unfiltered one, or the other way round -------------------


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_ratio_with_unfiltered_q(mutate: Mutate, rule: str, params: dict[str, Any]) -> None:
    laws.check_draw(case(**params))
    other = UNFILTERED.format("rows", "paths", "[len(path) for path in paths]")
    mutate(Sampler, "draw", "Drawn(mine, q[i] if", f"Drawn(mine, {other}[i] if")
    caught(check_laws, rule, (1, 1), **params)
    caught(laws.check_draw, case(**params))


@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_draft_from_unfiltered_q(mutate: Mutate, rule: str) -> None:
    other = UNFILTERED.format("rows", "paths", "[len(path) for path in paths]")
    mutate(Sampler, "draw", "in zip(q, paths, counts)", f"in zip({other}, paths, counts)")
    caught(laws.check_draw, case(top_k=2))
    if rule == "block":  # under rejection a token with q = 0 is as good as none, and given the others the draft follows q
        caught(check_laws, rule, (1, 1), top_k=2)


@pytest.mark.parametrize("k", (2, 3))
def test_siblings_from_another_law(mutate: Mutate, k: int) -> None:
    torch.manual_seed(1)
    laws.check_draw(case(), k)
    mutate(Sampler, "_drawn", "without_replacement(q, ", "without_replacement(q.sqrt(), ")
    caught(laws.check_draw, case(), k)
    caught(laws.check_many_draws, k)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x = max(x + end - start, end) if x >= start else x", "pass"),
        ("left = max(left - (end - start), 0.0)", "pass"),
        ("uniform() * left", "uniform() * total"),
    ],
)
def test_siblings_as_if_nothing_was_taken(mutate: Mutate, old: str, new: str) -> None:
    mutate(sampling, "without_replacement", old, new)
    caught(laws.check_draw, case(), 2)


# ---- 3. the residual replaced by p ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ((1,), (1, 1), (2,), (2, 1)))
def test_residual_replaced_by_p_when_drawn(mutate: Mutate, shape: tuple[int, ...]) -> None:
    check_law("rejection", case(), shape)
    mutate(accept, "_try_drawn", "(p - q).clamp(min=0)", "p.clone()")
    caught(check_law, "rejection", case(), shape)


@pytest.mark.parametrize("shape", ((1,), (1, 1), (2,), (2, 1)))
def test_residual_replaced_by_p_when_chosen(mutate: Mutate, shape: tuple[int, ...]) -> None:
    check_law("rejection", case(), shape, laws.chosen)
    mutate(accept, "_try_chosen", "p.index_fill(0, torch.tensor(refused, device=p.device), 0.0)", "p")
    caught(check_law, "rejection", case(), shape, laws.chosen)


@pytest.mark.parametrize("how", (laws.drawn, laws.chosen))
def test_residual_replaced_by_p_under_block(mutate: Mutate, how: laws.How) -> None:
    check_law("block", case(), (1, 1), how)
    mutate(accept, "block", "residual if r[kept] > 0 else p[kept]", "p[kept]")
    caught(check_law, "block", case(), (1, 1), how)


# ---- 4. temperature 0 compared as a softmax ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_temperature_zero_as_softmax(mutate: Mutate, rule: str) -> None:
    check_law(rule, case(temperature=0.0), (1, 1))
    laws.check_processors(SamplingParams(temperature=0.0))
    mutate(Sampler, "_law", "return torch.zeros_like(x).scatter_(1, token[:, None], 1.0)", "return x.softmax(dim=-1)")
    caught(check_law, rule, case(temperature=0.0), (1, 1))
    caught(laws.check_processors, SamplingParams(temperature=0.0))


# ---- 5. u = 0.0 accepts a token of probability 0 -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_u_zero_accepts_probability_zero(mutate: Mutate, rule: str) -> None:
    laws.check_zero_uniform(rule)
    mutate(Draws, "bernoulli", "[-1] < p", "[-1] <= p")
    caught(laws.check_zero_uniform, rule)


@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_u_zero_draws_probability_zero(mutate: Mutate, rule: str) -> None:
    mutate(
        sampling,
        "without_replacement",
        "float(cumulative[-1]), right=True",
        "float(cumulative[-1]), right=False",
    )
    caught(laws.check_zero_uniform, rule)


# ---- 6. a low-confidence draft dropped after it was drawn ----------------------------------------------------------------


def without_unlikely(root: Node) -> Node:
    q, children = root
    kept = [(t, without_unlikely(node)) for t, node in children if q is None or float(q[t]) >= 0.3]
    return q, tuple(kept)


def stopped_after_unlikely(root: Node) -> Node:
    q, children = root
    return q, tuple((t, (None, ()) if float(q[t]) < 0.3 else stopped_after_unlikely(node)) for t, node in children)


@pytest.mark.parametrize(
    ("rule", "shape"),
    [(rule, (1,) * g) for rule in ("rejection", "block", "traversal") for g in (1, 2)]
    + [("rejection", (2,)), ("traversal", (2,)), ("traversal", (2, 1))],
)
def test_unlikely_draft_dropped(rule: str, shape: tuple[int, ...]) -> None:
    caught(check_law, rule, case(), shape, alter=without_unlikely)
    check_law(rule, case(), shape, alter=stopped_after_unlikely)  # keeping the token and stopping below it is exact


# ---- 7. siblings sorted after they were drawn ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "shape"), [("rejection", s) for s in ((2,), (3,), (2, 1), (1, 2))] + [("traversal", s) for s in ((2,), (2, 1))]
)
def test_siblings_sorted(rule: str, shape: tuple[int, ...]) -> None:
    def by_probability(root: Node) -> Node:
        q, children = root
        order = sorted(children, key=lambda child: -float(q[child[0]])) if q is not None else children
        return q, tuple((t, by_probability(node)) for t, node in order)

    check_law(rule, case(), shape)
    caught(check_law, rule, case(), shape, alter=by_probability)


# ---- 7a. a drawn tree that is pruned after it was drawn -------------------------------------------------------------------


def pruned(root: Node, nodes: int = 3) -> Node:
    """The likeliest nodes under q alone, as a rerank would keep them."""

    def ranked(node: Node, likely: float) -> Iterator[float]:
        for token, below in node[1]:
            yield likely * float(node[0][token])
            yield from ranked(below, likely * float(node[0][token]))

    least = sorted(ranked(root, 1.0), reverse=True)[nodes - 1]

    def cut(node: Node, likely: float) -> Node:
        q, children = node
        kept = [(t, cut(below, likely * float(q[t]))) for t, below in children if likely * float(q[t]) >= least]
        return (q if kept else None), tuple(kept)

    return cut(root, 1.0)


@pytest.mark.parametrize("rule", ("rejection", "traversal"))
def test_a_drawn_tree_pruned(rule: str) -> None:
    check_law(rule, case(), (2, 1))
    caught(check_law, rule, case(), (2, 1), alter=pruned)
    caught(check_law, rule, case(), (2, 2), alter=pruned)


# ---- 7b. keep the longest match ----------------------------------------------------------------------------------------


def longest_match(tree: DraftTree, p: torch.Tensor, draws: Any) -> accept.Decision:
    """Each path of the tree is tested by itself, and the longest that is kept wins."""
    best = accept.Decision((0,), -1)
    leaves = [node for node in range(len(tree)) if not tree.children[node]]
    for leaf in leaves:
        path, kept, residual = tree.path(leaf), (0,), p[0]
        for above, node in itertools.pairwise(path):
            token, q = tree.tokens[node], tree.law(above)
            if not draws.bernoulli(min(1.0, float(p[above, token] / q[token]))):
                residual = (p[above] - q).clamp(min=0)
                break
            kept, residual = (*kept, node), p[node]
        if best.next == -1 or len(kept) > len(best.path):
            best, law = accept.Decision(kept, 0), residual
    return accept.Decision(best.path, draws.categorical(law))


def test_keep_the_longest_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "traversal", longest_match)
    check_law("traversal", case(), (1, 1))  # on one path it is rejection
    caught(check_law, "traversal", case(), (2,))
    caught(check_law, "traversal", case(), (2, 1))


# ---- 8. one stream shared by draft and acceptance ------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_draft_and_acceptance_use_the_same_numbers(mutate: Mutate, rule: str) -> None:
    mutate(Sampler, "__init__", "Stream(self.seed, choice, 1)", "Stream(self.seed, choice, 0)")
    caught(laws.check_grid_law, rule, (0.25, 0.5, 0.25), (0.5, 0.25, 0.25))
    caught(laws.check_streams)


@pytest.mark.parametrize("name", (1, 2))
def test_one_generator_for_two_streams(mutate: Mutate, name: int) -> None:
    mutate(Sampler, "__init__", f"Stream(self.seed, choice, {name})", "self.draft_stream")
    caught(laws.check_streams)


def test_acceptance_and_residual_use_the_same_numbers(mutate: Mutate) -> None:
    mutate(Sampler, "__init__", "Stream(self.seed, choice, 2)", "Stream(self.seed, choice, 1)")
    caught(laws.check_grid_law, "rejection", (0.25, 0.25, 0.5), (1.0, 0.0, 0.0))
    caught(laws.check_streams)


def test_streams_forget_the_choice(mutate: Mutate) -> None:
    mutate(sampling.Stream, "__init__", "32, choice, name)", "32, 0, name)")
    caught(laws.check_streams)


# ---- 9. position-keyed noise ---------------------------------------------------------------------------------------------


def test_position_keyed_noise(mutate: Mutate) -> None:
    keyed = "lambda: self.draft_stream.keyed(self.position + 1 + depth)"
    mutate(Sampler, "_drawn", "self.draft_stream.uniform", keyed)
    caught(laws.check_rounds, "block")
    laws.check_rounds("rejection")  # there a refusal depends on earlier tokens alone, so keyed drafts do no harm


# ---- more ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "old", "new", "shape", "how"),
    [
        ("_try_drawn", "p = residual / mass", "p = residual", (2,), laws.drawn),
        ("_try_drawn", "q = q / mass", "pass", (2,), laws.drawn),
        ("_try_drawn", "q.index_fill(0, torch.tensor([token]), 0.0)", "q", (2,), laws.drawn),
        ("_try_drawn", "float(p[token]) / drawn_with", "float(p[token])", (1,), laws.drawn),
        ("_try_chosen", "at_token[child] / left", "at_token[child]", (2,), laws.chosen),
        ("_try_chosen", "0.0 if token in refused else", "", (1,), laws.double),
        ("at_tokens", "tree.parents[1:]", "range(1, len(tree))", (1, 1), laws.chosen),
        ("block", "min(1.0, w[-1] * ratio)", "w[-1] * ratio", (1, 1), laws.drawn),
        ("block", "min(1.0, w[-1] * ratio)", "min(1.0, ratio)", (1, 1), laws.drawn),
        ("block", "r[kept] + 1 - w[kept]", "1.0", (1, 1), laws.drawn),
        ("block", "range(length, 0, -1)", "range(1, length + 1)", (1, 1), laws.drawn),
        ("_block_residual", "(w * p - q", "(p - q", (1, 1), laws.drawn),
        ("_Visit.refuse", "mass / (mass + (1 - self.weight))", "min(1.0, mass)", (2, 1), laws.drawn),
        ("_Visit.refuse", "mass / (mass + (1 - self.weight))", "min(1.0, mass)", (1, 2), laws.drawn),
        ("_Visit.refuse", "self.weight = mass / (mass + (1 - self.weight))", "pass", (1, 1), laws.drawn),
        ("_Visit.refuse", "self.p = residual / mass", "pass", (2,), laws.drawn),
        ("_Visit.refuse", "self.q.index_fill(0, torch.tensor([token]), 0.0)", "self.q", (2,), laws.drawn),
        ("_Visit.refuse", "self.q = self.q / total", "pass", (2, 1), laws.drawn),
        (
            "_Visit.descend",
            "min(1.0, self.weight * float(self.p[token]) / drawn_with)",
            "min(1.0, float(self.p[token]) / drawn_with)",
            (1, 1),
            laws.drawn,
        ),
        (
            "_Visit.descend",
            "min(1.0, self.weight * float(self.p[token]) / drawn_with)",
            "self.weight * float(self.p[token]) / drawn_with",
            (1, 1),
            laws.drawn,
        ),
        ("_Visit.descend", "float(self.p[token]) / drawn_with", "float(p[self.node][token]) / drawn_with", (2,), laws.drawn),
        ("_block_residual", ".index_fill(0, torch.tensor([token], device=p.device), 0.0)", "", (1, 1), laws.chosen),
    ],
)
def test_faults_in_a_rule(mutate: Mutate, name: str, old: str, new: str, shape: tuple[int, ...], how: laws.How) -> None:
    rule = "block" if "block" in name else "traversal" if "_Visit" in name else "rejection"
    check_laws(rule, shape, how)
    owner = accept._Visit if "." in name else accept
    mutate(owner, name.split(".")[-1], old, new)
    caught(check_laws, rule, shape, how)


@pytest.mark.parametrize(
    ("name", "old", "new", "params"),
    [
        ("_penalise", "Counter(path).items()", "Counter(path[-1:]).items()", {"frequency_penalty": 1.0}),
        ("_penalise", "for row, path in enumerate(paths)", "for row, path in ()", {"repetition_penalty": 1.5}),
        ("_penalise", "self._prompt | ", "", {"repetition_penalty": 1.5}),
        ("_penalty", "raw > 0", "raw < 0", {"repetition_penalty": 1.5}),
        ("_penalty", "(times > 0)", "times", {"presence_penalty": 1.0}),
        ("_processed", "self.emitted + depth", "self.emitted", {"min_tokens": 3}),
        ("_processed", "x[:, ids] +=", "x[:1, ids] +=", {"logit_bias": {2: 3.0}}),
        ("_filtered", "if params.min_p > 0", "if 0", {"min_p": 0.3}),
        ("_filtered", "params.top_k, device", "params.top_k + 1, device", {"top_k": 3}),
        ("probabilities", "tree.path_tokens(i)", "()", {"presence_penalty": 1.0}),
        ("commit", "self.emitted += len(tokens)", "self.emitted += 0", {"min_tokens": 4}),
        ("_softmax", "(x - best[:, None]) / temperature", "x - best[:, None]", {"temperature": 0.5}),
    ],
)
def test_faults_in_the_processors(mutate: Mutate, name: str, old: str, new: str, params: dict[str, Any]) -> None:
    def every() -> None:
        for seed in range(4):
            laws.check_processors(SamplingParams(**{"temperature": 1.0, **params}), seed)

    every()
    mutate(Sampler, name, old, new)
    caught(every)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cumulative < top_p).sum(dim=-1) + 1", "cumulative < top_p).sum(dim=-1).clamp(min=1)"),
        ("p = x.softmax", "p = (x * 2).softmax"),
    ],
)
def test_faults_in_top_p(mutate: Mutate, old: str, new: str) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.6)
    laws.check_processors(params)
    mutate(sampling, "_nucleus", old, new)
    caught(laws.check_processors, params)


def test_ties_to_the_highest_id(mutate: Mutate) -> None:
    params = SamplingParams(temperature=1.0, top_k=3)
    mutate(sampling, "_largest", "equal.cumsum(dim=-1) <= room", "equal.flip(-1).cumsum(dim=-1).flip(-1) <= room")
    caught(lambda: [laws.check_processors(params, seed) for seed in range(6)])
