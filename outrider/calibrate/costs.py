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


class Number:
    """Of one number: its seconds before the common factor, and what they come from. times: of measurements by the curve itself, where it
    began as another's.
    """

    __slots__ = ("count", "first", "seconds", "times")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.first: list[float] = []
        self.count = self.times = 0

    def copy(self) -> Number:
        other = Number()
        other.seconds, other.first, other.count, other.times = self.seconds, list(self.first), self.count, self.times
        return other


class Curve:
    """Seconds by a whole number from 0 on."""

    def __init__(self, guess: float = 1.0, slope: float = GUESS, is_proportional: bool = False):
        """guess: at 0, in any unit, until something is measured. slope: what one more adds, as a share of the least known.
        is_proportional: as long as one number is known, others cost as much for each.
        """
        self._guess = guess
        self._slope = slope
        self._is_proportional = is_proportional
        self._numbers: dict[int, Number] = {}
        self._line: list[float] = []
        self._longest = 16
        self._changes = 0
        self._levels: list[float] | None = None  # of a shape: by how much its first measurements exceed it
        self.drift = 1.0
        self.since_plain = 0
        """Of a pass: rounds since one without a draft was measured."""

    def copy(self) -> Curve:
        other = Curve(self._guess, self._slope)
        other._numbers = {n: number.copy() for n, number in self._numbers.items()}
        other.drift = self.drift
        return other

    def shape(self, least: int) -> Curve:
        """A curve from `least` on that is as steep as this one, and takes its level from what is measured first."""
        other = Curve(self._guess, self._slope)
        if not self._numbers:
            return other
        for n, number in self._numbers.items():
            if n >= least:
                other._numbers[n] = number.copy()
                other._numbers[n].count, other._numbers[n].times = len(number.first), 0
        if not other._numbers:
            other._numbers[least] = Number()
            other._numbers[least].seconds = self.line(least)[least]
        other._levels = []
        other.drift = self.drift
        return other

    @property
    def is_measured(self) -> bool:
        return bool(self._numbers)

    def knows(self, n: int) -> bool:
        """Whether `n` or a smaller number was measured."""
        return n in self._numbers or any(known < n for known in self._numbers)

    def is_common(self, n: int, times: int) -> bool:
        """Whether `n` or smaller numbers were measured so often, by this curve itself where it began as another's shape."""
        if n in self._numbers and self._numbers[n].times >= times:
            return True
        return sum(number.times for known, number in self._numbers.items() if known <= n) >= times

    @property
    def most(self) -> int:
        """The largest number measured."""
        return max(self._numbers, default=0)

    def add(self, n: int, seconds: float) -> None:
        """A measurement."""
        seconds = max(seconds, 1e-9)  # a clock may not have moved
        number = self._numbers.get(n)
        if self._levels is not None:
            self._add_level(seconds / self.line(n)[n])
        elif number is None or len(number.first) < FIRST:
            number = self._numbers.setdefault(n, Number())
            number.first.append(seconds / self.drift)
            is_new = len(number.first) < FIRST  # and a first pass is slow as a rule
            number.seconds = min(number.first) if is_new else median(number.first)
            number.count += 1
            self._line = []
        else:
            off = math.log(seconds / (number.seconds * self.drift))
            off = min(max(off, -MOST_OFF), MOST_OFF)
            self.drift *= math.exp(COMMON * off)
            number.seconds *= math.exp(max(OWN, 1 / number.count) * off)
            number.count += 1
            self._changes += 1
            if self._changes > REDRAWN:
                self._line, self._changes = [], 0
        if number is not None:
            number.times += 1

    def _add_level(self, level: float) -> None:
        """By how much a measurement exceeds the shape."""
        assert self._levels is not None
        levels = self._levels = [*self._levels, level]
        self.drift = min(levels) if len(levels) < FIRST else median(levels)
        self._levels = levels if len(levels) < FIRST else None

    def line(self, most: int) -> list[float]:
        """Seconds for 0, 1, ... `most`, perhaps more, before the common factor `drift`."""
        if len(self._line) <= most:
            self._longest = max(self._longest, most)
            self._line = self._drawn(self._longest)
        return self._line

    def __call__(self, n: int) -> float:
        return self.line(n)[n] * self.drift

    def _drawn(self, most: int) -> list[float]:
        known = sorted(self._numbers)
        if not known:
            return [self._guess * (1 + self._slope * n) for n in range(most + 1)]
        first, last = known[0], known[-1]
        values = [self._numbers[n].seconds for n in known]
        slope = values[0] / first if self._is_proportional and first else self._slope * values[0]
        if first != last:
            slope = max((values[-1] - values[0]) / (last - first), 0.0)
        drawn = [max(values[0] - slope * (first - n), 0.1 * values[0]) for n in range(first)]
        for (n, here), (after, there) in pairwise(zip(known, values)):
            step = (there - here) / (after - n)
            drawn += [here + step * k for k in range(after - n)]
        return drawn + [values[-1] + slope * k for k in range(most - last + 1)]
