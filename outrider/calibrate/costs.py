"""What passes and drafts cost, as measured: seconds by a whole number, of rows or of drafted levels.

A curve is kept as it is: between measured numbers it is straight, and nothing is assumed about its shape. A machine that becomes slower or
faster as a whole moves the whole curve, by a common factor that follows what is measured faster than any number does by itself.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

FIRST = 3
"""Measurements of a number that its median is taken of; later ones move it."""
OWN, COMMON = 0.03, 0.12
"""How far one that differs from what was expected moves its own number (further at first), and how far all of them, in logarithms. Both
follow the same difference, so that numbers do not wander against each other where only one is measured."""
REDRAWN = 8
"""Measurements after which the line is drawn again; one of them moves it little."""
MOST_OFF = 0.25
"""More than this is an outlier, and counts as this."""
GUESS = 0.02
"""Before two numbers are measured, how much one more adds, as a share."""


class Curve:
    """Seconds by a whole number from 0 on."""

    def __init__(self, guess: float = 1.0, slope: float = GUESS):
        """guess: at 0, in any unit, until something is measured. slope: what one more adds, as a share of the least known."""
        self._guess = guess
        self._slope = slope
        self._known: dict[int, float] = {}
        self._first: dict[int, list[float]] = {}
        self._counts: dict[int, int] = {}
        self._times: dict[int, int] = {}
        self._line: list[float] = []
        self._longest = 16
        self._changes = 0
        self._levels: list[float] | None = None  # of a shape: by how much its first measurements exceed it
        self.drift = 1.0
        self.since_plain = 0
        """Of a pass: rounds since one without a draft was measured."""

    def copy(self) -> Curve:
        other = Curve(self._guess, self._slope)
        other._known = dict(self._known)
        other._first = {n: list(first) for n, first in self._first.items()}
        other._counts, other._times = dict(self._counts), dict(self._times)
        other.drift = self.drift
        return other

    def shape(self, least: int) -> Curve:
        """A curve from `least` on that is as steep as this one, and takes its level from what is measured first."""
        if not self._known:
            return Curve(self._guess, self._slope)
        other = Curve(self._guess, self._slope)
        other._known = {n: known for n, known in self._known.items() if n >= least} or {least: self.line(least)[least]}
        other._first = {n: list(first) for n, first in self._first.items() if n in other._known}
        other._counts = {n: len(first) for n, first in other._first.items()}
        other._levels = []
        other.drift = self.drift
        return other

    @property
    def is_measured(self) -> bool:
        return bool(self._known)

    def knows(self, n: int) -> bool:
        """Whether `n` or a smaller number was measured."""
        return n in self._known or any(known < n for known in self._known)

    def times(self, n: int) -> int:
        """How often `n` or a smaller number was measured, for this curve itself where it began as another's shape."""
        return sum(count for known, count in self._times.items() if known <= n)

    @property
    def most(self) -> int:
        """The largest number measured."""
        return max(self._known, default=0)

    def add(self, n: int, seconds: float) -> None:
        """A measurement."""
        seconds = max(seconds, 1e-9)  # a clock may not have moved
        self._times[n] = self._times.get(n, 0) + 1
        if self._levels is not None:
            levels = self._levels = [*self._levels, seconds / self.line(n)[n]]
            self.drift = min(levels) if len(levels) < FIRST else median(levels)
            self._levels = levels if len(levels) < FIRST else None
            return
        first = self._first.setdefault(n, [])
        if len(first) < FIRST:
            first.append(seconds / self.drift)
            self._known[n] = min(first) if len(first) < FIRST else median(first)  # a first pass is slow as a rule
        else:
            off = math.log(seconds / (self._known[n] * self.drift))
            off = min(max(off, -MOST_OFF), MOST_OFF)
            self.drift *= math.exp(COMMON * off)
            self._known[n] *= math.exp(max(OWN, 1 / self._counts[n]) * off)
        self._counts[n] = self._counts.get(n, 0) + 1
        self._changes += 1
        if len(first) < FIRST or self._counts[n] <= FIRST or self._changes > REDRAWN:
            self._line, self._changes = [], 0

    def line(self, most: int) -> list[float]:
        """Seconds for 0, 1, ... `most`, perhaps more, before the common factor `drift`."""
        if len(self._line) <= most:
            self._longest = max(self._longest, most)
            self._line = self._drawn(self._longest)
        return self._line

    def __call__(self, n: int) -> float:
        return self.line(n)[n] * self.drift

    def _drawn(self, most: int) -> list[float]:
        known = sorted(self._known)
        if not known:
            return [self._guess * (1 + self._slope * n) for n in range(most + 1)]
        first, last = known[0], known[-1]
        values = [self._known[n] for n in known]
        slope = self._slope * values[0]
        if first != last:
            slope = max((values[-1] - values[0]) / (last - first), 0.0)
        drawn = [max(values[0] - slope * (first - n), 0.1 * values[0]) for n in range(first)]
        for (n, here), (after, there) in pairwise(zip(known, values)):
            step = (there - here) / (after - n)
            drawn += [here + step * k for k in range(after - n)]
        return drawn + [values[-1] + slope * k for k in range(most - last + 1)]
