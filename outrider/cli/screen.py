"""Decoded text on the terminal, coloured by what became of each token. Without a terminal it is the text alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Iterable

from rich.console import Console
from rich.text import Text

from ..colours import COLOURS

if TYPE_CHECKING:
    from ..trace import Round


def show(round: Round) -> None:
    """Write a round's text as it comes. Text that a stop string held back has the colour of the round in which it is shown."""
    if not sys.stdout.isatty():
        sys.stdout.write(round.text)
        sys.stdout.flush()
        return
    console = Console()  # it knows what this terminal can do, and NO_COLOR
    for text, drafted in round.pieces:
        console.print(painted(text, "accepted" if drafted else round.own), end="", soft_wrap=True)


def painted(text: str, role: str | None) -> Text:
    """The text in the colour of `role`, plain for none."""
    return Text(text, style=COLOURS[role].terminal if role in COLOURS else "", end="")


def end_text() -> None:
    """A line's end after the text, where a person reads it."""
    if sys.stdout.isatty():
        sys.stdout.write("\n")
        sys.stdout.flush()


def counts(rounds: Iterable[Round]) -> dict[str, int]:
    """How many tokens had each role; the target's own in rounds without a draft are ``plain``."""
    found = dict.fromkeys((*COLOURS, "plain"), 0)
    for r in rounds:
        found["drafted"] += r.proposed
        found["accepted"] += r.accepted
        found["refused"] += r.proposed - r.accepted
        if (own := r.own) is not None:
            found[own] += 1
    return found


def legend(rounds: Iterable[Round]) -> None:
    """What the colours mean, with how many tokens had each: on stderr, where both it and the text are on a terminal."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        Console(stderr=True).print(legend_of(rounds), soft_wrap=True)


def legend_of(rounds: Iterable[Round]) -> Text:
    """The legend's line, with the roles that occurred."""
    found = counts(rounds)
    parts = [painted(f"{found[role]} {role}", role) for role in ("accepted", "refused", "recovered", "bonus") if found[role]]
    if found["plain"]:
        parts.append(Text(f"{found['plain']} without a draft"))
    return Text(", ").join(parts)
