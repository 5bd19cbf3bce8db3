"""Replays of traces: what is known is exact, what is not is said and bounded."""

import json
from dataclasses import replace

import pytest
from toys import Bushy, Whatever, plain, run, tiny_target
from typer.testing import CliRunner

from outrider.cli import app
from outrider.drafters import NoDrafter
from outrider.errors import ParameterError
from outrider.plan.acceptance import Draft
from outrider.plan.replay import Replay, measured_costs, replay_table
from outrider.sampling import SamplingParams
from outrider.trace import Times, TraceWriter
from outrider.tree import DraftTree

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def texts(target):
    return [prompt + list(o.tokens) for prompt, o in zip(PROMPTS, plain(target, PROMPTS, PARAMS))]


def drafting(texts, wrong, stingy=False):
    """A drafter that is right but where `wrong(position)`; stingy: it proposes nothing from every seventh position."""

    def make(tokens, budget, times):
        text = next(t for t in texts if t[: len(tokens)] == list(tokens))
        if stingy and len(tokens) % 7 == 0:
            return DraftTree.chain(tokens[-1])
        there = range(len(tokens), min(len(tokens) + min(budget.nodes, budget.depth), len(text)))
        return DraftTree.chain(tokens[-1], [(text[i] + wrong(i)) % 101 for i in there])

    return Whatever(make)


def recorded(target, drafter, length, rule="block"):
    return [r for own in run(target, drafter, PROMPTS, PARAMS, rule, length)[1] for r in own]


@pytest.mark.parametrize("stingy", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4, 6, 8])
def test_shorter_chains_are_replayed_exactly(target, texts, length, stingy):
    """No recorded draft is accepted whole, so that every token has a verdict."""
    drafter = drafting(texts, lambda i: i % 5 == 0 or i % 11 == 3, stingy)
    replay = Replay(recorded(target, drafter, 8))
    truth = recorded(target, drafter, length)
    outcome = replay.outcome(Draft.chain(length))
    if stingy:  # where the drafter fell silent inside another draft is not in the trace
        assert outcome.rounds == pytest.approx(len(truth), rel=0.1)
    else:
        assert outcome.unknown == 0
        assert outcome.rounds == len(truth) and outcome.nodes == sum(r.proposed for r in truth)
        assert outcome.tokens_per_pass == sum(len(r.emitted) for r in truth) / len(truth)


def test_the_recorded_setting_is_its_own_replay(target, texts):
    rounds = recorded(target, drafting(texts, lambda i: i % 9 == 0, stingy=True), 4)
    outcome = Replay(rounds).outcome(Draft.chain(4))
    assert outcome.rounds == len(rounds) and outcome.nodes == sum(r.proposed for r in rounds)


def test_longer_chains_have_tokens_without_a_verdict(target, texts):
    drafter = drafting(texts, lambda i: i % 9 == 0)
    replay, truth = Replay(recorded(target, drafter, 2)), recorded(target, drafter, 8)
    outcome, low, high = (replay.outcome(Draft.chain(8), unknown) for unknown in (None, 0.0, 1.0))
    assert outcome.unknown > 0.5
    assert high.rounds <= len(truth) <= low.rounds and high.rounds < outcome.rounds < low.rounds


def test_trees(target, texts):
    """The right token is the third of three siblings: a chain gets nothing from it, three wide all."""
    rounds = [r for own in run(target, Bushy(texts), PROMPTS, PARAMS, "coupled", 9)[1] for r in own]
    replay = Replay(rounds)
    assert replay.ranks == (0.0, 0.0, 1.0)
    assert replay.outcome(Draft((3, 3, 3))).rounds == 2 * 60 / 4  # the recorded ones draft less where the text ends
    assert replay.outcome(Draft.chain(3)).tokens_per_pass == replay.outcome(Draft((2, 2))).tokens_per_pass == 1.0
    assert replay.outcome(Draft((3,))).tokens_per_pass == pytest.approx(2.0)
    wide = replay.outcome(Draft((5,)))
    assert wide.unknown == 0.1 and wide.tokens_per_pass == pytest.approx(2.0, abs=0.05)


def timed(rounds, first, row, propose):
    return [
        replace(
            r, sequences=1, number=r.number + 1, times=Times(propose=propose * r.proposed, forward=first + row * len(r.tokens))
        )
        for r in rounds
    ]


def test_what_it_costs_comes_from_the_trace(target, texts):
    plainly, drafted = recorded(target, NoDrafter(), 0), recorded(target, drafting(texts, lambda i: i % 5 == 0), 8)
    rounds = timed(plainly + drafted, 10_000_000, 1_000_000, 500_000)
    costs = measured_costs(rounds)
    assert costs.enough and costs.round(8) == pytest.approx(0.010 + 9 * 0.001 + 8 * 0.0005)
    assert costs.round(5) == pytest.approx(0.010 + 6 * 0.001 + 5 * 0.0005)
    (result,) = replay_table(rounds, [Draft.chain(2)]).values()
    (row,) = result["drafts"]
    assert result["plain_tokens_per_second"] == pytest.approx(1 / 0.011, rel=0.02)
    assert row["tokens_per_second"] == pytest.approx(row["tokens_per_pass"] / (0.013 + 0.001), rel=0.02)
    assert not measured_costs([replace(r, sequences=2) for r in rounds]).enough
    assert not measured_costs([r for r in rounds if len(r.tokens) == 9]).enough


def test_nothing_drafted_is_an_error(target):
    rounds = recorded(target, NoDrafter(), 4)
    with pytest.raises(ParameterError, match="nothing was drafted"):
        Replay(rounds)
    with pytest.raises(ParameterError, match="nothing was drafted"):
        replay_table(rounds, [Draft.chain(2)])


def test_the_command(target, texts, tmp_path):
    file = tmp_path / "trace.jsonl"
    rounds = recorded(target, drafting(texts, lambda i: i % 5 == 0), 8)
    with TraceWriter(file, {}) as trace:
        for r in rounds:
            trace.write(r)
    found = CliRunner().invoke(app, ["plan", "--trace", str(file), "--draft", "2,4x2", "--json"])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["drafters"]["whatever"]["drafts"]
    assert [row["draft"] for row in rows] == ["2", "4x2"] and rows[0]["without_verdict"] == 0 < rows[1]["without_verdict"]
    shown = CliRunner().invoke(app, ["plan", "--trace", str(file), "--draft", "2"])
    assert "no verdict" in shown.output and f"{rows[0]['tokens_per_pass']:.2f}" in shown.output
    planned = CliRunner().invoke(
        app, ["plan", "llama-3.2-1b", "--gpu", "RTX 3090", "--trace", str(file), "--draft", "2", "--batch", "1", "--json"]
    )
    assert planned.exit_code == 0, planned.output
    (plan,) = json.loads(planned.stdout)["acceptance"].values()
    assert plan["predictions"][1]["tokens_per_pass"] == rows[0]["tokens_per_pass"]
