"""The loop itself: sequences that end at different times or are given up, forks, faults of one of many."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from toys import Scripted, Whatever, plain, run

from outrider.decode import Fixed, Sequence, close_sequence, decode, find_rule, open_sequence
from outrider.drafters import NoDrafter
from outrider.drafters.model import ModelDrafter
from outrider.errors import ParameterError, PromptError
from outrider.sampling import SamplingParams
from outrider.targets.table import TableTarget
from outrider.trace import statistics
from outrider.tree import DraftTree

PROMPTS = [[1, 2, 3], [4, 5], [6, 1, 2, 7, 3]]


def target(**changes: Any) -> TableTarget:
    return TableTarget(**{"vocab_size": 12, "seed": 5, **changes})


def sequences(t: TableTarget, *params: SamplingParams, rule: str = "block") -> list[Sequence]:
    return [Sequence(t, PROMPTS[i % 3], p, rule, 0, i) for i, p in enumerate(params)]


def free(n: int, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=n, ignore_eos=True, **values)


def test_a_generator_that_is_closed_early_frees_everything() -> None:
    t = target()
    drafter = ModelDrafter(target(noise=0.5))
    for rounds_seen in (0, 1, 2, 3, 7):
        made = sequences(t, free(50), free(50), free(50))
        rounds = decode(t, drafter, made)
        for _ in range(rounds_seen):
            next(rounds)
        rounds.close()
        assert t.open_slots == drafter.model.open_slots == 0
        assert rounds_seen == 0 or [s.finish for s in made] == ["cancelled"] * 3


def test_an_error_in_the_loop_frees_everything() -> None:
    t = target()
    made = sequences(t, free(50), free(50))

    def fails(tokens: Any, budget: Any, i: int) -> DraftTree:
        if i > 2:
            raise KeyboardInterrupt
        return DraftTree.chain(tokens[-1], [1])

    with pytest.raises(KeyboardInterrupt):
        list(decode(t, Whatever(fails), made))
    assert t.open_slots == 0


def test_keep_open() -> None:
    t = target()
    made = sequences(t, free(9), free(5))
    made[0].keep_open = True
    list(decode(t, NoDrafter(), made))
    assert t.open_slots == 1 and made[0].is_open and not made[1].is_open
    script = made[0].tokens
    assert made[0].slot.tokens == script[:-1], "the slot holds all but the anchor"
    for at in range(3, 12):  # also where the sequence ends in the middle of a draft
        (cut,) = sequences(t, SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(script[at],)))
        cut.keep_open = True
        (first, *_) = list(decode(t, Scripted([script]), [cut], Fixed(8)))
        assert cut.tokens == script[: script.index(script[at], 3) + 1] and cut.slot.tokens == cut.tokens[:-1]
        assert first.accepted == len(cut.output) - (len(cut.output) == 9)
        cut.keep_open = False
        close_sequence(t, cut)
    made[0].keep_open = False
    close_sequence(t, made[0])
    close_sequence(t, made[0])
    assert t.open_slots == 0


@pytest.mark.parametrize("when", [0, 1, 4])
def test_cancelling_one_of_three(when: int) -> None:
    """The cancelled sequence ends within a round and frees its slot; the others are as if it had never been there."""
    t = target()
    made = sequences(t, free(30), free(30), free(30))
    wanted = plain(t, PROMPTS, free(30))
    seen = [0, 0, 0]
    for i, r in enumerate(decode(t, Scripted([[1] * 40] * 3), made)):
        seen[r.sequence] += 1
        if i == 3 * when:
            made[1].cancelled = True
            at = seen[1]
        if made[1].finish:
            assert not made[1].is_open and t.open_slots <= 2
    assert made[1].finish == "cancelled" and seen[1] <= at + 2
    assert tuple(made[1].output) == wanted[1].tokens[: len(made[1].output)]
    assert [tuple(made[i].output) for i in (0, 2)] == [wanted[i].tokens for i in (0, 2)]
    assert t.open_slots == 0


def test_a_sequence_that_ended_costs_nothing_more() -> None:
    t = target()
    made = sequences(t, free(3), free(12), free(7))
    together = [(r.sequence, r.sequences, r.rows) for r in decode(t, NoDrafter(), made)]
    assert [n for _, n, _ in together] == [3] * 9 + [2] * 8 + [1] * 5
    assert all(rows == n for _, n, rows in together)
    assert t.rows_computed == 22 + sum(len(p) - 1 for p in PROMPTS)


def test_rounds_say_what_happened() -> None:
    t = target()
    script = PROMPTS[0] + list(plain(t, PROMPTS[:1], free(12))[0].tokens)
    for wrong_at, shape in ((-1, "chain"), (0, "chain"), (2, "chain"), (2, "tree")):
        rule = "rejection" if shape == "tree" else "block"
        _, (rounds,) = run(t, Scripted([script], wrong_at=wrong_at, shape=shape), PROMPTS[:1], free(12), rule, 4)
        first = rounds[0]
        assert first.number == 0 and first.context == 3 and first.rule == rule and not first.lossy and first.drafter == "replay"
        assert first.budget.nodes == first.budget.depth == 4 and first.rows == len(first.tokens) == 5
        accepted = {(-1, "chain"): 4, (0, "chain"): 0, (2, "chain"): 2, (2, "tree"): 3}[wrong_at, shape]
        assert first.accepted == accepted and len(first.emitted) == accepted + 1
        assert first.emitted == tuple(script[3 : 4 + accepted])
        assert first.p[0] == 1.0 and all(first.p[node] == float(first.tokens[node] == script[3 + 0]) for node in (1,))
        assert first.q == (None,) * 5
        assert [drafted for _, drafted in first.pieces].count(True) == accepted
        assert first.times.prefill > 0 and all(r.times.prefill == 0 for r in rounds[1:])
        figures = statistics(rounds)
        assert figures.rows == sum(len(r.tokens) for r in rounds) and figures.passes == len(rounds)
        assert figures.acceptance_length == 12 / len(rounds)
        assert figures.accepted_by_depth[0] == sum(r.accepted >= 1 for r in rounds) or wrong_at == 0


class Sick(TableTarget):
    """Its logits become `what` after `healthy` tokens, for sequences that begin with token 4."""

    what, healthy = math.nan, 6

    def logits(self, context: Any) -> torch.Tensor:
        row = super().logits(context)
        if context[0] == 4 and len(context) > self.healthy:
            row = row.clone()
            row[3] = self.what
        return row


@pytest.mark.parametrize("what", [math.nan, math.inf])
@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "seed": 2}, {"logprobs": 2}])
def test_one_sick_sequence(what: float, values: dict[str, Any]) -> None:
    t = Sick(vocab_size=12, seed=5)
    t.what = what
    params = free(12, **values)
    wanted = plain(target(), PROMPTS, params, "coupled")
    script = PROMPTS[1] + list(wanted[1].tokens)
    for drafter in (NoDrafter(), Scripted([[1] * 40, script, [1] * 40])):
        made = [Sequence(t, p, params, "coupled", 0, i) for i, p in enumerate(PROMPTS)]
        rounds = list(decode(t, drafter, made))
        assert [s.finish for s in made] == ["length", "error", "length"]
        assert [tuple(made[i].output) for i in (0, 2)] == [wanted[i].tokens for i in (0, 2)]
        healthy = tuple(made[1].output)
        assert healthy == wanted[1].tokens[: len(healthy)]
        assert made[1].error and "position" in made[1].error
        last = [r for r in rounds if r.sequence == 1][-1]
        assert (last.finish, last.error, last.emitted, last.logprobs) == ("error", made[1].error, (), None)
        assert made[1].text == "".join(r.text for r in rounds if r.sequence == 1)
        assert t.open_slots == 0


def test_negative_infinity_is_no_fault() -> None:
    t = Sick(vocab_size=12, seed=5)
    t.what = -math.inf
    found, _ = run(t, NoDrafter(), PROMPTS, free(12, temperature=1.0, seed=1), "coupled")
    assert 3 not in found[1].tokens[5:]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1] * 9, "9 tokens, but the context of table-5 ends at 8"),
        ([1, 12], "token id 12"),
        ([-1], "token id -1"),
    ],
)
def test_prompts_that_cannot_be_decoded(prompt: list[int], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        Sequence(target(context_length=8), prompt, SamplingParams(), "block")


def test_parameters_that_cannot_be_honoured() -> None:
    t = target()
    for values, name in (({"stop_token_ids": (12,)}, "stop_token_ids"), ({"logit_bias": {99: 1.0}}, "logit_bias")):
        with pytest.raises(ParameterError, match=name):
            Sequence(t, [1], SamplingParams(**values), "block")
    t.tokenizer = None
    with pytest.raises(ParameterError, match="stop needs a tokenizer"):
        Sequence(t, [1], SamplingParams(stop=("a",)), "block")
    found, _ = run(t, NoDrafter(), [[1]], SamplingParams(max_tokens=3))
    assert found[0].text == ""
    with pytest.raises(
        ParameterError, match="unknown accept rule 'best'; exact: rejection, block, traversal, coupled; lossy: typical"
    ):
        find_rule("best")
    with pytest.raises(ParameterError, match="unknown accept rule"):
        Sequence(t, [1], SamplingParams(), "best")


def test_lossy_rules_are_marked() -> None:
    t = target()
    _, (rounds,) = run(t, Scripted([[1] * 40]), PROMPTS[:1], free(9, temperature=1.0), "typical")
    assert all(r.lossy and r.rule == "typical" for r in rounds)


def test_a_fork_goes_on_alone() -> None:
    t = target()
    drafter = ModelDrafter(target(noise=0.5))
    made = [Sequence(t, PROMPTS[2], free(10, temperature=1.0, seed=3), "coupled", choice, choice) for choice in range(3)]
    open_sequence(t, drafter, made[0])
    computed = t.rows_computed
    for other in made[1:]:
        other.attach(t.open(made[0].slot, made[0].slot.length), made[0].state.fork(other.sampler))
    outcomes: dict[int, list[int]] = {0: [], 1: [], 2: []}
    rounds = list(decode(t, drafter, made, Fixed(3)))
    for r in rounds:
        outcomes[r.sequence] += r.emitted
    wanted = plain(target(), [PROMPTS[2]] * 3, free(10, temperature=1.0, seed=3), "coupled", choices=[0, 1, 2])
    assert [tuple(outcomes[i]) for i in range(3)] == [o.tokens for o in wanted]
    assert computed == 4 and t.rows_computed == 4 + sum(len(r.tokens) for r in rounds), "the prompt is computed once"
    assert rounds[0].times.prefill > 0
    assert t.open_slots == drafter.model.open_slots == 0


def test_observe_sees_every_kept_row() -> None:
    """What a feature drafter relies on: kept rows in order, with the token that each belongs to, in plain rounds too."""
    t = target()
    seen: dict[int, list[int]] = {}

    class Watching(Scripted):
        layers = (0, "final")

        def observe(self, work: Any) -> None:
            for state, tokens, output, rows in work:
                positions = seen.setdefault(id(state), [])
                for j, row in enumerate(rows):
                    assert len(positions) == output.start + j
                    context = tokens[: output.start + j + 1]
                    for layer in self.layers:
                        assert torch.equal(output.hidden[layer][row], t._hidden(context, layer))
                    positions.append(tokens[output.start + j])

    texts = [p + list(o.tokens) for p, o in zip(PROMPTS, plain(t, PROMPTS, free(14)))]
    for shape, wrong_at in (("chain", 1), ("tree", 1), ("tree", 0), ("chain", -1)):
        seen.clear()
        run(t, Watching(texts, shape=shape, wrong_at=wrong_at), PROMPTS, free(14), "rejection", 4)
        assert sorted(seen.values()) == sorted(text[:-1] for text in texts)
        for at in range(3, 9):  # what the cut removes is not observed
            seen.clear()
            params = free(14, stop_token_ids=(texts[0][at],))
            found, _ = run(t, Watching(texts, shape=shape, wrong_at=wrong_at), PROMPTS, params, "rejection", 4)
            assert sorted(seen.values()) == sorted((p + list(o.tokens))[:-1] for p, o in zip(PROMPTS, found))
