"""The calibrator on simulated targets whose optimum is known, and in the loop, where it must not change what is said."""

from __future__ import annotations

import random
from collections import defaultdict
from statistics import fmean
from typing import Any

import laws
import pytest
import torch
from enumeration import Case
from simulated import (
    CURVES,
    Simulated,
    Simulation,
    Stub,
    Text,
    Timed,
    bursty,
    calibrator,
    clairvoyant,
    constant,
    curve,
    decaying,
    optimum,
    round_of,
)
from tiny import tiny_folder
from toys import plain

import outrider
from outrider import accept
from outrider.branching import Branch, outcomes
from outrider.calibrate import Calibrator
from outrider.calibrate.offers import Offer
from outrider.calibrate.parts import Plan
from outrider.decode import Sequence as Decoded
from outrider.decode import decode
from outrider.drafters import Drafter, State, load_drafter
from outrider.drafters.auto import AutoDrafter, AutoState
from outrider.drafters.base import Ask, NoDrafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.drafters.suffix import SuffixDrafter, SuffixOptions
from outrider.sampling import SamplingParams
from outrider.targets.table import TableTarget
from outrider.trace import Times
from outrider.tree import DraftTree

# ---- against the optimum -----------------------------------------------------------------------------------------------------

TEXTS = {
    "constant 0.3": constant(0.3),
    "constant 0.8": constant(0.8),
    "decaying": decaying(0.95, 0.9),
    "bursty": bursty(0.95, 0.2, 0.98),
    "in long bursts": bursty(0.95, 0.05, 0.99),
}
STEPS = (0.0, 0.25)
"""What a drafted level costs, as a share of a plain step."""


def achieved(text: Any, name: str, step: float, tokens: int, seed: int = 1, noise: float = 0.05) -> float:
    """The calibrator's speed over that of the optimal policy, on the same text; learning from nothing is included."""
    cost = curve(name)
    best = Simulation(text, cost, step * cost(1), seed)
    least, _ = best.run(optimum(best), tokens)
    simulation = Simulation(text, cost, step * cost(1), seed, noise)
    seconds, _ = simulation.run(calibrator(simulation), tokens)
    return least / seconds


@pytest.mark.parametrize("name", CURVES)
def test_it_reaches_the_optimum(name: str) -> None:
    found = {
        (kind, step): fmean(achieved(text, name, step, 1500, seed) for seed in (1, 2))
        for kind, text in TEXTS.items()
        for step in STEPS
    }
    print({key: round(value, 3) for key, value in found.items()})
    assert min(found.values()) > 0.88
    assert sum(found.values()) / len(found) > 0.95


@pytest.mark.parametrize("name", CURVES)
def test_with_scores_it_nearly_knows_what_comes(name: str) -> None:
    """The drafter's scores are the true chances. Held against who knows the chances of the whole text."""
    cost, tokens = curve(name), 1500
    for text in (bursty(0.95, 0.2, 0.95, scored=True), bursty(0.9, 0.4, 0.8, scored=True)):
        simulation = Simulation(text, cost, 0.0, 2, 0.05)
        made = calibrator(simulation)
        seconds, rounds = simulation.run(made, tokens)
        assert clairvoyant(simulation, 20, sum(len(r.emitted) for r in rounds)) / seconds > 0.93


def test_it_keeps_to_its_word_when_the_machine_slows_down() -> None:
    cost = curve("Qwen 1.5B Q4_K_M, ik_llama.cpp, repacked")
    slow = {"by": 1.0}
    simulation = Simulation(constant(0.8), lambda n: cost(n) * slow["by"], 0.1 * cost(1), 3, 0.1)
    made = calibrator(simulation)
    simulation.run(made, 1000)
    before = made._pass(4) / made._pass(1)
    slow["by"] = 2.0
    simulation.run(made, 300)
    assert made._pass(1) == pytest.approx(2 * cost(1), rel=0.25), "which it has hardly measured since"
    assert made._pass(4) / made._pass(1) == pytest.approx(before, rel=0.25)


