"""A model as the drafter: its cache follows the tokens, it draws what it says it draws, and it stops before it draws."""

from __future__ import annotations

from typing import Any, Sequence

import pytest
from toys import plain, run, tiny_model, tiny_target

from outrider.drafters.base import Ask, Work
from outrider.drafters.model import PREFILL_FROM, ModelDrafter, ModelOptions
from outrider.errors import ParameterError
from outrider.sampling import Sampler, SamplingParams
from outrider.targets.table import TableTarget
from outrider.tree import Budget, DraftTree

LAW: dict[str, Any] = {"vocab_size": 12, "seed": 21, "sharpness": 2.0, "context_length": 300}
PROMPTS = [[1, 2, 3], [4] * 25, [5, 6]]
SAMPLED = SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True)


def pair(noise: float = 0.7, **changes: Any) -> tuple[TableTarget, ModelDrafter]:
    return TableTarget(**LAW), ModelDrafter(TableTarget(**{**LAW, "noise": noise, **changes}))


# ---- a drafter that is the target ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 1.0, "seed": 2},
        {"temperature": 0.8, "seed": 3, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 0.4, "min_tokens": 30},
    ],
)
def test_itself_is_always_right(rule: str, values: dict[str, Any]) -> None:
    t, drafter = pair(noise=0.0)
    _, rounds = run(t, drafter, PROMPTS[:2], SamplingParams(max_tokens=200, ignore_eos=True, **values), rule, 4)
    for own in rounds:
        assert sum(r.proposed for r in own) == sum(r.accepted for r in own) == 160
        assert [len(r.emitted) for r in own] == [5] * 40
    assert drafter.model.open_slots == 0


def test_itself_in_float64() -> None:
    t = tiny_target("llama", 1, spread=0.25)
    drafter = ModelDrafter(tiny_target("llama", 1, spread=0.25))
    for rule, values in (
        ("block", {}),
        ("block", {"temperature": 1.0}),
        ("rejection", {"temperature": 1.0}),
        ("coupled", {"temperature": 1.0}),
    ):
        params = SamplingParams(max_tokens=200, seed=5, ignore_eos=True, **values)
        _, (rounds,) = run(t, drafter, [[1, 2, 3, 4]], params, rule, 7)
        assert sum(r.accepted for r in rounds) == sum(r.proposed for r in rounds) == 175


def test_sampled_drafts_beat_greedy_ones() -> None:
    """At temperature 1 a drawn draft is accepted with sum min(p, q), the most likely token only with p of it."""
    rates = []
    for greedy in (False, True):
        t = TableTarget(**LAW)
        drafter = ModelDrafter(TableTarget(**LAW, noise=0.3), ModelOptions(greedy=greedy))
        _, rounds = run(
            t, drafter, PROMPTS, SamplingParams(max_tokens=250, temperature=1.5, seed=1, ignore_eos=True), "rejection"
        )
        rates.append(sum(r.accepted for own in rounds for r in own) / sum(r.proposed for own in rounds for r in own))
        assert all((q is None) == (greedy or i == 0) for own in rounds for r in own for i, q in enumerate(r.q))
    assert rates[0] > rates[1] + 0.1


# ---- the cache follows the tokens ------------------------------------------------------------------------------------------


class Compared(ModelDrafter):
    """Checks each draft against that of a state which sees the tokens for the first time."""

    compared = 0

    def propose(self, work: Work) -> list[DraftTree]:
        trees = super().propose(work)
        for (state, tokens, budget, _), tree in zip(work, trees):
            fresh = self.open(state.sampler)
            (wanted,) = super().propose([Ask(fresh, tokens, budget)])
            fresh.close()
            assert tree.tokens == wanted.tokens
            held = state.slot.tokens if isinstance(self.model, TableTarget) else state.fed
            assert list(held) == list(state.fed) and len(state.fed) == state.slot.length
            assert state.fed[: len(tokens)] == list(tokens)[: len(state.fed)]
            self.compared += 1
        return trees


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "seed": 8}])
def test_cache_after_rejections(values: dict[str, Any]) -> None:
    t = TableTarget(**LAW)
    drafter = Compared(TableTarget(**LAW, noise=0.7))
    _, rounds = run(t, drafter, PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True, **values), "coupled", 4)
    seen = {r.accepted for own in rounds for r in own}
    assert {0, 1, 4} <= seen and drafter.compared > 40


def test_cache_of_a_real_model() -> None:
    t = tiny_target("llama", 1, spread=0.25)
    relative = tiny_target("llama", 1, spread=0.25)
    for mine, theirs in zip(relative.model.parameters(), tiny_model("llama", 2, spread=0.25).parameters()):
        mine.data.lerp_(theirs.data, 0.06)
    drafter = Compared(relative)
    prompts = [[1, 2, 3], [4, 5] * 20, [6]]
    params = SamplingParams(max_tokens=40, temperature=0.5, seed=8, ignore_eos=True)
    found, rounds = run(t, drafter, prompts, params, "coupled", 4)
    assert found == plain(t, prompts, params, "coupled")
    assert {0, 4} <= {r.accepted for own in rounds for r in own}


