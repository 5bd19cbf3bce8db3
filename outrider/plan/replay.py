"""What other drafts would have given on the rounds of a trace.

The text is the trace's own. At each of its tokens the trace says, as a rule, what the drafter proposed there and which of it was
right: a kept node was, its siblings were not. A round under another setting is walked through these verdicts; it starts where the round
before it ended, perhaps in the middle of a recorded draft.

What a trace cannot say: a token that was never drafted has no verdict (the one after a wholly accepted draft, or beside fewer siblings than
asked). There it counts with the trace's own acceptance rate, and the result says how often that happened and what it would be with none and
with all of them accepted. And the drafter is taken to propose at a token what it proposed there when its round began elsewhere: true of
greedy draft models, nearly true of lookups, and for sampled drafts true on average only.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Iterable, Sequence

from ..errors import ParameterError
from ..trace import Round
from .acceptance import SIBLING, Draft

ENOUGH = 3
"""Rounds with one number of rows from which their median time is taken."""


@dataclass(frozen=True)
class Position:
    """One emitted token. rank: which sibling it was among those drafted, None for none of them; siblings: how many were drafted. limit:
    where a round began here and the drafter proposed less than it was allowed, how deep it went.
    """

    rank: int | None
    siblings: int
    limit: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Expected totals of a replay: rounds and drafted nodes; unknown: chance that a round meets a token without a verdict."""

    rounds: float
    nodes: float
    unknown: float
    tokens: int

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.rounds

    @property
    def nodes_per_pass(self) -> float:
        return self.nodes / self.rounds


class Replay:
    """The verdicts of a trace's rounds. Raises ParameterError where nothing was drafted."""

    def __init__(self, rounds: Iterable[Round]):
        self.rounds = [r for r in rounds if r.error is None]
        by_sequence: dict[int, list[Round]] = defaultdict(list)
        for r in self.rounds:
            by_sequence[r.sequence].append(r)
        self.sequences = [_positions(of_one) for of_one in by_sequence.values()]
        if not any(p.siblings for positions in self.sequences for p in positions):
            raise ParameterError("nothing was drafted in this trace: it says nothing about drafts")
        self.ranks = _rank_rates([p for positions in self.sequences for p in positions])

    def rate(self, first: int, width: int) -> float:
        """Acceptance of one of the siblings `first` to `width` - 1, given that those before were refused."""
        return 1 - prod(1 - self._rank(rank) for rank in range(first, width))

    def _rank(self, rank: int) -> float:
        return self.ranks[rank] if rank < len(self.ranks) else self.ranks[-1] * SIBLING ** (rank - len(self.ranks) + 1)

    def outcome(self, draft: Draft, unknown: float | None = None) -> Outcome:
        """Totals under this draft. unknown: acceptance of what has no verdict, instead of the trace's own rate."""
        walks = [self.walk(positions, draft, unknown) for positions in self.sequences]
        rounds, nodes, missing = (sum(walk[i] for walk in walks) for i in range(3))
        return Outcome(rounds, nodes, missing / rounds, sum(map(len, self.sequences)))

    def tokens(self, draft: Draft) -> float:
        """Tokens per pass, as `Acceptance.tokens` gives them."""
        return self.outcome(draft).tokens_per_pass

    def nodes(self, draft: Draft) -> float:
        """Drafted tokens per pass: fewer than the draft has where the drafter proposed less, or the text ended."""
        return self.outcome(draft).nodes_per_pass

    def walk(self, positions: Sequence[Position], draft: Draft, unknown: float | None = None) -> tuple[float, float, float]:
        """Expected rounds, drafted nodes and rounds that meet the unknown, for one sequence: backwards over where a round may begin."""
        end = len(positions)
        rounds, nodes, missing = [0.0] * (end + 1), [0.0] * (end + 1), [0.0] * (end + 1)
        for start in range(end - 1, -1, -1):
            depth = min(len(draft.widths), end - start - 1)
            if (limit := positions[start].limit) is not None:
                depth = min(depth, limit)
            levels = draft.levels[:depth]
            rounds[start], nodes[start] = 1.0, float(sum(levels))
            reach, met = 1.0, 0.0
            for kept, width in enumerate(draft.widths[:depth]):
                chance, known = self._verdict(positions[start + kept], width, unknown)
                met = met if known else max(met, reach)
                stop = start + kept + 1
                rounds[start] += reach * (1 - chance) * rounds[stop]
                nodes[start] += reach * (1 - chance) * nodes[stop]
                missing[start] += reach * (1 - chance) * missing[stop]
                reach *= chance
                if not reach:
                    break
            stop = min(start + depth + 1, end)
            rounds[start] += reach * rounds[stop]
            nodes[start] += reach * nodes[stop]
            missing[start] += reach * missing[stop] + met
        return rounds[0], nodes[0], missing[0]

    def _verdict(self, position: Position, width: int, unknown: float | None) -> tuple[float, bool]:
        """Chance that one of the first `width` siblings is right here, and whether the trace says so."""
        if position.rank is not None:
            return float(position.rank < width), True
        if width <= position.siblings:
            return 0.0, True
        return (self.rate(position.siblings, width) if unknown is None else unknown), False