def test_a_useless_drafter_costs_next_to_nothing_after_a_while() -> None:
    for name in CURVES:
        for step in (0.05, 0.35):
            cost = curve(name)
            simulation = Simulation(constant(0.01), cost, step * cost(1), 4, 0.05)
            made = calibrator(simulation)
            first, _ = simulation.run(made, 64)
            seconds, rounds = simulation.run(made, 1500, Stub(simulation.drafter))
            emitted = sum(len(r.emitted) for r in rounds)
            assert seconds < emitted * cost(1) / 0.98, (name, step)
            assert first < 64 * cost(1) * 1.4, (name, step)


def test_a_level_that_was_found_bad_is_tried_again_where_all_above_it_are_kept() -> None:
    """As long as one level is asked for, nothing is learned of the second."""
    cost = curve("SmolLM2, six rows at a time")
    for seed in range(4):
        simulation = Simulation(Text((lambda depth: 0.75 if depth == 1 else 0.1,)), cost, 0.3 * cost(1), seed, 0.03)
        made, s = calibrator(simulation), Stub(simulation.drafter)
        _, before = simulation.run(made, 400, s)
        simulation.text = constant(0.95)
        _, after = simulation.run(made, 300, s)
        assert sum(r.proposed > 1 for r in before[-50:]) < 20
        assert max(r.proposed for r in after[:10]) > 1 and sum(r.proposed > 2 for r in after[30:60]) > 20, seed


def test_a_drafter_that_another_outdoes_is_hardly_ever_asked() -> None:
    """In each of many short texts: what it is worth by itself is not what it would add."""
    cost = curve("SmolLM2, six rows at a time")
    asked = [0, 0]
    for seed in range(4, 9):
        simulation = Simulation(constant(0.7), cost, 0.1 * cost(1), seed, 0.03)
        better, worse = simulation.drafter, Simulated(simulation, dear=2.0, share=0.6)
        simulation.drafter = AutoDrafter([better, worse])
        made = calibrator(simulation)
        for i in range(80):
            s = Stub(simulation.drafter, 20 + 70 * i)
            s.state = AutoState(s.sampler, [State(s.sampler), State(s.sampler)])
            if i == 20:
                better.asked = worse.asked = 0
            simulation.run(made, 64, s)
        asked = [asked[0] + better.asked, asked[1] + worse.asked]
    assert asked[1] < 0.03 * asked[0]


def test_off_calls_no_drafter() -> None:
    cost = curve("Qwen 1.5B, transformers")
    simulation = Simulation(constant(0.05), cost, 0.3 * cost(1), 5)
    _, rounds = simulation.run(calibrator(simulation), 400)
    off = sum(r.budget.nodes == 0 for r in rounds)
    assert off > 0.95 * len(rounds) and simulation.drafter.asked == len(rounds) - off