def test_rows_that_are_computed() -> None:
    """Nothing is computed twice: a round costs one row a drafted token, and one more where all of the last were accepted."""
    t, drafter = pair(noise=0.0)
    run(t, drafter, [[1, 2, 3]], SamplingParams(max_tokens=21, ignore_eos=True), "block", 4)
    rows = drafter.model.rows_computed  # prompt of 3; then 4 drafts a round, the last of which is not fed before the next round
    assert rows == (3 + 3) + 3 * (2 + 3)
    t, drafter = pair(noise=0.0)
    run(t, drafter, [[1] * 100], SamplingParams(max_tokens=6, ignore_eos=True), "block", 4)
    assert drafter.model.rows_computed == 100 + 3


@pytest.mark.parametrize("gap", [1, 3, PREFILL_FROM, PREFILL_FROM + 1, 60])
def test_off_for_several_rounds(gap: int) -> None:
    _, drafter = pair()
    sampler = Sampler(SAMPLED, [1, 2, 3], 12, rule="coupled")
    state = drafter.open(sampler)
    tokens = [1, 2, 3]
    drafter.propose([Ask(state, tokens, Budget(4, 4))])
    tokens += [(7 * i) % 12 for i in range(gap)]
    sampler.commit(tokens[3:])
    fresh = drafter.open(sampler)
    a, b = drafter.propose([Ask(state, tokens, Budget(4, 4)), Ask(fresh, tokens, Budget(4, 4))])
    assert a.tokens == b.tokens and len(a) == 5


# ---- other vocabularies, other contexts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "seed": 4}])
def test_a_smaller_vocabulary(values: dict[str, Any]) -> None:
    """Tokens that the drafter does not have: none is drafted, none reaches it, and the text is the target's own."""
    t = tiny_target("llama", 1, spread=0.25)
    drafter = ModelDrafter(tiny_target("llama", 2, spread=0.25, vocab_size=80))
    params = SamplingParams(max_tokens=40, ignore_eos=True, **values)
    prompts = [[1, 2, 3], [4, 90, 5], [6, 7] * 10, [8] * 30 + [95]]
    for rule in ("block", "rejection", "coupled"):
        found, rounds = run(t, drafter, prompts, params, rule)
        if rule == "coupled" or not values:
            assert found == plain(t, prompts, params, rule)
        assert all(token < 80 for own in rounds for r in own for token in r.tokens[1:])
        assert not any(r.proposed for number in (1, 3) for r in rounds[number])
        assert any(r.proposed for r in rounds[2])
        assert any(token >= 80 for o in found for token in o.tokens)


def test_a_foreign_token_that_is_taken_back() -> None:
    """After a truncation to before the foreign token the drafter drafts again."""
    t = tiny_target("llama", 2, spread=0.25, vocab_size=80)
    drafter = ModelDrafter(t)
    state = drafter.open(Sampler(SamplingParams(), [1, 2], 101))
    propose = lambda tokens: len(drafter.propose([Ask(state, tokens, Budget(3, 3))])[0]) - 1  # noqa: E731
    assert [propose([1, 2, 3]), propose([1, 2, 3, 90]), propose([1, 2, 3, 90, 4])] == [3, 0, 0]
    state.truncate(3)
    assert propose([1, 2, 3, 5]) == 3


def test_a_shorter_context() -> None:
    t, drafter = pair(noise=0.0, context_length=20)
    for values in ({}, {"temperature": 1.0, "seed": 4}):
        params = SamplingParams(max_tokens=60, ignore_eos=True, **values)
        found, rounds = run(t, drafter, PROMPTS, params, "coupled", 6)
        assert found == plain(t, PROMPTS, params, "coupled")
        for own in rounds:
            assert all(r.context + r.proposed <= 20 for r in own if r.proposed)
        assert any(r.proposed for r in rounds[0]) and not any(r.proposed for r in rounds[1])


# ---- stopping before a token is drawn --------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "seed": 4}])
@pytest.mark.parametrize("how", ["min_probability", "price"])
def test_it_stops_before_it_draws(how: str, values: dict[str, Any]) -> None:
    t = TableTarget(**LAW)
    drafter = ModelDrafter(
        TableTarget(**LAW, noise=0.7), ModelOptions(min_probability=0.3 if how == "min_probability" else 0.0)
    )
    drawn = 0

    from outrider.decode import Pace, decode
    from outrider.decode import Sequence as Decoded

    class Priced(Pace):
        def budgets(self, sequences: Sequence[Any]) -> list[Budget]:
            return [Budget(8, 8, 0.3 if how == "price" else 0.0)] * len(sequences)

    s = Decoded(t, [1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True, **values), "rejection")
    original = s.sampler.draw

    def draw(*args: Any, **options: Any) -> Any:
        nonlocal drawn
        found = original(*args, **options)
        drawn += sum(len(one.tokens) for one in found)
        return found

    s.sampler.draw = draw  # type: ignore[method-assign]
    rounds = list(decode(t, drafter, [s], Priced()))
    lengths = {r.proposed for r in rounds}
    proposed = sum(r.proposed for r in rounds)
    assert (
        drawn == proposed if values else drawn >= proposed
    ) and proposed > 0  # what is chosen without chance may be left out
    assert len(lengths) > 2 and max(lengths) < 8
    for r in rounds:
        likely = 1.0
        for score in r.score[1:] if r.score else ():
            assert likely >= 0.3  # an unlikely token may be drawn, and is kept; nothing is drawn after it
            likely *= score
        assert values or likely >= 0.3


def test_options() -> None:
    for value in (-0.1, 1.0, 2.0):
        with pytest.raises(ParameterError, match="min_probability"):
            ModelOptions(min_probability=value)
