"""How likely a drafted node is to be kept, calibrated online for each drafter.

Before a draft there is only the depth to go by: how often a draft that may go so deep reaches it, and how often the node there is kept.
After it there is the drafter's own score of each node, which for drafters that look up grows with the match: scores are sorted into
cells, and each cell's frequency is shrunk towards the score itself. Frequencies forget, so that a drafter that changes, or was judged
too hard to be tried again, is judged anew.

Text that copies and text that does not come in stretches. So every cell has two frequencies, one for each of two moods, and a sequence is
believed to be in one or the other by what was kept and what was not: a hidden Markov model with two states, its chances learned online by
expectation maximisation. Where there are no stretches both moods come out alike, and the belief does not matter. What is left of the
difference between texts is a factor on the chance of a miss, for each sequence, shrunk towards 1.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from typing import Iterable

from ..tree import DraftTree

CELLS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985, 0.995)
"""Bounds between the cells of scores."""
DEPTHS = 24
"""Depths with a frequency of their own; those below share the last."""
STRENGTH = 4.0
"""Nodes that a prior counts for."""
CAUTION = 16.0
"""Nodes of a depth that it takes to correct the scores there by half of what they are off."""
FORGET = 0.01
"""Of a cell, with each new node in it."""
UNTRIED = 0.1
"""Of a level that was not asked for, each time that all above it are kept: one that was once found bad is tried again."""
FADING, FADES = 0.94, 32
"""What is left of all cells after so many rounds in which the drafter was asked."""
KEPT = 0.9
"""Of a drafter that nothing is known about: it is given a chance."""
ODDS = 2.5
"""By which the odds in the high mood are taken to be above the usual, and in the low mood below, before they are known."""
CHANGES = 0.02
"""How often the mood changes, by node and by round."""
SLOWLY, RARE = 0.01, 0.1
"""How fast it is learned how common the high mood is, and how rare either may be."""

ITS, ITS_FADES = 16.0, 0.02
"""Misses that it takes to believe half of it where a sequence looks easier or harder than others, and how fast that is forgotten, by node."""
FIRM = 100.0
"""Nodes in a cell after which a sequence that differs from it counts for half of that."""

Pair = tuple[float, float]
"""Of the low and of the high mood."""
NEVER = 0.01
HIGH: Pair = (0.0, 1.0)
"""The belief to be in the high mood."""
KNOWN = 5.0
"""So many nodes of the high mood make it known."""


def around(chance: float) -> Pair:
    """A chance in either mood, before it is known."""
    down, up = chance / ODDS, chance * ODDS
    return down / (1 - chance + down), up / (1 - chance + up)


SCORED = tuple(around(min(max((low + high) / 2, 0.02), 0.98)) for low, high in zip((0.0, *CELLS), (*CELLS, 1.0)))
UNKNOWN = around(KEPT)


class Frequencies:
    """Of some cells and both moods, how often what is in them comes true; each shrunk towards a prior.

    A decision comes after a pass that has swept the processor's caches, so that what it costs is mostly memory that it touches: a cell's four
    numbers lie side by side.
    """

    def __init__(self, cells: int):
        self._cells = array("d", bytes(32 * cells))
        """For each cell: what came true in the low and in the high mood, and of how much."""
        self.high = 0.0
        """How much was seen of the high mood."""

    def rates(self, cell: int, prior: Pair) -> Pair:
        cells, at = self._cells, 4 * cell
        return (
            (cells[at] + STRENGTH * prior[0]) / (cells[at + 2] + STRENGTH),
            (cells[at + 1] + STRENGTH * prior[1]) / (cells[at + 3] + STRENGTH),
        )

    def weight(self, cell: int) -> float:
        """How well its frequency is known, from 0 to 1: so far a sequence may be held against it."""
        seen = self._cells[4 * cell + 2] + self._cells[4 * cell + 3]
        return seen / (seen + FIRM)

    def add(self, cell: int, came: float, weights: Pair) -> None:
        """It came true or not, or was as likely as `came`; weights: how far each mood is held to have been the one."""
        cells, at, (low, high) = self._cells, 4 * cell, weights
        left = 1 - FORGET * low
        cells[at] = cells[at] * left + came * low
        cells[at + 2] = cells[at + 2] * left + low
        left, before = 1 - FORGET * high, cells[at + 3]
        cells[at + 1] = cells[at + 1] * left + came * high
        cells[at + 3] = before * left + high
        self.high += cells[at + 3] - before

    def forget(self, cell: int, weights: Pair) -> None:
        """It was not tried where it might have been."""
        cells, at = self._cells, 4 * cell
        before = cells[at + 3]
        for i in range(at, at + 4):
            cells[i] *= 1 - UNTRIED * weights[i % 2]
        self.high += cells[at + 3] - before

    def fade(self) -> None:
        self._cells = array("d", [n * FADING for n in self._cells])
        self.high *= FADING


class Mood:
    """Of one sequence and drafter: how far it is believed to be in the high mood."""

    __slots__ = ("_feared", "_missed", "high")

    def __init__(self, high: float = 0.5):
        self.high = high
        self._feared = self._missed = ITS

    @property
    def harder(self) -> float:
        """How many times as often as expected the drafter misses here."""
        return self._missed / self._feared

    def compare(self, chances: Pair, kept: bool, weight: float) -> None:
        """A node that was to be kept with these chances was kept or not. weight: how well these are known."""
        low, high = self.belief
        feared = low * (1 - chances[0]) + high * (1 - chances[1])
        self._feared += weight * feared + ITS_FADES * (ITS - self._feared)
        self._missed += weight * (not kept) + ITS_FADES * (ITS - self._missed)

    @property
    def belief(self) -> Pair:
        return 1 - self.high, self.high

    def weigh(self, chances: Pair, kept: bool) -> Pair:
        """What is believed after a node with these chances was kept or not."""
        low, high = chances if kept else (1 - chances[0], 1 - chances[1])
        low, high = low * (1 - self.high), high * self.high
        self.high = high / max(low + high, 1e-12)
        return self.belief

    def fade(self, common: float) -> None:
        """A token further on. common: how common the high mood is."""
        self.high += CHANGES * (common - self.high)


class Verdicts:
    """Frequencies of what is kept, and how common the high mood is."""

    def __init__(self, cells: int):
        self.kept = Frequencies(cells)
        self.common = 0.5
        self._learned = 0

    @property
    def high_is_known(self) -> bool:
        """Whether anything was seen of the high mood."""
        return self.kept.high > KNOWN

    def learn(self, cell: int, prior: Pair, kept: bool, mood: Mood) -> None:
        """A node was kept or not."""
        weights = mood.weigh(self.kept.rates(cell, prior), kept)
        self.kept.add(cell, kept, weights)
        self._learned += 1
        self.common += max(SLOWLY, 1 / (self._learned + 10)) * (mood.high - self.common)
        self.common = min(max(self.common, RARE if self.high_is_known else RARE / 10), 1 - RARE)
        mood.fade(self.common)


class Acceptance:
    """Of one drafter, over all sequences of a session."""

    def __init__(self) -> None:
        self._nodes = Verdicts(len(CELLS) + 1 + DEPTHS + 1)  # by score, and by depth where there is none
        self._depths = Verdicts(DEPTHS + 1)
        self._drafted = Frequencies(DEPTHS + 1)
        self._rounds = 0
        self._hoped, self._came = [CAUTION] * 32, [CAUTION] * 32
        """Of scored nodes, by the bit length of their depth, those above them having been kept: how many were to be expected, and were kept."""

    def _cell(self, score: float | None, depth: int) -> tuple[int, Pair]:
        """The cell of a node, and what is expected of it before anything is known."""
        if score is not None:
            cell = bisect(CELLS, score)
            return cell, SCORED[cell]
        first = len(CELLS) + 1
        return first + min(depth, DEPTHS), UNKNOWN if depth == 1 else self._nodes.kept.rates(first + 1, UNKNOWN)

    def moods(self) -> tuple[Mood, Mood]:
        """A new sequence's: of the nodes by score, and of the depths."""
        return Mood(self._nodes.common), Mood(self._depths.common)

    @property
    def changes(self) -> float:
        """How often a high mood begins, by round; 0 as long as none is known."""
        return CHANGES * self._depths.common if self._depths.high_is_known else 0.0

    def ahead(self, depth: int, belief: Pair, harder: float = 1.0) -> tuple[list[float], list[float]]:
        """For each depth from 0 to `depth`, of a draft that may go so deep: the chance that a node is drafted there and kept with all
        above it; and that one is drafted. Depths that are next to never reached are left out. harder: see `Mood`.
        """
        low, high = low_goes, high_goes = belief
        kept, drafted = [1.0], [1.0]
        prior, goes = UNKNOWN, (1.0, 1.0)
        for k in range(1, depth + 1):
            at = min(k, DEPTHS)
            prior = self._depths.kept.rates(at, prior)
            goes = self._drafted.rates(at, goes)
            more = 1 + (harder - 1) * self._depths.kept.weight(at)
            low *= max(1 - more * (1 - prior[0]), 0.0)
            high *= max(1 - more * (1 - prior[1]), 0.0)
            low_goes, high_goes = low_goes * goes[0], high_goes * goes[1]
            kept.append(low + high)
            drafted.append(low_goes + high_goes)
            if kept[k] < NEVER:
                break
        return kept, drafted

    def reach(self, tree: DraftTree, mood: Mood) -> list[float]:
        """The chance of each node to be kept with all above it. A mood lasts for a draft; that it may not is in what is corrected by depth."""
        score, parents, depths = tree.score, tree.parents, tree.depths
        lows, highs, reach = [1 - mood.high], [mood.high], [1.0]
        known: dict[int, Pair] = {}
        rates = self._nodes.kept.rates
        hoped, came = self._hoped, self._came
        for node in range(1, len(parents)):
            cell, prior = self._cell(score[node] if score else None, depths[node])
            if cell not in known:
                known[cell] = rates(cell, prior)
            down, up = known[cell]
            parent, size = parents[node], depths[node].bit_length()
            share = came[size] / hoped[size]
            lows.append(lows[parent] * min(down * share, 1.0))
            highs.append(highs[parent] * min(up * share, 1.0))
            reach.append(lows[node] + highs[node])
            if reach[node] < NEVER and tree.is_chain:  # nor anything below it
                return reach + [0.0] * (len(parents) - node - 1)
        return reach

    def learn_nodes(self, nodes: Iterable[tuple[float | None, int, bool]], mood: Mood) -> None:
        """Verified nodes whose parents were kept: score, depth, whether they were kept."""
        low, high = mood.belief
        hoped, came = self._hoped, self._came
        for score, depth, kept in nodes:
            cell, prior = self._cell(score, depth)
            if score is not None:
                down, up = self._nodes.kept.rates(cell, prior)
                size = depth.bit_length()
                hoped[size] += (low * down + high * up) / (low + high) + FORGET * (CAUTION - hoped[size])
                came[size] += kept + FORGET * (CAUTION - came[size])
                if kept:
                    low, high = low * down, high * up
            self._nodes.learn(cell, prior, kept, mood)

    def learn_depths(self, kept: int, verified: int, chances: list[float], allowed: int, mood: Mood) -> None:
        """What came of a draft that might have had `allowed` levels: for each level that it had, the chance that it was given, if all above
        it was kept. Some levels were verified, some of these kept.
        """
        drafted = len(chances)
        before = mood.belief
        prior = UNKNOWN
        for k in range(1, min(drafted + 1, allowed) + 1):
            at = min(k, DEPTHS)
            prior = self._depths.kept.rates(at, prior)
            if k <= verified:
                if k <= kept + 1:
                    mood.compare(prior, k <= kept, self._depths.kept.weight(at))
                    self._depths.learn(at, prior, k <= kept, mood)
            elif kept == verified:  # not verified, but the drafter's guess is known; or there was none
                self._depths.kept.add(at, chances[k - 1] if k <= drafted else 0.0, mood.belief)
            self._drafted.add(at, k <= drafted, before)
        if kept == allowed < DEPTHS:  # a level more might have been kept too
            self._depths.kept.forget(allowed + 1, before)
            self._drafted.forget(allowed + 1, before)

    def fade(self) -> None:
        """A round in which the drafter was asked is over."""
        self._rounds += 1
        if self._rounds % FADES == 0:
            for frequencies in (self._nodes.kept, self._depths.kept, self._drafted):
                frequencies.fade()

    def pass_by(self, nodes: Mood, depths: Mood) -> None:
        """A round of a sequence without news."""
        nodes.fade(self._nodes.common)
        depths.fade(self._depths.common)
