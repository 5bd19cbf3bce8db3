"""The shipped accept rules have exactly the target's law, over every draft and every decision, to 1e-9."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import laws
import pytest
import torch
from laws import KINDS, Case, check_law

from outrider import accept, sampling
from outrider.sampling import Sampler, SamplingParams, exponential_noise
from outrider.tree import DraftTree

RULES = ("rejection", "block", "traversal")
FOR_TREES = ("rejection", "traversal")
HOW = {f.__name__: f for f in (laws.drawn, laws.chosen, laws.mixed, laws.mixed_other)}
PARAMS = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 1.9},
    "top_k": {"temperature": 1.0, "top_k": 2},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.45},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.7},
    "presence": {"temperature": 1.0, "presence_penalty": 1.1},
    "frequency": {"temperature": 1.0, "frequency_penalty": -0.9},
    "bias": {"temperature": 1.0, "logit_bias": {0: 1.5, 2: -100.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 2},
    "all": {
        "temperature": 0.8,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {1: 0.7},
        "min_tokens": 1,
    },
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_chains(rule: str, kind: str, how: str) -> None:
    for vocab, lengths in ((3, (0, 1, 2, 3)), (4, (3,)), (5, (1, 2))):
        for length in lengths:
            check_law(rule, Case(kind, vocab), (1,) * length, HOW[how])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", FOR_TREES)
def test_trees(rule: str, kind: str, how: str) -> None:
    for vocab, shapes in (
        (3, ((2,), (3,), (1, 2), (2, 1), (3, 1), (2, 2))),
        (4, ((2,), (3,), (2, 1))),
        (5, ((1,), (2,), (3,))),
    ):
        for shape in shapes:
            check_law(rule, Case(kind, vocab, seed=1), shape, HOW[how])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rule", FOR_TREES)
def test_large_trees(rule: str, how: str) -> None:
    check_law(rule, Case("random", 3), (3, 2), HOW[how])
    check_law(rule, Case("zeros in p", 3), (1, 2, 1), HOW[how])
    check_law(rule, Case("zeros in q", 4), (2, 2), HOW[how])
    check_law(rule, Case("ties", 5), (2, 1), HOW[how])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", FOR_TREES)
def test_chosen_trees_of_three_levels(rule: str, kind: str) -> None:
    for shape in ((3, 3, 3), (2, 3, 2), (1, 3, 1)):
        check_law(rule, Case(kind, 4, seed=3), shape, laws.chosen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", FOR_TREES)
def test_trees_whose_growth_looks_at_everything(rule: str, kind: str) -> None:
    """Exact as long as nothing drawn is left out: how many children a node gets may depend on its cousins, on later siblings
    of its ancestors, and on what was drawn below its own earlier siblings. Up to three children, three levels.
    """
    for vocab, nodes, seed in ((4, 4, 0), (3, 5, 1), (3, 5, 2)):
        policy = laws.whimsical(seed, nodes, 3, 3)
        case = Case(kind, vocab, seed=seed)
        laws.check_law_of(rule, case, laws.grown(case, policy), 4)


def test_a_drawn_tree_of_three_levels() -> None:
    """Three children below the anchor, three and two below two of these, one below each of the first's: all of vocabulary 3."""
    wanted = {(): 3, (0,): 3, (1,): 2, (0, 0): 1, (0, 1): 1}

    def policy(tokens: tuple[int, ...], parents: tuple[int, ...]) -> int | None:
        tree = DraftTree(tokens, parents)
        ranks: list[tuple[int, ...]] = [()]
        for node in range(1, len(tree)):
            ranks.append((*ranks[parents[node]], tree.children[parents[node]].index(node)))
        return next((i for i, path in enumerate(ranks) if len(tree.children[i]) < wanted.get(path, 0)), None)

    for rule in FOR_TREES:
        case = Case("random", 3, seed=5)
        laws.check_law_of(rule, case, laws.grown(case, policy), 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", FOR_TREES)
def test_a_sibling_twice(rule: str, kind: str) -> None:
    for shape in ((1,), (2,), (3,), (2, 2)):
        check_law(rule, Case(kind, 3), shape, laws.double)


@pytest.mark.parametrize("how", (laws.drawn, laws.mixed, laws.mixed_other))
def test_traversal_is_block_on_a_chain(how: laws.How) -> None:
    for seed, length in itertools.product(range(8), (1, 2, 3)):
        case = Case(KINDS[seed], 3, seed=seed)
        drafts = list(laws.drafts_of("block", case, (1,) * length, how))
        found, kept = laws.rule_law("traversal", case, drafts)
        wanted, most = laws.rule_law("block", case, drafts)
        assert abs(kept - most) < 1e-12
        assert all(abs(found.get(x, 0.0) - wanted.get(x, 0.0)) < 1e-12 for x in found.keys() | wanted.keys())


def test_traversal_is_matching_where_nothing_is_drawn() -> None:
    """A path of chosen tokens is kept with p of it: no rule can keep more."""
    for kind in KINDS:
        case = Case(kind, 4, seed=6)
        ((_, tree),) = drafts = list(laws.drafts_of("traversal", case, (2, 3, 2), laws.chosen))
        wanted = 0.0
        for node in range(1, len(tree)):
            path = tree.path_tokens(node)
            wanted += math.prod(case.law(path[:i])[token] for i, token in enumerate(path))
        for rule in FOR_TREES:
            assert laws.rule_law(rule, case, drafts)[1] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("rule", RULES)
def test_processors_on_both_sides(rule: str, params: str) -> None:
    given = SamplingParams(**PARAMS[params])
    for how, (kind, vocab) in itertools.product((laws.drawn, laws.chosen, laws.mixed), (("random", 4), ("ties", 3))):
        case = Case(kind, vocab, given, seed=2, ends=(0,), emitted=(2,))
        check_law(rule, case, (1, 1), how)
        if rule != "block":
            check_law(rule, case, (2, 1), how)


@pytest.mark.parametrize("rule", RULES)
def test_folding_the_last_draw_changes_nothing(rule: str) -> None:
    case = Case("random", 3)
    tree = DraftTree.chain(1, (0, 2), [torch.tensor(case.law(path, side=1), dtype=torch.float64) for path in ((), (0,))])
    p = torch.tensor([case.law(tree.path_tokens(i)) for i in range(3)], dtype=torch.float64)
    full: Counter[tuple[int, ...]] = Counter()
    for weight, decision, _ in laws.outcomes(lambda source: getattr(accept, rule)(tree, p, source)):
        full[(*decision.path, decision.next)] += weight  # type: ignore[assignment]
    for weight, decision, source in laws.outcomes(lambda source: getattr(accept, rule)(tree, p, source), laws.Folded):
        for token, w in enumerate(source.last):
            full[(*decision.path, token)] -= weight * w  # type: ignore[assignment]
    assert max(map(abs, full.values())) < 1e-15


def test_block_accepts_at_least_as_much_as_rejection() -> None:
    def accepted(rule: str, case: Case, length: int, how: laws.How) -> float:
        return laws.rule_law(rule, case, laws.drafts_of(rule, case, (1,) * length, how))[1]

    gains = []
    for seed, how in itertools.product(range(8), (laws.drawn, laws.mixed, laws.chosen)):
        kind = KINDS[seed % len(KINDS)]
        for length in (1, 2, 3):
            gain = accepted("block", Case(kind, 3, seed=seed), length, how) - accepted(
                "rejection", Case(kind, 3, seed=seed), length, how
            )
            assert gain > -1e-12
            if length == 1 or how is laws.chosen:
                assert gain < 1e-12  # they are the same rule there
            gains.append(gain)
    assert max(gains) > 0.02


# ---- draws and streams ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [name for name in PARAMS if name != "greedy"])
@pytest.mark.parametrize("k", (1, 2, 3))
def test_drawn_tokens_follow_q(params: str, k: int) -> None:
    for kind in KINDS if k < 3 else ("random", "zeros in q"):
        laws.check_draw(Case(kind, 5 if k == 1 else 4, SamplingParams(**PARAMS[params]), ends=(0,)), k)


@pytest.mark.parametrize("k", (1, 2, 3, 4))
def test_many_draws(k: int) -> None:
    laws.check_many_draws(k)


@pytest.mark.parametrize("rule", RULES)
def test_no_token_of_probability_zero_at_u_zero(rule: str) -> None:
    laws.check_zero_uniform(rule)


@pytest.mark.parametrize("rule", RULES)
def test_law_through_the_streams(rule: str) -> None:
    laws.check_grid_law(rule, (0.25, 0.5, 0.25), (0.5, 0.25, 0.25))
    laws.check_grid_law(rule, (0.25, 0.25, 0.5), (0.5, 0.5, 0.0))


def test_law_through_the_streams_of_a_longer_chain() -> None:
    laws.check_grid_law("rejection", (0.25, 0.5, 0.25), (0.5, 0.25, 0.25), length=2)


@pytest.mark.parametrize("rule", RULES)
def test_law_over_several_rounds(rule: str) -> None:
    laws.check_rounds(rule, n=3, length=2)


def test_streams() -> None:
    laws.check_streams()


@pytest.mark.parametrize("rule", ("rejection", "block", "traversal", "coupled"))
def test_two_tokens_by_the_real_generators(rule: str) -> None:
    """Nothing replaced: fresh seeds, drafts from the Sampler, Philox streams or noise; chi-square of the first two tokens."""
    case = Case("random", 4, SamplingParams(temperature=1.0), seed=9)
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(2000):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), case.prompt, 4, rule=rule)
        output: list[int] = []
        while len(output) < 2:
            drafts: list[int] = []
            q = []
            for _ in range(2 - len(output)):
                (((token,), law, _),) = sampler.draw(case.logits((*output, *drafts), side=1)[None], [drafts])
                drafts.append(token)
                q.append(law)
            tree = DraftTree.chain(1, drafts, q)
            logits = torch.stack([case.logits((*output, *tree.path_tokens(i))) for i in range(len(tree))])
            decision = accept.RULES[rule](tree, sampler.probabilities(logits, tree), sampler.draws)
            new = [*tree.path_tokens(decision.path[-1]), decision.next]
            output += new
            sampler.commit(new)
        counts[output[0], output[1]] += 1
    laws.check_counts(counts, {(a, b): case.law(())[a] * case.law((a,))[b] for a in range(4) for b in range(4)})


