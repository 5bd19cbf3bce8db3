"""Processors against a slow reference and against transformers; parameters; what happens at the edges."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import laws
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from outrider.errors import LogitsError, ParameterError
from outrider.sampling import Draws, Sampler, SamplingParams, _largest, _nucleus
from outrider.tree import DraftTree

ROOT = DraftTree.chain(1)
VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.3, 1.0, 2.5),
    "top_k": (0, 1, 3, 11, 50),
    "top_p": (1.0, 0.95, 0.5, 0.01),
    "min_p": (0.0, 0.1, 1.0),
    "repetition_penalty": (1.0, 0.7, 1.6),
    "presence_penalty": (0.0, -1.5, 0.8),
    "frequency_penalty": (0.0, -0.7, 1.2),
    "logit_bias": ({}, {0: -100.0, 4: 1.5}, {2: 100.0}),
    "min_tokens": (0, 1, 3, 5),
    "stop_token_ids": ((), (5, 7)),
}


def law(logits: Any, prompt: Any = (1,), dtype: torch.dtype = torch.float64, **params: Any) -> list[float]:
    row = torch.as_tensor(logits, dtype=dtype)
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, **params}), prompt, len(row))
    return sampler.probabilities(row[None], ROOT)[0].tolist()


# ---- processors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VALUES)
def test_each_processor(name: str) -> None:
    for value, seed in itertools.product(VALUES[name], range(3)):
        laws.check_processors(SamplingParams(**{"temperature": 1.0, name: value}), seed)


def test_combinations() -> None:
    rng = random.Random(0)
    for seed in range(150):
        laws.check_processors(SamplingParams(**{name: rng.choice(values) for name, values in VALUES.items()}), seed)


def test_min_tokens_holds_back_every_end_by_depth() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, min_tokens=3, stop_token_ids=(4,)), [1], 6, frozenset((0, 2)))
    sampler.commit([5])
    tree = DraftTree((5, 1, 1, 3, 3, 1), (-1, 0, 1, 2, 0, 4))
    p = sampler.probabilities(torch.zeros(6, 6), tree)
    for row, depth in zip(p, tree.depths):
        assert ((row > 0).tolist() == [True] * 6) == (1 + depth >= 3)
        if 1 + depth < 3:
            assert (row > 0).tolist() == [False, True, False, True, False, True]


def test_top_k_ties_go_to_the_lowest_ids() -> None:
    assert law([1.0, 2.0, 2.0, 2.0, 0.0], top_k=2) == [0, 0.5, 0.5, 0, 0]
    assert law([1.0] * 5, top_k=3) == pytest.approx([1 / 3] * 3 + [0, 0])
    assert law([0.0, 3.0, 3.0], temperature=0.0) == [0, 1, 0]


def test_top_p_is_the_smallest_set() -> None:
    x = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    assert [v > 0 for v in law(x, top_p=0.39)] == [False, True, False, False]
    assert [v > 0 for v in law(x, top_p=0.41)] == [False, True, False, True]
    assert [v > 0 for v in law(x, top_p=0.71)] == [False, True, True, True]
    assert [v > 0 for v in law(x, top_p=0.95)] == [True] * 4
    assert law([1.0] * 4, top_p=0.5) == [0.5, 0.5, 0, 0]  # of equals the lowest ids


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_top_p_wants_more_than_1024_tokens(dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.random.default_rng(1).permutation(np.linspace(0, 1, 5000))).to(dtype)
    for top_p, rows in itertools.product((0.05, 0.5, 0.9, 0.9999), (1, 3)):
        p = Sampler(SamplingParams(temperature=1.0, top_p=top_p), [1], 5000).probabilities(
            x.expand(rows, -1), DraftTree.chain(1, [2] * (rows - 1))
        )
        full = x.double().softmax(0)
        order = full.argsort(descending=True)
        count = int((full[order].cumsum(0) < top_p).sum()) + 1
        assert all(set(row.nonzero()[:, 0].tolist()) == set(order[:count].tolist()) for row in p)


def test_rows_have_their_own_sizes() -> None:
    x = torch.tensor([[3.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [2.0, 2.0, -5.0, -5.0]])
    assert _nucleus(x, 0.6, 0).tolist() == [1, 3, 2]
    kept = _largest(x, torch.tensor([1, 3, 2]))
    assert kept.tolist() == [[True, False, False, False], [True, True, True, False], [True, True, False, False]]


@pytest.mark.parametrize(
    ("params", "theirs"),
    [
        ({"temperature": 0.7}, [hf.TemperatureLogitsWarper(0.7)]),
        ({"top_k": 7}, [hf.TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
        ({"min_p": 0.2}, [hf.MinPLogitsWarper(0.2)]),
        ({"repetition_penalty": 1.4}, [hf.RepetitionPenaltyLogitsProcessor(1.4)]),
        ({"repetition_penalty": 0.8}, [hf.RepetitionPenaltyLogitsProcessor(0.8)]),
        ({"logit_bias": {3: 2.5, 9: -4.0}}, [hf.SequenceBiasLogitsProcessor([[[3], 2.5], [[9], -4.0]])]),
        (
            {"repetition_penalty": 1.3, "temperature": 0.6, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
            [
                hf.RepetitionPenaltyLogitsProcessor(1.3),
                hf.TemperatureLogitsWarper(0.6),
                hf.TopKLogitsWarper(12),
                hf.TopPLogitsWarper(0.9),
                hf.MinPLogitsWarper(0.02),
            ],
        ),
    ],
    ids=str,
)
def test_equal_to_transformers(params: dict[str, Any], theirs: list[hf.LogitsProcessor]) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(10):
        prompt = torch.randint(0, 40, (9,), generator=generator)
        path = torch.randint(0, 40, (3,), generator=generator)
        tree = DraftTree.chain(int(prompt[-1]), path.tolist())
        logits = torch.randn(4, 40, generator=generator) * 3
        p = Sampler(SamplingParams(**{"temperature": 1.0, **params}), prompt.tolist(), 40).probabilities(logits, tree)
        for depth in range(4):
            scores = logits[depth : depth + 1]
            for processor in theirs:
                scores = processor(torch.cat([prompt, path[:depth]])[None], scores)
            torch.testing.assert_close(p[depth], scores[0].softmax(0), rtol=1e-5, atol=1e-7)


# ---- temperature ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("temperature", (5e-324, 1e-40, 1e-6, 1e-4, 0.01))
def test_tiny_temperature_is_nearly_greedy(temperature: float, dtype: torch.dtype) -> None:
    x = [30.0, -80.0, 31.0, -math.inf, 29.5]
    assert law(x, dtype=dtype, temperature=temperature) == pytest.approx([0, 0, 1, 0, 0], abs=1e-30)
    assert law(x, dtype=dtype, temperature=temperature, top_k=2, top_p=0.9, min_p=0.1)[2] == 1
    assert law([1.0, 2.0, 2.0], dtype=dtype, temperature=temperature) == pytest.approx([0, 0.5, 0.5], abs=1e-30)


def test_temperature_goes_smoothly_to_greedy_and_to_uniform() -> None:
    x = [0.3, 1.1, 0.9, -2.0]
    best = [law(x, temperature=t)[1] for t in (1e30, 100.0, 10.0, 1.0, 0.3, 0.1, 0.03, 0.01, 1e-4, 0.0)]
    assert best == sorted(best) and best[0] == pytest.approx(0.25) and best[-1] == 1
    assert law([*x, -math.inf], temperature=1e300, dtype=torch.float32) == pytest.approx([0.25] * 4 + [0])


def test_temperature_zero_ignores_the_seed_and_one_does_not() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    tree = DraftTree.chain(1, (2, 3, 4, 5))
    for temperature, different in ((0.0, False), (1.0, True)):
        texts = set()
        for seed in range(20):
            sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), [1], 50)
            p = sampler.probabilities(logits, tree)
            texts.add(tuple(sampler.draws.categorical(row) for row in p))
            q = sampler.draw(logits[:1], [()])[0].q
            assert (q is None) != different
        assert (len(texts) > 10) == different


# ---- input that is no distribution ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_bad_logits(bad: float, temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature), [1, 1, 1], 4)
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(LogitsError, match=f"position 4 are {bad}"):
        sampler.probabilities(logits, DraftTree.chain(1, (2, 3)))
    for k in (1, 2):
        first, spoilt, last = sampler.draw(logits, [(), (2,), (2, 3)], k)
        assert spoilt == ([], None, [])
        assert len(first.tokens) == len(last.tokens) == k and first.chances == pytest.approx([0.25] * k)


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_everything_masked(temperature: float) -> None:
    masked = torch.full((4,), -math.inf)
    sampler = Sampler(SamplingParams(temperature=temperature, min_tokens=1), [1], 4, frozenset((0,)))
    with pytest.raises(LogitsError, match="position 1 are -inf"):
        sampler.probabilities(masked[None], ROOT)
    assert sampler.draw(masked[None], [()]) == [([], None, [])]
    masked[0] = 1.0  # only the end is left, and min_tokens holds it back
    with pytest.raises(LogitsError):
        sampler.probabilities(masked[None], ROOT)
    assert sampler.draw(masked[None], [()]) == [([], None, [])]
    assert sampler.draw(masked[None], [(2,)])[0].tokens == [0]


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_input_types(dtype: torch.dtype) -> None:
    logits = (torch.randn(2, 9, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    before = logits.clone()
    params = SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.5, logit_bias={1: 2.0})
    p = Sampler(params, [1, 2], 9).probabilities(logits, DraftTree.chain(2, (3,)))
    assert p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row, path in zip(range(2), ((), (3,))):
        assert p[row].tolist() == pytest.approx(laws.reference_law(logits[row].tolist(), params, [1, 2], path), abs=1e-6)
    assert torch.equal(before, logits)  # the caller's logits stay as they were


# ---- draws ---------------------------------------------------------------------------------------------------------------


def test_draws_from_a_shorter_vocabulary() -> None:
    params = SamplingParams(temperature=1.0, seed=1, logit_bias={8: 100.0}, presence_penalty=0.5)
    sampler = Sampler(params, [9, 1], 10)
    for k in (1, 3, 8):
        ((tokens, q, _),) = sampler.draw(torch.zeros(1, 6), [(2, 9)], k)
        assert len(tokens) == min(k, 6) == len(set(tokens)) and max(tokens) < 6
        assert q is not None and q.shape == (10,) and q[6:].eq(0).all() and float(q.sum()) == pytest.approx(1)
    assert (
        max(sampler.draw(torch.arange(14.0)[None], [()])[0].tokens) < 10
    )  # and from a longer one, padded with rows that mean nothing
    greedy = Sampler(SamplingParams(), [9], 10)
    assert greedy.draw(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), [()], 9)[0][:2] == ([1, 3, 2, 0], None)


def test_greedy_drafts_are_the_most_likely_with_their_own_path() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, presence_penalty=2.0, top_k=1), [1], 4)
    logits = torch.tensor([[1.0, 3.0, 2.9, 2.8]])
    assert sampler.draw(logits, [()], 3, greedy=True)[0][:2] == ([1, 2, 3], None)
    assert sampler.draw(logits, [(1,)], 3, greedy=True)[0][:2] == ([2, 3, 0], None)
    both = sampler.draw(logits.expand(3, -1), [(), (1,), ()], (1, 3, 0), greedy=True)
    assert [drawn.tokens for drawn in both] == [[1], [2, 3, 0], []]
    raw = logits[0].softmax(dim=0).tolist()
    assert [drawn.chances for drawn in both] == [pytest.approx([raw[t] for t in drawn.tokens]) for drawn in both]


@pytest.mark.parametrize("k", (1, 2, 3, 5, 7))
def test_ties_among_the_most_likely_go_to_the_lowest_ids(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    logits = torch.randint(0, 4, (20, 40), generator=generator).float()
    logits[:, 9] = -math.inf
    drawn = Sampler(SamplingParams(), [1], 40).draw(logits, [()] * 20, k)
    for row, (tokens, _, _) in zip(logits.tolist(), drawn):
        assert tokens == sorted(range(40), key=lambda token: (-row[token], token))[:k]


@pytest.mark.parametrize("rule", ("rejection", "coupled"))
@pytest.mark.parametrize("greedy", (False, True))
@pytest.mark.parametrize(
    "params",
    (
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.7, seed=3, top_k=4, top_p=0.9),
        SamplingParams(temperature=0.7, seed=3, presence_penalty=0.5, logit_bias={7: 3.0, 2: 9.0}, min_tokens=2),
        SamplingParams(repetition_penalty=1.5),
    ),
)
def test_draws_from_a_part_of_the_vocabulary(params: SamplingParams, greedy: bool, rule: str) -> None:
    """Logits of some tokens draw what the whole vocabulary's would with -inf elsewhere."""
    ids = torch.tensor([1, 4, 7, 8, 11, 13, 17, 18])
    some = torch.randn(5, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    some[2, 3:6] = some[2].max() + 1  # equal ones
    some[3, 4] = math.nan
    every = torch.full((5, 20), -math.inf, dtype=torch.float64).index_copy_(1, ids, some)
    paths, counts = [(), (4,), (4, 7), (2,), (7,)], (2, 3, 2, 2, 0)
    one, other = (Sampler(params, [4, 1], 20, frozenset((8,)), rule=rule) for _ in range(2))
    pairs = list(zip(one.draw(some, paths, counts, greedy, ids), other.draw(every, paths, counts, greedy), strict=True))
    for i, (mine, theirs) in enumerate(pairs):
        assert mine.tokens == theirs.tokens and bool(mine.tokens) == (i < 3)
        assert mine.chances == pytest.approx(theirs.chances)
        assert (mine.q is None) == (theirs.q is None) and (mine.q is None or torch.allclose(mine.q, theirs.q))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", (16384, 20011))
def test_the_largest_of_a_wide_row(width: int) -> None:
    """They are found by blocks, and may all stand in one of them or behind the last."""
    x = torch.randint(0, 300, (30, width), generator=torch.Generator().manual_seed(width)).float()
    x[0, -9:] = x[1, 640:649] = torch.arange(1000.0, 1009.0)
    logits = torch.cat([x, torch.full((30, 3), 5000.0)], dim=1)  # padded, so that rows do not lie side by side
    for k in (1, 2, 5, 40):
        drawn = Sampler(SamplingParams(), [1], width).draw(logits, [()] * 30, k)
        assert [d.tokens for d in drawn] == [sorted(range(width), key=lambda t: (-row[t], t))[:k] for row in x.tolist()]


def test_several_nodes_are_drawn_as_they_would_be_alone() -> None:
    """One call draws for every node from its own law, with the numbers that single calls would use."""
    params = SamplingParams(temperature=0.9, seed=4, top_k=7, presence_penalty=1.5)
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    paths = [(), (3,), (3, 3), (29, 1)]
    for rule in ("rejection", "coupled"):
        together, alone = (Sampler(params, [1, 2], 30, rule=rule) for _ in range(2))
        drawn = together.draw(logits, paths, (3, 1, 0, 4))
        for row, path, k, found in zip(logits, paths, (3, 1, 0, 4), drawn):
            ((tokens, q, chances),) = alone.draw(row[None], [path], k)
            assert (found.tokens, found.chances) == (tokens, pytest.approx(chances)) and len(tokens) == k
            assert (q is None) == (found.q is None) == (k == 0 or rule == "coupled")
            assert q is None or torch.allclose(q, found.q, atol=1e-12)
        assert together.draft_stream.uniform() == alone.draft_stream.uniform()


def test_draws_use_their_own_streams() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), [1], 4)
    other = Sampler(SamplingParams(temperature=1.0, seed=3), [1], 4)
    draws = Draws(sampler)
    w = torch.tensor([0.2, 0.3, 0.5])
    flips = [draws.bernoulli(0.5) for _ in range(50)]
    assert flips == [other.accept_stream.uniform() < 0.5 for _ in range(50)]
    assert [draws.categorical(w) for _ in range(50)] == [
        int(np.searchsorted([0.2, 0.5], other.residual_stream.uniform(), "right")) for _ in range(50)
    ]
    assert not any(draws.bernoulli(0.0) for _ in range(1000)) and all(draws.bernoulli(1.0) for _ in range(1000))


