"""A report as sections, each a table with perhaps a chart of the same figures; and the whole as Markdown."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from typing import Any, Callable, Iterable, Sequence

from ..files import to_json
from ..sampling import SamplingParams
from .charts import Axes, Series, Value, bars, lines, stacked

Row = dict[str, Any]
WORDS = """\
tokens/s: emitted tokens over seconds after the prefill. Speed-up: tokens/s over those of our own plain decoding of the same prompts, \
measured in turns with it. Tokens per pass: emitted tokens over passes of the target; plain decoding has 1. Accepted: drafted tokens \
that were emitted, over those that were drafted. Figures are pooled over prompts, each at the repetition with its median time; in \
brackets are the quartiles over prompts (over groups of prompts, where several are decoded at once)."""


@dataclass(frozen=True)
class Section:
    """title, note: plain text. chart: a figure in SVG, or nothing."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    chart: str = ""


def sections(report: Row) -> list[Section]:
    """Everything that the report says in figures; what was not measured has no section."""
    drafting = [row for row in report["rows"] if row["drafter"] != "none"]
    made = [_summary(report["rows"]), _categories(report["categories"]), _depths(drafting)]
    made += [_over("draft", "draft length", drafting), _over("batch", "prompts at once", drafting)]
    made += [_shares(report["rows"]), *(_costs(target, found) for target, found in report["costs"].items())]
    return [section for section in made if section is not None]


def name_of(row: Row, report_rows: Iterable[Row], leave_out: Sequence[str] = ()) -> str:
    """A configuration's name: the drafter, and of the rest what is not the same in all of them."""
    parts = ["plain" if row["drafter"] == "none" else row["drafter"]]
    parts += [f"{name}={value}" for name, value in row["options"].items()]
    others = [other for other in report_rows if other["drafter"] != "none"]
    for key in ("draft", "batch", "target"):
        if key not in leave_out and len({other[key] for other in others}) > 1 and (key != "draft" or row["drafter"] != "none"):
            parts.append(row[key] if key == "target" else f"{key} {row[key]}")
    return " ".join(parts)