# ---- coupled -------------------------------------------------------------------------------------------------------------

MASK = 2**64 - 1


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def noise(seed: int, choice: int, position: int, token: int) -> float:
    """The noise again, in whole numbers: a SplitMix64 generator seeded from (seed, choice, position), output number `token`."""
    golden = 0x9E3779B97F4A7C15
    key = seed
    for word in (choice, position, None):
        key = mix(key + golden & MASK)
        key ^= word or 0
    return -math.log((2 * (mix(key + token * golden & MASK) >> 12) + 1) / 2**53)


def test_noise_is_pinned() -> None:
    golden = {
        (0, 0, 0, 0): 0.6687521579538686,
        (1, 0, 0, 0): 0.09815713352307286,
        (0, 1, 0, 0): 0.044451806981574735,
        (0, 0, 1, 0): 0.260242088967164,
        (0, 0, 0, 1): 2.042950563945377,
        (2**63 - 1, 7, 131071, 151935): 0.1583056157590942,
    }
    for (seed, choice, position, token), value in golden.items():
        assert float(exponential_noise(seed, choice, position, torch.tensor([token]))[0]) == pytest.approx(value, rel=1e-13)
    rng = random.Random(1)
    for _ in range(200):
        seed, choice, position = rng.randrange(2**63), rng.randrange(20), rng.randrange(2**20)
        tokens = [rng.randrange(2**18) for _ in range(5)]
        expected = [noise(seed, choice, position, t) for t in tokens]
        assert exponential_noise(seed, choice, position, torch.tensor(tokens)).tolist() == pytest.approx(expected, rel=1e-13)