def test_it_adapts_within_ten_rounds() -> None:
    """Prose, then copying, seen in the scores: at the latest in the tenth round it drafts at least half as far as it will in the end; and back."""
    cost = curve("SmolLM2, six rows at a time")
    for step in (0.0, 0.001):
        for seed in range(5):
            simulation = Simulation(bursty(0.97, 0.05, 1.0, scored=True), cost, step * cost(1), seed)
            simulation.states = [1] * 420 + [0] * 600 + [1] * 2000
            simulation.luck = [simulation.text_random.random() for _ in simulation.states]
            made, s = calibrator(simulation), Stub(simulation.drafter)
            simulation.run(made, 400, s)
            _, copying = simulation.run(made, 600, s)
            _, prose = simulation.run(made, 200, s)
            typical = sorted(r.proposed for r in copying[20:])[len(copying[20:]) // 2]
            assert typical >= 5 and max(r.proposed for r in copying[:11]) >= typical / 2, (step, seed)
            assert sum(r.proposed for r in prose[10:]) < 0.2 * typical * len(prose[10:]), (step, seed)


# ---- what is measured --------------------------------------------------------------------------------------------------------


def test_rows_of_a_batch_are_not_taken_for_rows_of_one_sequence() -> None:
    """Each further sequence costs as much as a pass. Neither the price of a row in the batch nor that of a pass alone follows it."""
    cost = curve("SmolLM2, six rows at a time")
    simulation = Simulation(constant(0.5), cost, 0.0, 8, 0.03)
    simulation.each = cost(1)
    made = calibrator(simulation)
    sequences = [Stub(simulation.drafter, 20 + 500 * i) for i in range(8)]
    for _ in range(3):
        simulation.run(made, 60)
        assert made._pass(1) == pytest.approx(cost(1), rel=0.15)
        assert made._pass(6) == pytest.approx(cost(6), rel=0.15)
        simulation.run_together(made, 60, sequences)
        assert made._pass(8) == pytest.approx(cost(8) + 7 * cost(1), rel=0.1)
        assert made._pass(12) - made._pass(8) < 3 * (cost(12) - cost(8))


def test_plain_passes_of_a_batch_are_measured_soon() -> None:
    """One wrong measurement of them would make rows look cheaper than they are for a long time."""
    simulation = Simulation(constant(0.9), curve("SmolLM2, six rows at a time"), 0.0, 9, 0.05)
    made = calibrator(simulation)
    simulation.run(made, 400)
    _, rounds = simulation.run_together(made, 60, [Stub(simulation.drafter, 20 + 500 * i) for i in range(16)])
    assert sum(r.rows == r.sequences for r in rounds) >= 4 * 16


# ---- in the loop ---------------------------------------------------------------------------------------------------------------

LAW: dict[str, Any] = {"vocab_size": 10, "seed": 11, "order": 2, "sharpness": 2.5, "context_length": 200}


def chaotic(drafter: Drafter, seed: int) -> Calibrator:
    """A calibrator whose clock jumps."""
    clock = random.Random(seed)
    time = [0]

    def now() -> int:
        time[0] += clock.choice((10, 1000, 100_000, 3_000_000))
        return time[0]

    return Calibrator(drafter, clock=now)


def parts(t: TableTarget, shape: str = "tree") -> AutoDrafter:
    model = ModelDrafter(TableTarget(**LAW, noise=0.8), ModelOptions(shape=shape), cost=0.3)
    return AutoDrafter([SuffixDrafter(SuffixOptions(shape=shape)), LookupDrafter(), model])


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 4, "presence_penalty": 0.4}])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_text_does_not_follow_the_clock(shape: str, values: dict[str, Any]) -> None:
    """Greedy, and with a seed: token for token what plain decoding says, whatever the clock makes it decide."""
    t = TableTarget(**LAW)
    prompts = [[1, 2, 3, 4, 5] * 4 + [1, 2], [7, 8, 9, 7, 8, 9, 7], [5]]
    decided = set()
    for seed in range(4):
        params = SamplingParams(max_tokens=40, seed=seed, ignore_eos=True, **values)
        wanted = plain(t, prompts, params, "coupled")
        drafter = parts(t, shape)
        pace = chaotic(drafter, seed)
        pace.warm_up(t, [1, 2, 3, 4, 5, 6, 7, 8, 9] * 4)
        for together in (prompts, prompts[:1]):
            sequences = [Decoded(t, prompt, params, "coupled", 0, i) for i, prompt in enumerate(together)]
            rounds = list(decode(t, drafter, sequences, pace))
            assert [tuple(s.output) for s in sequences] == [o.tokens for o in wanted[: len(together)]]
            decided.add(tuple((r.drafter, r.proposed) for r in rounds))
        assert t.open_slots == 0 and drafter.parts[2].model.open_slots == 0
    assert len(decided) >= 6, "the clock decided nothing"
    assert {name for each in decided for name, _ in each} == {"auto", "suffix", "lookup", "model"}


class Drawing(Drafter):
    """Chains drawn from a uniform law: under a q."""

    name = "drawing"
    least = 0.5
    most_depth = 1

    def open(self, sampler: Any) -> State:
        return State(sampler)

    def propose(self, work: Any) -> list[DraftTree]:
        return [self._draft(ask) for ask in work]

    def _draft(self, ask: Ask) -> DraftTree:
        drafts: list[int] = []
        q = []
        for _ in range(min(ask.budget.depth, ask.budget.nodes)):
            (((token,), law, _),) = ask.state.sampler.draw(torch.zeros(1, 2, dtype=torch.float64), [drafts])
            drafts.append(token)
            q.append(law)
        return DraftTree.chain(ask.tokens[-1], drafts, q)