# ---- parameters ----------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, math.inf, math.nan, "1", True, None, [1.0]),
    "top_k": (-1, 1.5, "5", True, None, math.nan, math.inf),
    "top_p": (0, -0.5, 1.0001, "0.9", True, None, math.nan),
    "min_p": (-0.1, 1.1, "0", False, None, math.nan),
    "repetition_penalty": (0, -1.0, math.inf, "1", True, None),
    "presence_penalty": (-2.1, 2.1, "0", True, None, math.nan),
    "frequency_penalty": (-2.1, 2.1, "0", False, None, math.nan),
    "logit_bias": (
        {-1: 1.0},
        {1.0: 1.0},
        {"a": 1.0},
        {True: 1.0},
        {1: 101},
        {1: -101},
        {1: "2"},
        {1: None},
        {1: True},
        {1: math.nan},
        3,
        "ab",
    ),
    "min_tokens": (-1, 1.5, "1", True, None, 300),
    "max_tokens": (0, -1, 1.5, "9", True, None),
    "ignore_eos": (1, "yes", None),
    "stop": ("", ("a", ""), (1,), 5, None),
    "stop_token_ids": ((-1,), (1.0,), ("1",), (True,), 5, "12", None),
    "seed": (-1, 2**63, 1.5, "1", True),
    "logprobs": (-1, 21, 0.5, "3", True),
    "prediction": (5, ("a",), True),
    "json_object": (1, "yes", None),
    "json_schema": ("{", "[]", "3", 5, ["a"]),
    "regex": (5, ("a",), True),
    "choices": ("", ("a", ""), (1,), 5, None),
    "lark": (5, ("a",), True),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=str)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{name}"):
        SamplingParams(**{name: value})


