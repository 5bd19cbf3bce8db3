"""How far figures of single prompts lie apart, and how sure a difference between two paired measurements is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Sequence

import numpy as np

RESAMPLES = 4000
FEWEST = 3
"""With fewer pairs no interval is given."""


@dataclass(frozen=True)
class Spread:
    """Of n values: the lowest, the quartiles (between two values by a straight line), the highest."""

    n: int
    low: float
    lower: float
    median: float
    upper: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of no values."""
        if not values:
            return None
        return cls(len(values), *map(float, np.percentile(values, (0, 25, 50, 75, 100))))


def as_dict(spread: Spread | None) -> dict[str, Any] | None:
    """For JSON."""
    return None if spread is None else asdict(spread)


@dataclass(frozen=True)
class Interval:
    """A mean of n paired values, with the bounds between which 95 % of the means of resampled pairs lie; None of fewer than 3."""

    n: int
    mean: float
    low: float | None
    high: float | None

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the bounds, so that the difference from it is more than chance."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def interval(values: Sequence[float]) -> Interval:
    """The mean and its bootstrap interval (Efron 1979), always from the same resamples."""
    given = np.asarray(values, dtype=float)
    mean = float(given.mean())
    if len(given) < FEWEST:
        return Interval(len(given), mean, None, None)
    drawn = np.random.default_rng(0).integers(len(given), size=(RESAMPLES, len(given)))
    low, high = np.percentile(given[drawn].mean(axis=1), (2.5, 97.5))
    return Interval(len(given), mean, float(low), float(high))


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """The geometric mean of ratios with its interval."""
    of_logs = interval([math.log(ratio) for ratio in ratios])
    low, high = (None if bound is None else math.exp(bound) for bound in (of_logs.low, of_logs.high))
    return Interval(of_logs.n, math.exp(of_logs.mean), low, high)