@pytest.mark.parametrize("rule", ["block", "rejection", "traversal"])
def test_the_law_does_not_follow_the_clock(rule: str) -> None:
    """Every outcome of every draw over several rounds: decisions follow a clock that follows what was drafted and refused, the texts
    differ with it, and the law of the text is the target's.
    """
    case = Case("random", vocab=2, seed=5, prompt=(1, 0))
    verdict = getattr(accept, rule)
    n, decided = 4, set()

    class Numbers:
        """A draft stream over a grid that is exact for a uniform law on two tokens."""

        def __init__(self, source: Branch):
            self._source = source

        def uniform(self) -> float:
            return (0.25, 0.75)[self._source.choose((0.5, 0.5))]

    def run(source: Branch, salt: int) -> tuple[int, ...]:
        sampler = case.sampler(rule)
        sampler.draft_stream = Numbers(source)  # type: ignore[assignment]
        drafter = AutoDrafter([Guessing(), Drawing()])
        time = [0]
        pace = Calibrator(drafter, clock=lambda: time[0])
        pace.warm_up(Timed(Simulation(constant(1.0), lambda rows: 1.0 + 0.1 * rows, 0.0)), list(range(40)))
        s = Stub(drafter)
        s.state, s.tokens = drafter.open(sampler), list(case.prompt)
        history: list[Any] = []
        while (done := len(s.tokens) - 2) < n:
            s.room = n - done
            (budget,) = pace.budgets([s])
            tree = DraftTree.chain(s.tokens[-1])
            if budget.nodes and s.room > 1:
                (tree,) = pace.propose(drafter, [s], [Ask(s.state, s.tokens, budget)])
            logits = torch.stack([case.logits((*s.tokens[2:], *tree.path_tokens(i))) for i in range(len(tree))])
            decision = verdict(tree, sampler.probabilities(logits, tree), source)
            new = [*tree.path_tokens(decision.path[-1]), decision.next]
            history.append((tree.drafter, tree.tokens, decision.path))
            luck = random.Random(f"{salt} {history}").choice((0.2, 1.0, 9.0))
            time[0] += round(luck * 1e9)
            s.tokens += new
            sampler.commit(new)
            s.rounds += 1
            pace.learn([round_of(s, tree, budget, len(decision.path) - 1, Times(forward=round(luck * 1e9)))])
        decided.add(tuple((who, len(tokens) - 1) for who, tokens, _ in history))
        return tuple(s.tokens[2 : 2 + n])

    for salt in range(3):
        emitted: defaultdict[tuple[int, ...], float] = defaultdict(float)
        for weight, tokens, _ in outcomes(lambda source, salt=salt: run(source, salt)):
            emitted[tokens] += weight
        assert laws.compare(emitted, case.law, 2, n) < 1e-9
    assert {who for each in decided for who, _ in each} == {None, "guessing", "drawing"} and len(decided) >= 5


class Guessing(Drafter):
    """Point masses: always the same token, and sure of it at every other place."""

    name = "guessing"

    def open(self, sampler: Any) -> State:
        return State(sampler)

    def propose(self, work: Any) -> list[DraftTree]:
        made = []
        for ask in work:
            n = min(ask.budget.depth, ask.budget.nodes, 2)
            made.append(DraftTree.chain(ask.tokens[-1], [1] * n, score=[0.97 if len(ask.tokens) % 2 else 0.1] * n))
        return made


def test_a_batch_shares_its_rows() -> None:
    """Two sequences, one that copies and one that does not: the rows go to the one where they are kept."""
    made = Calibrator(Guessing())
    simulation = Simulation(constant(1.0), curve("convex"), 0.0)
    made.warm_up(Timed(simulation), list(range(40)))
    offers = []
    for sure in (0.95, 0.3):
        tree = DraftTree.chain(0, [1] * 8, score=[sure] * 8)
        reach = [sure**k for k in range(9)]
        offers.append(Offer(1.0, 0, tree, reach, list(range(1, 9)), 8))
    made._active = [None, None]  # type: ignore[list-item]
    one, other = made._shared(offers, 2 / made._pass(2))  # type: ignore[misc]
    assert one is not None and other is not None and one.taken > other.taken + 2 and one.taken + other.taken < 16