def test_every_parameter_has_wrong_values() -> None:
    assert set(WRONG) == set(SamplingParams.__dataclass_fields__)


def test_values_at_the_limits_are_fine() -> None:
    for name, values in {
        "temperature": (0, 0.0, 1e9),
        "top_k": (0, 10**9),
        "top_p": (1, 1e-9),
        "min_p": (0, 1),
        "presence_penalty": (-2, 2),
        "logit_bias": ({0: -100, 1: 100},),
        "max_tokens": (1,),
        "seed": (None, 0, 2**63 - 1),
        "logprobs": (None, 0, 20),
        "stop": ((), "x", ["x", "y"]),
    }.items():
        for value in values:
            SamplingParams(**{name: value, "min_tokens": 0})
    assert SamplingParams(stop="x").stop == ("x",) and SamplingParams(stop=["x", "y"]).stop == ("x", "y")


def test_whole_floats_become_whole_numbers() -> None:
    params = SamplingParams(temperature=1.0, top_k=2.0, seed=5.0, min_tokens=1.0, max_tokens=9.0, logprobs=3.0)  # type: ignore[arg-type]
    for name in ("top_k", "seed", "min_tokens", "max_tokens", "logprobs"):
        assert type(getattr(params, name)) is int
    assert Sampler(params, [1], 4).probabilities(torch.zeros(1, 4), ROOT).tolist() == [[0.5, 0.5, 0, 0]]


def test_unknown_names() -> None:
    assert SamplingParams.make(temperature=0.5, top_k=3) == SamplingParams(temperature=0.5, top_k=3)
    with pytest.raises(ParameterError, match=r"unknown sampling parameter 'topk'; known: temperature, top_k"):
        SamplingParams.make(topk=3)


def test_tokens_beyond_the_vocabulary_are_refused_by_name() -> None:
    with pytest.raises(ParameterError, match="logit_bias names token 9, but the vocabulary ends at 8"):
        Sampler(SamplingParams(logit_bias={9: 1.0}), [1], 9)
    with pytest.raises(ParameterError, match="stop_token_ids names token 9"):
        Sampler(SamplingParams(stop_token_ids=(9,)), [1], 9)


def test_a_sampler_without_a_prompt() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, presence_penalty=1.0), [], 3)
    assert sampler.probabilities(torch.zeros(1, 3), ROOT)[0].tolist() == pytest.approx([1 / 3] * 3)
