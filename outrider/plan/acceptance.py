"""What is expected of a draft: tokens per pass, from acceptance rates.

A chain of length k whose tokens are accepted with probability a each, given those before, yields ``(1 - a^(k+1)) / (1 - a)`` tokens per
pass (Leviathan et al. 2023). Here rates may differ by depth, and a draft may be a tree with so many children below each node.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..errors import ParameterError

SIBLING = 0.5
"""A further sibling's chance, given that those before it were refused, as a share of the first one's; until it is measured."""


@dataclass(frozen=True)
class Draft:
    """widths: for each depth the children of every node there. ``(1, 1, 1)`` is a chain of three; ``()`` is no draft."""

    widths: tuple[int, ...] = ()

    @classmethod
    def chain(cls, length: int) -> Draft:
        return cls((1,) * length)

    @classmethod
    def parse(cls, text: str) -> Draft:
        """``5`` is a chain of five, ``4x2x1`` a tree."""
        try:
            widths = tuple(int(part) for part in text.split("x"))
        except ValueError:
            widths = ()
        if not widths or min(widths) < 0 or (len(widths) > 1 and min(widths) < 1):
            raise ParameterError(f"a draft is written 5 (a chain) or 4x2x1 (children at each depth); got {text!r}")
        draft = cls.chain(widths[0]) if len(widths) == 1 else cls(widths)
        if draft.nodes > 1024:
            raise ParameterError(f"the draft {text} has {draft.nodes} nodes; at most 1024 can be planned")
        return draft

    @property
    def levels(self) -> list[int]:
        """Nodes at depth 1, 2, ..."""
        return [prod(self.widths[: d + 1]) for d in range(len(self.widths))]

    @property
    def nodes(self) -> int:
        """Drafted tokens."""
        return sum(self.levels)

    @property
    def is_chain(self) -> bool:
        return all(width == 1 for width in self.widths)

    def __str__(self) -> str:
        return str(len(self.widths)) if self.is_chain else "x".join(map(str, self.widths))


@dataclass(frozen=True)
class Acceptance:
    """rates: chance that a drafted token of depth 1, 2, ... is kept, given that those above it were; the last one goes on.
    sibling: see SIBLING.
    """

    rates: tuple[float, ...]
    sibling: float = SIBLING

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ParameterError(f"acceptance rates are from 0 to 1; got {', '.join(map(str, self.rates)) or 'none'}")
        if not 0 <= self.sibling <= 1:
            raise ParameterError(f"the share of further siblings is from 0 to 1; got {self.sibling}")

    def at(self, depth: int, width: int = 1) -> float:
        """Chance that one of `width` siblings at this depth (from 1) is kept."""
        rate = self.rates[min(depth, len(self.rates)) - 1]
        return 1 - prod(1 - rate * self.sibling**rank for rank in range(width))

    def tokens(self, draft: Draft) -> float:
        """Expected tokens per pass, the one after the kept path included."""
        expected, reach = 1.0, 1.0
        for depth, width in enumerate(draft.widths, 1):
            reach *= self.at(depth, width)
            expected += reach
        return expected

    def nodes(self, draft: Draft) -> float:
        """Drafted tokens per pass: all of the draft's."""
        return float(draft.nodes)

    def __str__(self) -> str:
        return ", ".join(f"{rate:.2f}" for rate in self.rates)


def fit(tokens: float, draft: Draft) -> Acceptance:
    """The one rate at which this draft yields so many tokens per pass. Raises ParameterError where there is none."""
    if not 1 <= tokens <= len(draft.widths) + 1:
        raise ParameterError(
            f"a draft of depth {len(draft.widths)} yields 1 to {len(draft.widths) + 1} tokens per pass, not {tokens:.3g}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if Acceptance((middle,)).tokens(draft) < tokens else (low, middle)
    return Acceptance((low,))
