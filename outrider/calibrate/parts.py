"""What is known about a drafter, about a sequence, and what is planned for a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Sequence

from ..drafters.base import Drafter
from ..tree import DraftTree
from .acceptance import Acceptance
from .costs import Curve

FREE = 0.02
"""A draft below this share of a plain round is next to nothing."""
PROBES = 0.01
"""Most of the time that goes into trying drafters that did not pay."""
SAVED = 2000
"""Rounds in which time may be saved up for first trials."""
TYPICAL = 8
"""Levels of a draft that are looked at for that."""


class Part:
    """A drafter that can be asked: what a session has learned about it."""

    def __init__(self, drafter: Drafter, now: int = 0):
        """now: rounds of the session before it."""
        self.name = drafter.name
        self.context_length = drafter.context_length
        self.most_depth = drafter.most_depth
        self.acceptance = Acceptance()
        self.feeding = 0.0
        """Seconds for a token that it has missed."""
        self.rows = 2.0 if drafter.drafts_trees else 1.0
        """Rows for each level of its drafts."""
        self.nodes = 4 if drafter.drafts_trees else 1
        """Nodes that it is asked for, for each level."""
        self.asked = 0
        """How often it was asked."""
        self.fruitless = 0
        """Probes since it was last worth its cost to a sequence."""
        self.wanted = 8.0
        """Nodes that were worth verifying, lately."""
        self._saving = float(now)
        """Since this round it has saved for first trials."""
        self._guess = getattr(drafter, "least", 0.0)
        self.cost = Curve(is_proportional=self._guess > 0)
        """Seconds of a draft by the steps that it took."""
        self.is_free = self._guess * TYPICAL < FREE
        """Whether a draft costs next to nothing, as far as is known: then it is asked before anything is decided."""

    def limit(self, most: int, length: int) -> int:
        """How deep a draft may be where `most` is allowed, after so many tokens."""
        if self.context_length is not None:
            most = min(most, self.context_length - length)
        return most if self.most_depth is None else min(most, self.most_depth)

    def seconds(self, steps: int, plain: float) -> float:
        """What a draft of so many steps costs. plain: a plain round; before it is measured, a share of that is guessed for each step."""
        return self.cost(steps) if self.cost.is_measured else self._guess * steps * plain

    def steps(self, most: int, plain: float) -> list[float]:
        """The same for 0, 1, ... `most` steps."""
        if not self.cost.is_measured:
            return [self._guess * steps * plain for steps in range(most + 1)]
        return [seconds * self.cost.drift for seconds in self.cost.line(most)[: most + 1]]

    def learn(self, steps: int, seconds: float, plain: float) -> None:
        """What a draft of so many steps took."""
        self.cost.add(steps, seconds)
        self.is_free = self.cost(TYPICAL) < FREE * plain

    def can_spend(self, cost: float, now: int) -> bool:
        """Whether a first trial is paid for by what was saved, of each round a `PROBES` part; then that is spent. cost: in plain rounds.
        now: rounds of the session so far.
        """
        saving = max(self._saving, now - SAVED) + cost / PROBES
        if saving > now:
            return False
        self._saving = saving
        return True


class Stance:
    """How one sequence stands to one part."""

    __slots__ = ("depths", "idle", "kept", "look", "nodes", "pause", "resume", "seen", "worth")

    def __init__(self, part: Part) -> None:
        self.nodes, self.depths = part.acceptance.moods()
        self.worth: float | None = None
        """Tokens that asking it was worth, lately."""
        self.idle = 0
        """Rounds in which nothing that it offered was verified."""
        self.kept = 0
        """Most levels of a paid draft that were kept."""
        self.pause = 0
        self.resume = 0
        """Not asked before this round of the sequence."""
        self.look = 0
        """Nor thought about before this one."""
        self.seen = 0
        """Tokens of the sequence when it was last asked."""


@dataclass(slots=True)
class Plan:
    """One sequence's round. free: parts to ask at once; paid: one to ask if that is worth more, to this depth, perhaps as a probe;
    step: its price; rate: tokens a second by which its draft is judged.

    chosen, tree: whose draft is verified, and what of it. chances: of its levels before it was cut; allowed: levels it might have had.
    """

    free: list[int] = field(default_factory=list)
    paid: int | None = None
    is_probe: bool = False
    worth: float = 0.0
    depth: int = 0
    step: float = 0.0
    rate: float = 0.0
    chosen: int | None = None
    tree: DraftTree | None = None
    chances: list[float] = field(default_factory=list)
    allowed: int = 0

    def is_wanted(self, offered: float) -> bool:
        """Whether the one that costs is asked where a free draft is worth `offered` tokens: a probe costs that draft besides, so not for
        a token or more.
        """
        return offered < 1 if self.is_probe else self.worth > offered


class Track:
    """One sequence: how it stands to each part, and its plan for this round."""

    def __init__(self, parts: Sequence[Part], usual: float = 1.0):
        """usual: share of other sequences."""
        self.parts = parts
        self.stances = [Stance(part) for part in parts]
        self.rounds = 0
        self.plan = Plan()
        self._usual = usual
        self.tokens = self._left = 1
        """Tokens that were emitted, and those of them that no free draft gave."""
        self.last: int | None = None
        """Whose draft was verified last."""

    @property
    def share(self) -> float:
        """Of its tokens, those that are expected not to come of a free draft: so many are left to the drafters that cost."""
        return min(self._left / self.tokens, self._usual)

    def note(self, tokens: int) -> float:
        """The planned round emitted so many. Returns how many of them are no free draft's."""
        left = tokens if self.plan.chosen in (None, self.plan.paid) else 0
        self.tokens += tokens
        self._left += left
        self.last = self.last if self.plan.chosen is None else self.plan.chosen
        return left
