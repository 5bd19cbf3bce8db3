"""The calibrator with drafters that pay for each step and for what they have not read: draft models, heads."""

from __future__ import annotations

from statistics import fmean, median

import pytest
from simulated import Careful, Simulation, Stub, bursty, calibrator, constant, curve

from outrider.calibrate.parts import Plan, Track
from outrider.decode import Fixed

COST = curve("Qwen 1.5B, six rows at a time")
STEP = 0.35


def careful(high: float, low: float, stay: float, seed: int = 1) -> Simulation:
    """A text whose every other stretch is harder to guess, and a model that knows where."""
    simulation = Simulation(bursty(high, low, stay, scored=True), COST, STEP * COST(1), seed, 0.03)
    simulation.drafter = Careful(simulation)
    return simulation


def test_a_pass_that_gave_nothing_is_paid_for_too() -> None:
    """A model that stopped after a step without a guess took one more than its draft has levels."""
    simulation = careful(0.97, 0.01, 0.9)
    made = calibrator(simulation)
    _, rounds = simulation.run(made, 600)
    assert sum(0 < r.proposed < r.budget.depth for r in rounds) > 20
    (part,) = made._parts.values()
    assert [part.cost(n) for n in range(1, 6)] == pytest.approx([n * simulation.step for n in range(1, 6)], rel=0.15)


@pytest.mark.parametrize("chances", [(0.98, 0.6, 0.97), (0.95, 0.7, 0.9), (0.9, 0.9, 1.0)])
def test_stopping_early_is_no_reason_to_stop_earlier(chances: tuple[float, float, float]) -> None:
    """How often drafts go on follows from the price that they were given for a step. It drafts as fast as the best fixed length does."""
    speeds = []
    for seed in range(4):
        seconds = {}
        for length in (1, 2, 3, 4, 6):
            simulation = careful(*chances, seed)
            seconds[length], _ = simulation.run(Fixed(length), 1500)
        simulation = careful(*chances, seed)
        spent, _ = simulation.run(calibrator(simulation), 1500)
        speeds.append(min(seconds.values()) / spent)
    print([round(speed, 3) for speed in speeds])
    assert fmean(speeds) > 0.97


def test_a_good_draft_is_no_reason_to_stop() -> None:
    """Its own good drafts make a second dear, but what it is paid with in plain decoding is dearer: it goes on as long as it keeps."""
    stopped = good = 0
    for seed in range(8):
        _, rounds = (simulation := careful(0.97, 0.6, 0.95, seed)).run(calibrator(simulation), 1500)
        for before, here, after in zip(rounds, rounds[1:], rounds[2:]):
            if before.proposed >= 3 and len(before.emitted) - 1 == before.proposed:
                good += 1
                stopped += here.budget.depth == after.budget.depth == 0
    assert good > 400 and stopped < 0.01 * good


def test_it_waits_as_long_as_reading_takes() -> None:
    """Whether a drafter that has a prompt to read will pay shows in that time; and a text that ends before it has paid is not worth it."""
    simulation = Simulation(constant(0.97), COST, STEP * COST(1), 3, 0.03)
    simulation.drafter = drafter = Careful(simulation)
    drafter.feed = COST(1) / 40
    made = calibrator(simulation)
    for _ in range(3):
        simulation.run(made, 60, Stub(drafter, 216))
    for length, least in ((66, 1), (116, 4), (216, 5), (416, 8), (616, 13)):
        _, rounds = simulation.run(made, 120, Stub(drafter, length))
        first = next(i for i, r in enumerate(rounds) if r.budget.depth)
        assert least <= first < 2.5 * least + 2, length
        assert rounds[first].budget.depth <= 3 and median(r.budget.depth for r in rounds[first:]) > 3
    asked, short = drafter.asked, Stub(drafter, 416)
    short.room = 14
    simulation.run(made, 13, short)
    assert drafter.asked == asked


@pytest.mark.parametrize(("usual", "easy"), [(0.6, 0.97), (0.75, 0.9)])
def test_a_text_easier_than_others_is_drafted_for_further(usual: float, easy: float) -> None:
    """That no more than one or two guesses were worth it in all texts before it does not hold it back for long."""
    speeds = []
    for seed in range(12):
        simulation = Simulation(constant(usual, scored=True), COST, STEP * COST(1), seed, 0.03)
        simulation.drafter = Careful(simulation)
        made = calibrator(simulation)
        for _ in range(12):
            simulation.run(made, 100, Stub(simulation.drafter))
        simulation.text = constant(easy, scored=True)
        spent, _ = simulation.run(made, 120, Stub(simulation.drafter))
        seconds = [simulation.run(Fixed(length), 240)[0] / 2 for length in (1, 2, 3, 4, 6)]
        speeds.append(min(seconds) / spent)
    print([round(speed, 3) for speed in speeds])
    assert fmean(speeds) > 0.82


def test_what_free_drafts_give_is_not_hoped_for() -> None:
    """A drafter that has a prompt to read is of use only where those that cost nothing have no guess."""
    track = Track([])
    assert track.share == 1
    for chosen, tokens in ((None, 1), (0, 9), (0, 7), (1, 2)):
        track.plan = Plan(paid=1, chosen=chosen)
        track.note(tokens)
    assert track.share == (1 + 1 + 2) / (1 + 19)


def test_what_gave_nothing_is_tried_at_most_once_in_a_text() -> None:
    """A new text does not begin with short pauses where no other has found anything; where one does, it is tried again."""
    simulation = Simulation(constant(0.01), COST, 0.7 * COST(1), 3, 0.03)
    made = calibrator(simulation)
    tries = []
    for _ in range(10):
        _, rounds = simulation.run(made, 80, Stub(simulation.drafter, 20))
        tries.append(sum(r.budget.depth > 0 for r in rounds))
    assert max(tries[3:]) <= 1 < max(tries)
    simulation.text = constant(0.97)
    _, rounds = simulation.run(made, 3000)
    assert sum(r.budget.depth > 0 for r in rounds[-100:]) > 30
    (part,) = made._parts.values()
    assert part.fruitless < 3


def test_what_was_saved_is_spent_in_the_first_half_of_a_text() -> None:
    """A trial late in a text could be of use for the next one only, and at its beginning it would be of use for that one too."""
    simulation = Simulation(constant(0.01), COST, COST(1), 3, 0.03)
    made = calibrator(simulation)
    tried = []
    for _ in range(40):
        text = Stub(simulation.drafter)
        text.room = 40
        _, rounds = simulation.run(made, 80, text)
        tried.append([i for i, r in enumerate(rounds) if r.budget.depth])
    late = [places for places in tried[5:] if places]
    assert len(late) > 10 and max(map(max, late)) <= 40


def test_a_drafter_that_never_has_a_guess_is_soon_left_alone() -> None:
    """It takes a step to have none. And what would have to read all that it has missed is not tried again late in a text."""
    simulation = Simulation(constant(0.01, scored=True), COST, STEP * COST(1), 3, 0.03)
    simulation.drafter = drafter = Careful(simulation)
    drafter.feed = COST(1) / 40
    made = calibrator(simulation)
    tried = []
    for _ in range(12):
        text = Stub(drafter, 60)
        text.room = 100
        _, rounds = simulation.run(made, 240, text)
        tried.append([i for i, r in enumerate(rounds) if r.budget.depth])
    assert 1 < len(tried[0]) < 25 and all(len(places) <= 2 for places in tried[2:])
    assert max(max(places, default=0) for places in tried[2:]) <= 100