def fixed(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def with_quartiles(value: float | None, spread: dict[str, Any] | None, digits: int = 2) -> str:
    """A pooled figure and the quartiles of single ones."""
    if value is None or spread is None:
        return "-"
    return f"{value:.{digits}f} ({spread['lower']:.{digits}f} to {spread['upper']:.{digits}f})"


def _point(x: float | str, value: float, spread: dict[str, Any] | None) -> Value:
    return Value(x, value) if spread is None else Value(x, value, spread["lower"], spread["upper"])


def _same(row: Row) -> str:
    if row["drafter"] == "none":
        return ""
    if not row["compared"]:
        return "(sampled)"
    near = row["differing"] - row["unexplained"]
    parts = [f"{near} near-tie"] * (near > 0) + [f"{row['unexplained']} DIFFER"] * (row["unexplained"] > 0)
    return f"{', '.join(parts) or 'all'} of {row['compared']}"


def _summary(rows: Sequence[Row]) -> Section:
    columns = ("configuration", "draft", "batch", "speed-up", "tokens/s", "tokens per pass", "accepted", "same text as plain")
    table = [
        [
            name_of(row, rows, ("draft", "batch")) + " LOSSY" * row["lossy"] + " DRAFTED NOTHING" * row["drafted_nothing"],
            "" if row["drafter"] == "none" else str(row["draft"]),
            str(row["batch"]),
            with_quartiles(row["ratio"], row["spread"]["ratio"]),
            with_quartiles(row["statistics"]["tokens_per_second"], row["spread"]["tokens_per_second"], 1),
            with_quartiles(row["statistics"]["acceptance_length"], row["spread"]["acceptance_length"]),
            percent(row["statistics"]["acceptance_rate"]),
            _same(row),
        ]
        for row in rows
    ]
    noise = [row["between_repetitions"] for row in rows if row["drafter"] != "none" and row["between_repetitions"] is not None]
    note = WORDS
    if noise:
        note += (
            f" From repetition to repetition the speed-up of a prompt varied by {max(noise):.0%} at most (median over prompts)."
        )
    return Section("All prompts", note, columns, table)


def _categories(rows: Sequence[Row]) -> Section | None:
    drafting = [row for row in rows if row["drafter"] != "none" and row["ratio"] is not None]
    if not drafting:
        return None
    columns = ("category", "configuration", "prompts", "speed-up", "tokens per pass", "accepted")
    table = [
        [
            row["category"] or "-",
            name_of(row, rows),
            str(row["prompts"]),
            with_quartiles(row["ratio"], row["spread"]["ratio"]),
            with_quartiles(row["statistics"]["acceptance_length"], row["spread"]["acceptance_length"]),
            percent(row["statistics"]["acceptance_rate"]),
        ]
        for row in drafting
    ]
    note = "The lines through the bars are the quartiles over prompts."
    speed = _by_name(drafting, lambda r: _point(r["category"] or "-", r["ratio"], r["spread"]["ratio"]))
    length = _by_name(
        drafting, lambda r: _point(r["category"] or "-", r["statistics"]["acceptance_length"], r["spread"]["acceptance_length"])
    )
    chart = bars(Axes("Speed-up", "", "times plain decoding", 1.0), speed)
    chart += bars(Axes("Tokens per pass", "", "tokens", 1.0), length)
    return Section("By category", note, columns, table, chart)


def _by_name(rows: Sequence[Row], value: Callable[[Row], Value], leave_out: Sequence[str] = ()) -> list[Series]:
    found: dict[str, list[Value]] = {}
    for row in rows:
        found.setdefault(name_of(row, rows, leave_out), []).append(value(row))
    return [Series(name, values) for name, values in found.items()]


def _depths(rows: Sequence[Row]) -> Section | None:
    drafting = [row for row in rows if row["statistics"]["conditional_rates"]]
    if not drafting:
        return None
    deepest = max(len(row["statistics"]["conditional_rates"]) for row in drafting)
    columns = ("configuration", *(f"depth {d + 1}" for d in range(deepest)))
    table, series = [], []
    for row in drafting:
        s = row["statistics"]
        counted = list(zip(s["conditional_rates"], s["accepted_by_depth"], s["reached_by_depth"]))
        cells = [f"{rate:.2f} ({kept} of {reached})" for rate, kept, reached in counted]
        table.append([name_of(row, rows), *cells, *("" for _ in range(deepest - len(cells)))])
        series.append(Series(name_of(row, rows), [Value(d + 1, rate) for d, (rate, _, _) in enumerate(counted)]))
    note = "Of the rounds in which depth d - 1 was kept and depth d was drafted, the share in which d was kept."
    return Section(
        "Acceptance by depth", note, columns, table, lines(Axes("Acceptance by depth", "depth", "share kept"), series)
    )


def _over(key: str, words: str, rows: Sequence[Row]) -> Section | None:
    """Speed over the draft length or the batch, where several were measured."""
    drafting = [row for row in rows if row["ratio"] is not None]
    if len({row[key] for row in drafting}) < 2:
        return None
    columns = ("configuration", words, "speed-up", "tokens/s", "tokens per pass", "accepted")
    table = [
        [
            name_of(row, drafting, (key,)),
            str(row[key]),
            with_quartiles(row["ratio"], row["spread"]["ratio"]),
            with_quartiles(row["statistics"]["tokens_per_second"], row["spread"]["tokens_per_second"], 1),
            fixed(row["statistics"]["acceptance_length"]),
            percent(row["statistics"]["acceptance_rate"]),
        ]
        for row in sorted(drafting, key=lambda row: (name_of(row, drafting, (key,)), row[key]))
    ]
    series = _by_name(
        sorted(drafting, key=lambda row: row[key]), lambda r: _point(r[key], r["ratio"], r["spread"]["ratio"]), (key,)
    )
    chart = lines(Axes(f"Speed-up over {words}", words, "times plain decoding", 1.0), series)
    note = (
        "The lines through the points are the quartiles over prompts."
        if key == "draft"
        else ("Speed-up against plain decoding of as many prompts at once; tokens/s of all of them together.")
    )
    return Section(f"Speed over {words}", note, columns, table, chart)


def _shares(rows: Sequence[Row]) -> Section:
    columns = ("configuration", "draft", "verify", "rest", "ms per pass")
    table: list[list[str]] = []
    series: dict[str, list[Value]] = {name: [] for name in ("draft", "verify", "rest")}
    for row in rows:
        s = row["statistics"]
        name = name_of(row, rows)
        each = 1e3 * s["total_seconds"] / s["whole_passes"] if s["whole_passes"] else None
        table.append([name, *(f"{row['shares'][part]:.1%}" for part in series), fixed(each)])
        for part, values in series.items():
            values.append(Value(name, each * row["shares"][part] if each else 0.0))
    note = "draft: proposing. verify: the target's pass. rest: probabilities, accepting, cutting, committing, observing. No prefills."
    chart = stacked(Axes("Time of a round", "", "ms per pass"), [Series(name, values) for name, values in series.items()])
    return Section("Where the time goes", note, columns, table, chart)


def _costs(target: str, found: Row) -> Section | None:
    """Measured passes beside the roofline."""
    if not found["rows"]:
        return None
    roof = found["roofline"] or {}
    alone = {row["rows"]: row for row in roof.get("rows", ())}
    here = {row["rows"]: row["ms"] for row in found["rows"]}
    columns = ("rows", "passes", "ms in this run", "ms alone", "limit ms", "because of")
    table = []
    for rows in sorted({*here, *alone}):
        spread, one = here.get(rows), alone.get(rows, {})
        cells = [str(spread["n"]), with_quartiles(spread["median"], spread)] if spread else ["", ""]
        table.append([str(rows), *cells, *(fixed(one[k]) if one else "" for k in ("ms", "limit_ms")), one.get("bound", "")])
    measured = Series("in this run (median, quartiles)", [_point(rows, s["median"], s) for rows, s in here.items()])
    series = [measured]
    note = f"Passes of {target} for one sequence, by how many rows they had, after {found['context']} tokens (median)."
    if alone:
        series += [
            Series("alone", [Value(n, row["ms"]) for n, row in alone.items()]),
            Series("limit", [Value(n, row["limit_ms"]) for n, row in alone.items()], dashed=True),
        ]
        note += (
            f" Alone: medians of {roof['repeats']} passes after {roof['context']} tokens. Limit: what reading the weights at "
            f"{roof['rates']['bandwidth'] / 1e9:.1f} GB/s and the arithmetic at {roof['rates']['flops'] / 1e9:.0f} "
            f"GFLOP/s take at least."
        )
    elif roof:
        note += f" No roofline: {roof['why_not']}"
    return Section(
        f"What a pass costs: {target}", note, columns, table, lines(Axes("Milliseconds of a pass", "rows", "ms"), series)
    )


# ---- the head, and Markdown -------------------------------------------------------------------------------------------


def headline(report: Row) -> str:
    """What came out, in a sentence."""
    drafting = [row for row in report["rows"] if row["drafter"] != "none" and row["ratio"]]
    if not drafting:
        return "Nothing was measured beside plain decoding."
    best = max(drafting, key=lambda row: row["ratio"])
    name = name_of(best, drafting)
    verdict = f"{best['ratio']:.2f} times plain decoding over {best['prompts']} prompts"
    return f"The fastest of {len(drafting)}: {name}, {verdict}." if len(drafting) > 1 else f"{name}: {verdict}."


def environment(report: Row) -> list[tuple[str, str]]:
    """What it was measured on and with, as names and texts."""
    e, asked = report["environment"], report["question"]
    machine = e["machine"]
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads{memory}, {machine['system']}"
    usual = json.loads(to_json(asdict(SamplingParams())))
    changed = {k: v for k, v in asked["sampling"].items() if v != usual[k] or k in ("temperature", "max_tokens")}
    models = [
        f"{name}: {m['parameters'] / 1e6:.0f} million parameters, {m['dtype']} on {m['device']}"
        for name, m in e["models"].items()
    ]
    return [
        ("date", e["date"]),
        ("command", shlex.join(e["command"])),
        ("machine", ", ".join([where, *machine["accelerators"]])),
        ("versions", ", ".join(f"{name} {version}" for name, version in e["versions"].items())),
        *[("target", model) for model in models],
        ("prompts", f"{len(asked['prompts'])}"),
        ("sampling", ", ".join(f"{name} {value}" for name, value in changed.items())),
    ]


def markdown(report: Row) -> str:
    """The report without its charts."""
    parts = [
        "# Outrider: a benchmark's report",
        headline(report) + " INTERRUPTED: not all was measured." * report["interrupted"],
    ]
    parts.append(
        "\n".join(f"- {name}: `{text}`" if name == "command" else f"- {name}: {text}" for name, text in environment(report))
    )
    for section in sections(report):
        rows = [section.columns, ["---"] * len(section.columns), *section.rows]
        parts += [f"## {section.title}", section.note]
        parts.append("\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows))
    return "\n\n".join(parts) + "\n"
