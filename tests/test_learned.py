"""What the calibrator learns, by itself: curves of costs, and how likely nodes are to be kept."""

from __future__ import annotations

import random

import pytest

from outrider.calibrate.acceptance import Acceptance, Mood
from outrider.calibrate.costs import Curve
from outrider.tree import DraftTree


def test_a_shape_takes_its_level_from_what_is_measured() -> None:
    """In a batch that grows and shrinks each curve comes from another; what one has not measured is not taken for known."""
    first = Curve()
    for n in (1, 2, 4, 8, 12, 16) * 5:
        first.add(n, 1 + n / 16)
    larger = first.shape(16)
    for _ in range(5):
        larger.add(16, 6.0)
    assert larger(16) == pytest.approx(6.0) and larger(18) > 6.0
    smaller = larger.shape(8)
    for _ in range(5):
        for n in (12, 8):
            smaller.add(n, 2.0 + n / 8)
    assert smaller(8) == pytest.approx(3.0, rel=0.1) and smaller(12) == pytest.approx(3.5, rel=0.1)
    assert first(8) == pytest.approx(1.5) and first.shape(64)(64) > 0
    assert not Curve().shape(4).is_measured


def test_a_curve_is_as_it_is() -> None:
    made = Curve()
    for rows, seconds in ((1, 392.0), (2, 825.0), (8, 1256.0), (4, 1176.0)):
        for _ in range(5):
            made.add(rows, seconds)
    assert [made(n) for n in (1, 2, 4, 8)] == pytest.approx([392, 825, 1176, 1256])
    assert made(3) == pytest.approx((825 + 1176) / 2) and made(6) == pytest.approx((1176 + 1256) / 2)
    assert made(16) > made(8)
    made.add(8, 99999.0)
    assert made(8) == pytest.approx(1256, rel=0.1), "one outlier says little"
    for _ in range(60):
        made.add(4, 2352.0)
    assert 560 < made(1) < 800, "all of the machine became slower"


def test_drafts_cost_as_much_for_each_step_until_more_is_known() -> None:
    """A first draft of 3 levels does not make one of 15 look as cheap, nor one of 15 one of 3 as dear."""
    for steps in (3, 15):
        made = Curve(is_proportional=True)
        made.add(steps, steps * 0.25)
        assert [made(n) for n in (2, 3, 15)] == pytest.approx([0.5, 0.75, 3.75])
    made.add(5, 2.0)
    assert [made(n) for n in (5, 10, 15)] == pytest.approx([2.0, 2.875, 3.75])


def test_a_new_sequence_is_believed_to_be_like_the_others() -> None:
    made, mood = Acceptance(), Mood()
    for _ in range(300):
        made.learn_depths(0, 1, [0.5], 1, mood)
    _, depths = made.moods()
    assert depths.high == pytest.approx(made._depths.common) and depths.high < 0.2


def test_a_text_that_is_easier_or_harder_than_others_is_seen_to_be() -> None:
    """A new one is taken for one of them; and the first text of all is no easier or harder than itself."""
    draws = random.Random(2)
    made = Acceptance()

    def text(chance: float, rounds: int = 40) -> Mood:
        _, mood = made.moods()
        for _ in range(rounds):
            kept = int(draws.random() < chance)
            made.learn_depths(kept + int(kept and draws.random() < chance), 2, [0.7, 0.7], 2, mood)
        return mood

    assert 0.9 < text(0.2, 10).harder < 1.2
    for _ in range(20):
        text(0.7)
    easy, hard, new = text(0.98), text(0.4), made.moods()[1]
    assert easy.harder < 0.85 and hard.harder > 1.1 and new.harder == 1
    own, others = made.ahead(2, easy.belief, easy.harder)[0], made.ahead(2, easy.belief)[0]
    assert own[1] > others[1] and own[2] / own[1] > others[2] / others[1]


def test_scores_that_are_too_high_in_deep_nodes_are_seen_through() -> None:
    """The deeper, the less a score is worth: what a node can be expected to be kept with all above it is what it is kept."""
    draws = random.Random(3)
    made, mood = Acceptance(), Mood()

    def chance(depth: int) -> float:
        return 0.95 if depth < 4 else 0.75

    for _ in range(1500):
        nodes = []
        for depth in range(1, 13):
            nodes.append((0.95, depth, draws.random() < chance(depth)))
            if not nodes[-1][2]:
                break
        made.learn_nodes(nodes, mood)
    reach = made.reach(DraftTree.chain(0, [1] * 12, score=[0.95] * 12), Mood(made._nodes.common))
    truth = [0.95 ** min(depth, 3) * 0.75 ** max(depth - 3, 0) for depth in range(13)]
    assert reach[:6] == pytest.approx(truth[:6], abs=0.15) and reach[6:] == pytest.approx(truth[6:], abs=0.07)


def test_moods_come_out_alike_where_there_are_none() -> None:
    draws = random.Random(1)
    made, mood = Acceptance(), Mood()
    for _ in range(3000):
        made.learn_nodes([(0.6, 1, draws.random() < 0.4)], mood)
    low, high = (made.reach(DraftTree.chain(0, [1], score=[0.6]), _mood(at))[1] for at in (0.0, 1.0))
    assert high - low < 0.25 and made.reach(DraftTree.chain(0, [1], score=[0.6]), mood)[1] == pytest.approx(0.4, abs=0.08)


def _mood(high: float) -> Mood:
    made = Mood()
    made.high = high
    return made