N = 20000


@pytest.mark.parametrize(
    "series",
    (
        lambda i: (3, 0, 10, range(i, i + N)),
        lambda i: (0, 0, 0, range(i, i + N)),
        lambda i: (2**62 + i, 1, 77, range(N)),
    ),
)
def test_noise_is_exponential_over_tokens(series) -> None:
    for i in (0, 50000):
        seed, choice, position, ids = series(i)
        laws.check_uniform(torch.exp(-exponential_noise(seed, choice, position, torch.tensor(list(ids)))).tolist())


def test_noise_is_exponential_over_positions_seeds_and_choices_and_uncorrelated() -> None:
    tokens = torch.tensor([0, 1, 5, 1000])
    rows = {
        "positions": torch.stack([exponential_noise(11, 0, i, tokens) for i in range(4000)]),
        "seeds": torch.stack([exponential_noise(i, 0, 9, tokens) for i in range(4000)]),
        "choices": torch.stack([exponential_noise(11, i, 9, tokens) for i in range(4000)]),
    }
    for name, x in rows.items():
        u = torch.exp(-x)
        for column in u.T:
            laws.check_uniform(column.tolist())
        neighbours = [torch.stack([u[:-1, c], u[1:, c]]) for c in range(4)]
        pairs = [u.T[[a, b]] for a, b in itertools.combinations(range(4), 2)]
        for pair in neighbours + pairs:
            assert abs(float(torch.corrcoef(pair)[0, 1])) * 4000**0.5 < 4, name
    by_id = torch.exp(-exponential_noise(2, 0, 3, torch.arange(N)))
    for lag in (1, 2, 64):
        assert abs(float(torch.corrcoef(torch.stack([by_id[:-lag], by_id[lag:]]))[0, 1])) * N**0.5 < 4


