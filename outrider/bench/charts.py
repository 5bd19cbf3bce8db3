"""Charts as SVG text: lines and bars with their spread. No library: they follow a page's light and dark ground through its style sheet.

Every value has a tooltip with its numbers; a page puts the same numbers in a table beside the chart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import Callable, Sequence

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 14, 42
COLOURS = 8
"""How many series have a colour of their own: the classes s0 to s7 of `STYLE`."""

STYLE = """
.chart { --s0: #2563eb; --s1: #c2410c; --s2: #15803d; --s3: #7e22ce; --s4: #0e7490; --s5: #a16207; --s6: #be185d; --s7: #4b5563; }
@media (prefers-color-scheme: dark) {
  .chart { --s0: #60a5fa; --s1: #fb923c; --s2: #4ade80; --s3: #c084fc; --s4: #22d3ee; --s5: #facc15; --s6: #f472b6; --s7: #9ca3af; }
}
.chart svg { width: 100%; max-width: 720px; height: auto; font: 12px system-ui, sans-serif; }
.chart text { fill: currentColor; }
.chart .grid { stroke: currentColor; opacity: 0.15; }
.chart .mark { stroke: currentColor; opacity: 0.6; stroke-dasharray: 4 3; }
.chart .spread { stroke: currentColor; opacity: 0.7; }
.chart .line { fill: none; stroke-width: 2; }
.chart .dashed { stroke-dasharray: 6 4; }
.chart .key { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.3em 0 1em; border-radius: 2px; }
""" + "\n".join(
    f".chart .s{i} {{ stroke: var(--s{i}); }} .chart .f{i} {{ fill: var(--s{i}); background: var(--s{i}); }}"
    for i in range(COLOURS)
)


@dataclass(frozen=True)
class Value:
    """A value at `x` (a number for lines, a name for bars), with the range that is drawn through it."""

    x: float | str
    y: float
    low: float | None = None
    high: float | None = None

    @property
    def highest(self) -> float:
        return self.y if self.high is None else max(self.y, self.high)

    @property
    def words(self) -> str:
        """For the tooltip."""
        span = f" ({number(self.low)} to {number(self.high)})" if self.low is not None and self.high is not None else ""
        at = self.x if isinstance(self.x, str) else number(self.x)
        return f"{at}: {number(self.y)}{span}"


@dataclass(frozen=True)
class Series:
    name: str
    values: Sequence[Value]
    dashed: bool = False


@dataclass(frozen=True)
class Axes:
    """What is beside and below a chart. mark: a horizontal line, such as 1 for no gain."""

    title: str
    x: str
    y: str
    mark: float | None = None


@dataclass
class _Frame:
    """The drawing area, and what has been drawn."""

    axes: Axes
    top: float
    place: Callable[[float], float]
    drawn: list[str] = field(default_factory=list)

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / self.top)

    def grid(self, ticks: Sequence[float]) -> None:
        for tick in ticks:
            y = self.y(tick)
            self.drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(LEFT - 6, y + 4, number(tick), "end")
        if self.axes.mark is not None:
            y = self.y(self.axes.mark)
            self.drawn.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')

    def text(self, x: float, y: float, words: str, anchor: str = "middle", turn: str = "") -> None:
        self.drawn.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(words)}</text>')

    def spread(self, x: float, value: Value) -> None:
        if value.low is not None and value.high is not None:
            low, high = self.y(value.low), self.y(value.high)
            self.drawn.append(f'<line class="spread" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')

    def finish(self, names: Sequence[str]) -> str:
        """The whole figure, with a legend where there are several series."""
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, self.axes.x)
        middle = (TOP + HEIGHT - BOTTOM) / 2
        self.text(14, middle, self.axes.y, turn=f' transform="rotate(-90 14 {middle:.1f})"')
        keys = "".join(
            f'<span><span class="key f{i % COLOURS}"></span>{escape(name)}</span> '
            for i, name in enumerate(names)
            if len(names) > 1
        )
        return (
            f'<figure class="chart"><figcaption>{escape(self.axes.title)}{keys}</figcaption>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.axes.title)}">'
            f"{''.join(self.drawn)}</svg></figure>"
        )


def lines(axes: Axes, series: Sequence[Series]) -> str:
    """A line for each series, over numbers."""
    xs = sorted({float(v.x) for s in series for v in s.values})
    first, last = xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1

    def place(x: float) -> float:
        return LEFT + 16 + (WIDTH - LEFT - RIGHT - 32) * (x - first) / (last - first)

    frame = _framed(axes, [v for s in series for v in s.values], place)
    for x in _apart(xs, place):
        frame.text(place(x), HEIGHT - BOTTOM + 18, number(x))
    for i, one in enumerate(series):
        points = " ".join(f"{place(float(v.x)):.1f},{frame.y(v.y):.1f}" for v in one.values)
        frame.drawn.append(f'<polyline class="line s{i % COLOURS}{" dashed" * one.dashed}" points="{points}"/>')
        for v in one.values:
            x = place(float(v.x))
            frame.spread(x, v)
            tip = f"<title>{escape(one.name)}, {escape(v.words)}</title>"
            frame.drawn.append(f'<circle class="f{i % COLOURS}" cx="{x:.1f}" cy="{frame.y(v.y):.1f}" r="4">{tip}</circle>')
    return frame.finish([s.name for s in series])


def bars(axes: Axes, series: Sequence[Series]) -> str:
    """Groups of bars: one group for each name on the axis, one bar in it for each series."""
    names = list(dict.fromkeys(str(v.x) for s in series for v in s.values))
    each = (WIDTH - LEFT - RIGHT) / len(names)
    width = min(each * 0.8 / len(series), 48)

    def place(x: float) -> float:
        return LEFT + each * (x + 0.5)

    frame = _framed(axes, [v for s in series for v in s.values], place)
    for at, name in enumerate(names):
        frame.text(place(at), HEIGHT - BOTTOM + 18, name if len(name) * 7 < each else name[: max(int(each / 7) - 1, 1)] + "…")
    for i, one in enumerate(series):
        for v in one.values:
            x = place(names.index(str(v.x))) + (i - len(series) / 2) * width
            _bar(frame, f"f{i % COLOURS}", x, width, (0, v.y), f"{one.name}, {v.words}")
            frame.spread(x + width / 2, v)
    return frame.finish([s.name for s in series])


def stacked(axes: Axes, series: Sequence[Series]) -> str:
    """One bar for each name on the axis, made of the series' values from the ground up."""
    names = list(dict.fromkeys(str(v.x) for s in series for v in s.values))
    reached = dict.fromkeys(names, 0.0)
    each = (WIDTH - LEFT - RIGHT) / len(names)
    for one in series:
        for v in one.values:
            reached[str(v.x)] += v.y
    frame = _framed(axes, [Value("", top) for top in reached.values()], lambda x: LEFT + each * (x + 0.5))
    ground = dict.fromkeys(names, 0.0)
    for at, name in enumerate(names):
        frame.text(frame.place(at), HEIGHT - BOTTOM + 18, name if len(name) * 7 < each else str(at + 1))
    for i, one in enumerate(series):
        for v in one.values:
            name, width = str(v.x), min(each * 0.6, 64)
            x = frame.place(names.index(name)) - width / 2
            _bar(frame, f"f{i % COLOURS}", x, width, (ground[name], ground[name] + v.y), f"{name}, {one.name}: {number(v.y)}")
            ground[name] += v.y
    return frame.finish([s.name for s in series])


def _bar(frame: _Frame, colour: str, x: float, width: float, reach: tuple[float, float], tip: str) -> None:
    top, ground = frame.y(reach[1]), frame.y(reach[0])
    box = f'x="{x + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" height="{max(ground - top, 0):.1f}"'
    frame.drawn.append(f'<rect class="{colour}" {box}><title>{escape(tip)}</title></rect>')


def _framed(axes: Axes, values: Sequence[Value], place: Callable[[float], float]) -> _Frame:
    ticks = steps(max([v.highest for v in values] + [axes.mark or 0]))
    frame = _Frame(axes, ticks[-1], place)
    frame.grid(ticks)
    return frame


def _apart(xs: Sequence[float], place: Callable[[float], float]) -> list[float]:
    """Those that can be labelled without running into each other."""
    kept: list[float] = []
    for x in xs:
        if not kept or place(x) - place(kept[-1]) >= 26:
            kept.append(x)
    return kept


def steps(highest: float) -> list[float]:
    """From 0 to `highest` or a little more, in four to ten round steps."""
    if highest <= 0:
        return [0.0, 1.0]
    unit = 10.0 ** math.floor(math.log10(highest))
    step = next(unit * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if highest / (unit * part) <= 8)
    return [i * step for i in range(math.ceil(highest / step - 1e-9) + 1)]


def number(value: float) -> str:
    """At most three figures after the point, none that say nothing."""
    return f"{value:.3f}".rstrip("0").rstrip(".")
