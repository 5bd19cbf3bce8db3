"""What became of a token, and the colour that says so: the same on the terminal, in reports and on the page of traces.

The shades for pages are near those of Okabe and Ito (2008), which people with every kind of colour vision can tell apart, and have a
contrast of 4.5 or more with their ground. Colour never stands alone: accepted text is underlined, refused text struck through, and a legend has the words.
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
    "drafted": Colour("bright_black", "#5f6773", "#9aa4b2", "proposed by the drafter"),
    "accepted": Colour("green underline", "#00735c", "#35c9a5", "drafted and kept"),
    "refused": Colour("red strike", "#b23a12", "#ff8a5c", "drafted and not kept"),
    "recovered": Colour("yellow", "#8a6100", "#f0c04a", "the target's own, after a refusal"),
    "bonus": Colour("cyan", "#0a64a4", "#66b8f2", "the target's own, after a draft that was kept whole"),
}
"""By role. The target's own tokens in rounds without a draft have no colour."""