def test_noise_differs_and_reproduces() -> None:
    ids = torch.arange(100)
    every = [exponential_noise(s, c, p, ids) for s in (0, 1, 2**32) for c in (0, 1) for p in (0, 1, 2)]
    assert len(set(torch.cat(every).tolist())) == 100 * len(every)
    assert torch.equal(exponential_noise(1, 0, 1, ids), exponential_noise(1, 0, 1, ids))
    assert torch.equal(exponential_noise(1, 0, 1, ids)[50:], exponential_noise(1, 0, 1, ids[50:]))


def test_the_race_draws_from_p() -> None:
    p = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1], dtype=torch.float64)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5), [1], 5, rule="coupled")
    counts: Counter[int] = Counter(sampler.coupled(p, depth)[0] for depth in range(6000))
    laws.check_counts(counts, dict(enumerate(p.tolist())))
    pairs = Counter(tuple(sampler.coupled(p, depth, k=2)) for depth in range(6000))
    laws.check_counts(pairs, {tokens: w for w, tokens in laws.without_replacement(p.tolist(), 2)})


def random_tree(rng: random.Random, vocab: int, nodes: int) -> DraftTree:
    tokens, parents = [rng.randrange(vocab)], [-1]
    for i in range(1, nodes + 1):
        parents.append(i - 1 if rng.random() < 0.6 else rng.randrange(i))
        tokens.append(rng.randrange(vocab))
    q = [torch.rand(vocab) if rng.random() < 0.3 else None for _ in tokens]
    return DraftTree(tuple(tokens), tuple(parents), tuple(q))


def test_coupled_emits_the_perturbed_maximum_whatever_was_drafted() -> None:
    rng = random.Random(8)
    kept = 0
    for trial in range(150):
        vocab = rng.choice((2, 3, 4, 7))
        case = Case(rng.choice(KINDS), vocab, seed=trial, prompt=(1,) * rng.randrange(1, 5))
        seed, choice = rng.randrange(2**63), rng.randrange(3)
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), case.prompt, vocab, rule="coupled", choice=choice)
        text: list[int] = []
        for _ in range(3):
            tree = random_tree(rng, vocab, rng.randrange(7))
            logits = torch.stack([case.logits((*text, *tree.path_tokens(i))) for i in range(len(tree))])
            decision = accept.coupled(tree, sampler.probabilities(logits, tree), sampler.draws)
            new = [*tree.path_tokens(decision.path[-1]), decision.next]
            kept += len(new) - 1
            assert not any(tree.tokens[c] == decision.next for c in tree.children[decision.path[-1]])
            for token in new:
                law = case.law(text)
                position = len(case.prompt) + len(text)
                scores = [
                    math.log(v) - math.log(noise(seed, choice, position, t)) if v else -math.inf for t, v in enumerate(law)
                ]
                assert token == scores.index(max(scores))
                text.append(token)
            sampler.commit(new)
    assert kept > 50


def test_coupled_drafts_are_the_targets_when_the_models_agree() -> None:
    case = Case("p = q", 5, SamplingParams(temperature=0.9, seed=3), seed=4)
    sampler = Sampler(case.params, case.prompt, 5, rule="coupled")
    drafts: list[int] = []
    for _ in range(5):
        ((tokens, q, _),) = sampler.draw(case.logits(drafts, side=1)[None], [drafts], k=2)
        assert q is None and len(set(tokens)) == 2
        drafts.append(tokens[0])
    tree = DraftTree.chain(case.prompt[-1], drafts)
    p = sampler.probabilities(torch.stack([case.logits(tree.path_tokens(i)) for i in range(6)]), tree)
    assert len(accept.coupled(tree, p, sampler.draws).path) == 6


def test_inverse_cdf_at_the_edges() -> None:
    almost = 1 - 2**-53
    for dtype in (torch.float32, torch.float64):
        w = torch.tensor([0.0, 0.0, 0.2, 0.0, 0.3, 1e-3, 0.0], dtype=dtype)
        assert [sampling.inverse_cdf(w, u) for u in (0.0, 0.39, 0.41, almost)] == [2, 2, 4, 5]
    assert sampling.inverse_cdf(torch.tensor([0.0, 7.0, 0.0]), almost) == 1
    w = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert (sampling.inverse_cdf(w, 0.0), sampling.inverse_cdf(w, almost)) == (0, 999)