def test_a_useless_drafter_costs_a_whole_batch_next_to_nothing() -> None:
    """What is spent on trying it is shared by all sequences, not spent by each."""
    for name in ("Qwen 1.5B Q4_K_M, llama.cpp", "SmolLM2, six rows at a time", "convex"):
        for step in (0.0, 0.002, 0.05):
            cost = curve(name)
            simulation = Simulation(constant(0.01), cost, step * cost(16), 6, 0.05)
            made = calibrator(simulation)
            sequences = [Stub(simulation.drafter, 20 + 500 * i) for i in range(16)]
            simulation.run_together(made, 100, sequences)
            seconds, rounds = simulation.run_together(made, 300, sequences)
            plain = sum(len(r.emitted) for r in rounds) / 16 * cost(16)
            assert plain / seconds > (0.98 if step < 0.05 else 0.97), (name, step, plain / seconds)


def test_not_every_new_sequence_tries_what_did_not_pay_for_the_others() -> None:
    cost = curve("SmolLM2, six rows at a time")
    simulation = Simulation(constant(0.01), cost, 0.25 * cost(8), 8, 0.05)
    made = calibrator(simulation)
    simulation.run_together(made, 100, [Stub(simulation.drafter, 20 + 500 * i) for i in range(8)])
    seconds = 0.0
    for _ in range(10):
        sequences = [Stub(simulation.drafter, 20 + 500 * i) for i in range(8)]
        seconds += simulation.run_together(made, 40, sequences)[0]
    assert 400 * cost(8) / seconds > 0.98


@pytest.mark.parametrize("step", [0.0, 0.02])
@pytest.mark.parametrize("claims", [None, 0.1])
def test_a_batch_finds_out_that_a_drafter_has_become_useful(step: float, claims: float | None) -> None:
    """What is verified to learn from it is not given up for want of worth."""
    cost = curve("SmolLM2, transformers")
    chances = [0.02]
    text = Text((lambda k: chances[0],))
    simulation = Simulation(text, cost, step * cost(8), 7, 0.05)
    simulation.claims = claims
    made = calibrator(simulation)
    sequences = [Stub(simulation.drafter, 20 + 500 * i) for i in range(8)]
    _, before = simulation.run_together(made, 200, sequences)
    chances[0] = 0.95
    _, after = simulation.run_together(made, 120, sequences)
    assert sum(r.accepted for r in before[-400:]) < 40
    assert sum(r.accepted for r in after[-400:]) > 400


# ---- several drafters as one -----------------------------------------------------------------------------------------------------


def test_auto_takes_what_fits_and_what_is_given() -> None:
    t = TableTarget(**LAW)
    made = load_drafter("auto", t)
    assert isinstance(made, AutoDrafter) and [part.name for part in made.parts] == ["suffix"] and made.drafts_trees
    assert not load_drafter("auto", t, {"shape": "chain"}).drafts_trees
    folder = tiny_folder(eos=None, layers=2, hidden=16)
    target = outrider.load(str(folder), drafter=None).target
    more = load_drafter("auto", target, {"model": f"{folder},early-exit"})
    assert isinstance(more, AutoDrafter) and [part.name for part in more.parts][1:] == ["model", "early-exit"]


def test_rounds_say_who_drafted() -> None:
    t = TableTarget(**LAW)
    drafter = parts(t)
    s = Decoded(t, [1, 2, 3, 4, 5] * 4, SamplingParams(max_tokens=80, ignore_eos=True), "traversal")
    rounds = list(decode(t, drafter, [s], Calibrator(drafter)))
    assert {r.drafter for r in rounds if r.proposed} <= {"suffix", "lookup", "model"}
    assert {r.drafter for r in rounds if not r.proposed} <= {"auto"}
    assert sum(len(r.emitted) for r in rounds) == 80


def test_nothing_is_asked_of_no_drafter() -> None:
    t = TableTarget(**LAW)
    s = Decoded(t, [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True), "block")
    assert all(r.budget.nodes == 0 for r in decode(t, NoDrafter(), [s], Calibrator(NoDrafter())))


def test_a_probe_does_not_take_the_place_of_a_good_free_draft() -> None:
    probe, planned = Plan(paid=1, is_probe=True, worth=1e9), Plan(paid=1, worth=2.5)
    assert [probe.is_wanted(offered) for offered in (0.0, 0.9, 1.0, 2.0)] == [True, True, False, False]
    assert [planned.is_wanted(offered) for offered in (0.0, 2.0, 2.5, 3.0)] == [True, True, False, False]