def _positions(rounds: Sequence[Round]) -> list[Position]:
    """The emitted tokens of one sequence."""
    made = []
    for r in rounds:
        children: dict[int, list[int]] = defaultdict(list)
        depths = [0] * len(r.parents)
        for node, parent in enumerate(r.parents[1:], 1):
            children[parent].append(node)
            depths[node] = depths[parent] + 1
        held_back = len(r.tokens) - 1 < r.budget.nodes and max(depths) < r.budget.depth
        for i in range(len(r.emitted)):
            siblings = children[r.path[i]] if i < len(r.path) else []
            rank = siblings.index(r.path[i + 1]) if i + 1 < len(r.path) else None
            made.append(Position(rank, len(siblings), max(depths) if held_back and i == 0 else None))
    return made


def _rank_rates(positions: Sequence[Position]) -> tuple[float, ...]:
    """By rank: how often a sibling was right, of those drafted whose elder siblings were wrong."""
    rates = []
    for rank in range(max(p.siblings for p in positions)):
        asked = [p for p in positions if p.siblings > rank and (p.rank is None or p.rank >= rank)]
        if not asked:
            break
        rates.append(sum(p.rank == rank for p in asked) / len(asked))
    return tuple(rates)


# ---- what rounds cost --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Median seconds by rows of a pass over one sequence, and by drafted tokens; loop: of the rest of a round."""

    rows: dict[int, float]
    drafting: dict[int, float]
    loop: float

    @property
    def enough(self) -> bool:
        """Whether other numbers of rows can be told from these."""
        return len(self.rows) > 1

    def round(self, nodes: float) -> float:
        """A round that drafts so many tokens."""
        return _along(self.rows, nodes + 1) + (_along({0: 0.0, **self.drafting}, nodes) if nodes else 0.0) + self.loop


def measured_costs(rounds: Iterable[Round]) -> Costs:
    """What the rounds of single sequences took; each sequence's first round warms up and is left out."""
    single = [r for r in rounds if r.sequences == 1 and r.number > 0]
    rows, drafting = defaultdict(list), defaultdict(list)
    for r in single:
        rows[len(r.tokens)].append(r.times.forward / 1e9)
        if r.proposed:
            drafting[r.proposed].append(r.times.propose / 1e9)
    loop = [(r.times.total - r.times.forward - r.times.propose) / 1e9 for r in single]
    medians = [
        {n: statistics.median(times) for n, times in sorted(found.items()) if len(times) >= ENOUGH}
        for found in (rows, drafting)
    ]
    return Costs(medians[0], medians[1], statistics.median(loop) if loop else 0.0)


def _along(known: dict[int, float], at: float) -> float:
    """Between known points, and beyond them, along straight lines; never below the least known value."""
    points = sorted(known.items())
    if len(points) == 1:
        return points[0][1]
    i = next((i for i, (n, _) in enumerate(points) if n >= at), len(points) - 1)
    (n0, t0), (n1, t1) = points[max(i, 1) - 1], points[max(i, 1)]
    return max(t0 + (t1 - t0) * (at - n0) / (n1 - n0), min(known.values()))


def replay_table(rounds: Sequence[Round], drafts: Sequence[Draft]) -> dict[str, Any]:
    """A trace's rounds under other drafts, for JSON: one entry for each drafter in it."""
    names = dict.fromkeys(r.drafter for r in rounds if r.drafter != "none" and r.proposed)
    if not names:
        raise ParameterError("nothing was drafted in this trace: it says nothing about drafts")
    return {name: _replayed([r for r in rounds if r.drafter == name], rounds, drafts) for name in names}


def _replayed(own: list[Round], rounds: Sequence[Round], drafts: Sequence[Draft]) -> dict[str, Any]:
    replay = Replay(own)
    costs = measured_costs([*own, *(r for r in rounds if r.drafter == "none")])
    plain = 1 / costs.round(0) if costs.enough else None
    made = []
    for draft in drafts:
        outcome, low, high = (replay.outcome(draft, unknown) for unknown in (None, 0.0, 1.0))
        speed = outcome.tokens_per_pass / costs.round(outcome.nodes_per_pass) if costs.enough else None
        made.append(
            {
                "draft": str(draft),
                "tokens_per_pass": outcome.tokens_per_pass,
                "at_least": low.tokens_per_pass,
                "at_most": high.tokens_per_pass,
                "nodes_per_pass": outcome.nodes_per_pass,
                "without_verdict": outcome.unknown,
                "tokens_per_second": speed,
                "gain": speed / plain if speed and plain else None,
            }
        )
    return {
        "tokens": sum(map(len, replay.sequences)),
        "recorded": {
            "rounds": len(replay.rounds),
            "tokens_per_pass": sum(len(r.emitted) for r in replay.rounds) / len(replay.rounds),
            "nodes_per_pass": sum(r.proposed for r in replay.rounds) / len(replay.rounds),
        },
        "acceptance_by_rank": replay.ranks,
        "costs": asdict(costs),
        "plain_tokens_per_second": plain,
        "drafts": made,
    }
