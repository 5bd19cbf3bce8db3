"""What became of a token, and the colour that says so: the same on the terminal, in reports and on the page of traces.

Colour never stands alone: accepted text is underlined, refused text struck through, and a legend has the words.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """terminal: one of the 16 colours that every terminal has, in the shade that its theme gives it, with an attribute where colour alone
    would not do. light, dark: for pages, on a light and on a dark ground. meaning: for legends.
    """

    terminal: str
    light: str
    dark: str
    meaning: str


COLOURS: dict[str, Colour] = {
    "drafted": Colour("bright_black", "#6b7280", "#9ca3af", "proposed by the drafter"),
    "accepted": Colour("green underline", "#15803d", "#4ade80", "drafted and kept"),
    "refused": Colour("red strike", "#b91c1c", "#f87171", "drafted and not kept"),
    "recovered": Colour("yellow", "#b45309", "#fbbf24", "the target's own, after a refusal"),
    "bonus": Colour("cyan", "#0e7490", "#22d3ee", "the target's own, after a draft that was kept whole"),
}
"""By role. The target's own tokens in rounds without a draft have no colour."""
