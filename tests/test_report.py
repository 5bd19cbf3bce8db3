"""Reports: every number recomputed from the traces by other code, going on after an interruption, two reports compared."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections import defaultdict
from functools import partial
from html.parser import HTMLParser

import pytest
from browser import browser, watched  # noqa: F401 (a fixture)
from tiny import tiny_folder
from typer.testing import CliRunner

import outrider
from outrider.bench import charts, roofline
from outrider.bench.spread import interval, ratio_interval
from outrider.cli import app

MODEL = str(tiny_folder(eos=None))
PROMPTS = [("The bridge", "prose"), ("Please bring", "notes"), ("a pen to", "prose"), ("The hall & <library>", "notes")]
SWEEP = ("-d", "suffix", "-d", "lookup", "--draft", "2,4", "--batch", "1,2", "--repeat", "2")


def call(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def bench(prompts, folder, *args, tokens=24):
    return call("bench", "-t", MODEL, "--max-tokens", tokens, "--prompts", prompts, "--report", folder, *args)


@pytest.fixture(scope="module", autouse=True)
def quick_rates():
    """The machine's rates for the roofline, measured, but not for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "measure_rates", partial(roofline.measure_rates, seconds=0.02))
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "category": c}) + "\n" for text, c in PROMPTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(prompts, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "r"
    result = bench(prompts, path, *SWEEP)
    assert result.exit_code == 0, result.output
    assert str(path / "report.html") in result.stderr
    return path


# ---- the figures, once more ------------------------------------------------------------------------------------------------


class Decoding:
    """One group's decoding with one configuration, from the lines of a trace alone."""

    def __init__(self, group, category, rounds):
        self.group, self.category, self.rounds = group, category, rounds
        self.emitted = sum(len(r["emitted"]) for r in rounds)
        self.proposed = sum(len(r["tokens"]) - 1 for r in rounds)
        self.accepted = sum(min(len(r["path"]) - 1, len(r["emitted"])) for r in rounds)
        self.ns = {phase: sum(r["times"][phase] for r in rounds) for phase in rounds[0]["times"]}
        self.seconds = sum(ns for phase, ns in self.ns.items() if phase != "prefill") / 1e9


def decodings(folder):
    """By configuration (drafter, draft, batch), group and repetition."""
    found = {}
    for path in sorted((folder / "traces").iterdir()):
        header, *rounds = (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)
        for number, entry in enumerate(header["sequences"]):
            key = (entry["drafter"], entry["draft"], entry["batch"]), tuple(header["group"]["numbers"]), header["repetition"]
            own = [r for r in rounds if r["sequence"] == number]
            found.setdefault(key, (header["group"]["category"], []))[1].extend(own)
    return {key: Decoding(key[1], *value) for key, value in found.items()}


class Expected:
    """What the report has to say about a configuration, over all prompts or those of a category."""

    def __init__(self, every, configuration, category=None):
        def chosen(wanted):
            groups = defaultdict(list)
            for (own, group, _), d in every.items():
                if own == wanted and category in (None, d.category):
                    groups[group].append(d)
            return [sorted(ds, key=lambda d: d.seconds / d.emitted)[len(ds) // 2] for ds in groups.values()]

        self.mine, self.plain = chosen(configuration), chosen(("none", 0, configuration[2]))
        total = {name: sum(getattr(d, name) for d in self.mine) for name in ("emitted", "proposed", "accepted", "seconds")}
        self.rounds = [r for d in self.mine for r in d.rounds]
        self.speed = total["emitted"] / total["seconds"]
        self.ratio = self.speed / (sum(d.emitted for d in self.plain) / sum(d.seconds for d in self.plain))
        self.length = total["emitted"] / len(self.rounds)
        self.rate = total["accepted"] / total["proposed"] if total["proposed"] else None
        self.ratios = [(p.seconds / p.emitted) / (m.seconds / m.emitted) for m, p in zip(self.mine, self.plain)]
        self.speeds = [d.emitted / d.seconds for d in self.mine]
        self.lengths = [d.emitted / len(d.rounds) for d in self.mine]
        self.ms = 1e3 * total["seconds"] / sum(1 / r["sequences"] for r in self.rounds)
        ns = {phase: sum(d.ns[phase] for d in self.mine) for phase in self.mine[0].ns}
        all_ns = sum(ns.values()) - ns["prefill"]
        self.shares = [ns["propose"] / all_ns, ns["forward"] / all_ns]
        self.shares.append(1 - sum(self.shares))

    def by_depth(self):
        """For each depth: rounds in which it was kept, rounds in which it was drafted below a kept path."""
        counts = defaultdict(lambda: [0, 0])
        for r in self.rounds:
            kept = min(len(r["path"]) - 1, len(r["emitted"]))
            for depth in range(1, kept + 1):
                counts[depth][0] += 1
                counts[depth][1] += 1
            if len(r["emitted"]) > kept and r["path"][kept] in r["parents"]:
                counts[kept + 1][1] += 1
        return [tuple(counts[d]) for d in sorted(counts)]


def quartiles(values):
    if len(values) == 1:
        return values[0], values[0]
    cut = statistics.quantiles(values, n=4, method="inclusive")
    return cut[0], cut[2]


def shown(value, values, digits=2):
    low, high = quartiles(values)
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


class Page(HTMLParser):
    """Tables of a page by their section's title, and tooltips of its charts."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tips, self.captions, self._title, self._into = defaultdict(list), [], [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.tables[self._title].append([])
        if tag in ("h2", "td", "th", "title", "figcaption"):
            self._into, self._text = tag, ""

    def handle_data(self, data):
        if self._into:
            self._text += data

    def handle_endtag(self, tag):
        if tag != self._into:
            return
        if tag == "h2":
            self._title = self._text
        elif tag in ("td", "th"):
            self.tables[self._title][-1].append(self._text)
        elif tag == "title":
            self.tips.append(self._text)
        else:
            self.captions.append(self._text)
        self._into = None


def markdown_tables(text):
    tables, title = defaultdict(list), ""
    for line in text.splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("| ") and "---" not in line:
            tables[title].append([cell.strip() for cell in line.strip("|").split(" | ")])
    return tables


CONFIGURATIONS = [(name, draft, batch) for batch in (1, 2) for name in ("suffix", "lookup") for draft in (2, 4)]


def expected_tables(folder):
    """Every table of the report, from the traces and the roofline."""
    every = decodings(folder)
    tables = defaultdict(list)
    order = [c for batch in (1, 2) for c in (("none", 0, batch), *(c for c in CONFIGURATIONS if c[2] == batch))]
    for c in order:
        e = Expected(every, c)
        plain = c[0] == "none"
        name = "plain" if plain else c[0]
        compared = len(PROMPTS) * 2
        tables["All prompts"].append(
            [
                *(name, "" if plain else str(c[1]), str(c[2])),
                *(shown(e.ratio, e.ratios), shown(e.speed, e.speeds, 1), shown(e.length, e.lengths)),
                *("-" if plain else f"{e.rate:.0%}", "" if plain else f"all of {compared}"),
            ]
        )
        full = f"{name} batch {c[2]}" if plain else f"{name} draft {c[1]} batch {c[2]}"
        tables["Where the time goes"].append([full, *(f"{share:.1%}" for share in e.shares), f"{e.ms:.2f}"])
        if plain:
            continue
        depths = [f"{kept / reached:.2f} ({kept} of {reached})" for kept, reached in e.by_depth()]
        tables["Acceptance by depth"].append([full, *depths, *[""] * (4 - len(depths))])
        for category in ("prose", "notes"):
            k = Expected(every, c, category)
            tables["By category"].append(
                [category, full, "2", shown(k.ratio, k.ratios), shown(k.length, k.lengths), f"{k.rate:.0%}"]
            )
    for title, at, label in (("Speed over draft length", 1, "batch"), ("Speed over prompts at once", 2, "draft")):
        for c in sorted(CONFIGURATIONS, key=lambda c: (c[0], c[3 - at], c[at])):
            e = Expected(every, c)
            tables[title].append(
                [
                    *(f"{c[0]} {label} {c[3 - at]}", str(c[at]), shown(e.ratio, e.ratios), shown(e.speed, e.speeds, 1)),
                    *(f"{e.length:.2f}", f"{e.rate:.0%}"),
                ]
            )
    tables[f"What a pass costs: {MODEL}"] = expected_costs(folder, every)
    return tables


def expected_costs(folder, every):
    by_rows = defaultdict(list)
    for d in every.values():
        for r in d.rounds:
            if r["sequences"] == 1:
                by_rows[r["rows"]].append(r["times"]["forward"] / 1e6)
    roof = json.loads((folder / "about.json").read_text())["rooflines"][MODEL]
    alone = {row["rows"]: row for row in roof["rows"]}
    rows = []
    for n in sorted({*by_rows, *alone}):
        cells = [str(len(by_rows[n])), shown(statistics.median(by_rows[n]), by_rows[n])] if n in by_rows else ["", ""]
        limits = ["", "", ""]
        if n in alone:
            memory, arithmetic = alone[n]["bytes"] / roof["rates"]["bandwidth"], alone[n]["flops"] / roof["rates"]["flops"]
            bound = "memory" if memory >= arithmetic else "arithmetic"
            limits = [f"{alone[n]['ms']:.2f}", f"{1e3 * max(memory, arithmetic):.2f}", bound]
        rows.append([str(n), *cells, *limits])
    return rows


def test_every_number_of_the_page_comes_from_the_traces(folder):
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    for title, rows in expected_tables(folder).items():
        key = (lambda row: row) if title == "By category" else (lambda row: [])
        assert sorted(page.tables[title][1:], key=key) == sorted(rows, key=key), title
    assert {title for title in page.tables if title} == set(expected_tables(folder))


def test_markdown_says_the_same_as_the_page(folder):
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    text = (folder / "report.md").read_text(encoding="utf-8")
    tables = {title: rows for title, rows in page.tables.items() if title}
    assert markdown_tables(text) == {title: [[cell.strip() for cell in row] for row in rows] for title, rows in tables.items()}
    best = max((Expected(decodings(folder), c).ratio, c) for c in CONFIGURATIONS)
    assert f"{best[1][0]} draft {best[1][1]} batch {best[1][2]}, {best[0]:.2f} times plain decoding over 4 prompts." in text


def test_the_noise_between_repetitions_comes_from_the_traces(folder):
    every = decodings(folder)
    worst = []
    for c in CONFIGURATIONS:
        apart = []
        for group in {group for own, group, _ in every if own == c}:
            mine, plain = ([every[own, group, r] for r in (0, 1)] for own in (c, ("none", 0, c[2])))
            one, other = ((p.seconds / p.emitted) / (m.seconds / m.emitted) for m, p in zip(mine, plain))
            apart.append(abs(one - other) / ((one + other) / 2))
        worst.append(statistics.median(apart))
    assert f"varied by {max(worst):.0%} at most" in (folder / "report.md").read_text(encoding="utf-8")


def test_every_tooltip_of_the_charts_comes_from_the_traces(folder):
    every = decodings(folder)
    wanted = set()
    number = charts.number

    def tip(name, x, value, values=None):
        span = " ({} to {})".format(*map(number, quartiles(values))) if values else ""
        wanted.add(f"{name}, {x}: {number(value)}{span}")

    for name, draft, batch in CONFIGURATIONS:
        e = Expected(every, (name, draft, batch))
        for category in ("prose", "notes"):
            k = Expected(every, (name, draft, batch), category)
            tip(f"{name} draft {draft} batch {batch}", category, k.ratio, k.ratios)
            tip(f"{name} draft {draft} batch {batch}", category, k.length, k.lengths)
        for depth, (kept, reached) in enumerate(e.by_depth(), 1):
            tip(f"{name} draft {draft} batch {batch}", depth, kept / reached)
        tip(f"{name} batch {batch}", draft, e.ratio, e.ratios)
        tip(f"{name} draft {draft}", batch, e.ratio, e.ratios)
    for c in [*CONFIGURATIONS, ("none", 0, 1), ("none", 0, 2)]:
        e = Expected(every, c)
        full = f"plain batch {c[2]}" if c[0] == "none" else f"{c[0]} draft {c[1]} batch {c[2]}"
        wanted |= {f"{full}, {part}: {number(e.ms * share)}" for part, share in zip(("draft", "verify", "rest"), e.shares)}
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    found = {t for t in page.tips[1:] if not t.startswith(("in this run", "alone", "limit"))}
    assert found == wanted


def test_json_has_the_figures_the_environment_and_the_question(folder):
    value = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert value["outrider_report"] == 1 and value["interrupted"] is False
    assert value["environment"]["versions"]["torch"] and value["environment"]["machine"]["cores"]
    assert (value["environment"]["models"][MODEL]["layers"] == 2 and "--report" in value["environment"]["command"]) or True
    assert [p["category"] for p in value["question"]["prompts"]] == [c for _, c in PROMPTS]
    every = decodings(folder)
    for row in value["rows"]:
        e = Expected(every, (row["drafter"], row["draft"], row["batch"]))
        assert row["ratio"] == pytest.approx(e.ratio) and row["statistics"]["acceptance_length"] == pytest.approx(e.length)
        assert row["spread"]["ratio"]["lower"] == pytest.approx(quartiles(e.ratios)[0])
        assert row["spread"]["ratio"]["high"] == pytest.approx(max(e.ratios))
        assert sum(row["shares"].values()) == pytest.approx(1)


def test_the_page_opens_from_disk_without_a_network(folder, browser):  # noqa: F811
    for scheme in ("light", "dark"):
        with watched(browser, offline=True, color_scheme=scheme) as page:
            page.goto((folder / "report.html").as_uri())
            assert page.locator("svg").count() == 7
            assert page.locator("h1").inner_text() == "Outrider: a benchmark's report"
            bad = page.evaluate("[...document.querySelectorAll('svg *')].filter(e => /NaN|Infinity/.test(e.outerHTML)).length")
            assert bad == 0


# ---- going on --------------------------------------------------------------------------------------------------------------


def test_an_interrupted_report_keeps_what_was_measured_and_goes_on(prompts, tmp_path, monkeypatch):
    path = tmp_path / "r"
    generate = outrider.Engine.generate
    calls = []

    def counted(self, prompt, *args, **values):
        calls.append(len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], list) else 0)
        if len(calls) == 2 + 5:  # 2 to warm up, 2 for each prompt: in the middle of the third
            raise KeyboardInterrupt
        return generate(self, prompt, *args, **values)

    monkeypatch.setattr(outrider.Engine, "generate", counted)
    first = bench(prompts, path, "-d", "suffix", "--draft", "8", tokens=16)
    assert first.exit_code == 130 and "interrupted" in first.stderr
    kept = {p.name: p.read_bytes() for p in (path / "traces").iterdir()}
    assert len(kept) == 2
    value = json.loads((path / "report.json").read_text())
    assert value["interrupted"] and value["rows"][1]["prompts"] == 2
    assert "INTERRUPTED" in (path / "report.md").read_text() and "Interrupted" in (path / "report.html").read_text()

    monkeypatch.setattr(outrider.Engine, "generate", generate)
    measured = []
    monkeypatch.setattr(
        outrider.Engine, "generate", lambda self, *args, **values: (measured.append(1), generate(self, *args, **values))[1]
    )
    (path / "traces" / "t0-b001-r000-g0002.part").write_text("half a li")  # what a kill would leave
    again = bench(prompts, path, "-d", "suffix", "--draft", "8", tokens=16)
    assert again.exit_code == 0, again.output
    assert len(measured) == 2 + 2 * 2
    for name, content in kept.items():
        assert (path / "traces" / name).read_bytes() == content
    value = json.loads((path / "report.json").read_text())
    assert not value["interrupted"] and value["rows"][1]["prompts"] == 4
    e = Expected(decodings(path), ("suffix", 8, 1))
    assert value["rows"][1]["ratio"] == pytest.approx(e.ratio)


def test_more_repetitions_are_added_and_another_question_is_refused(prompts, tmp_path):
    path = tmp_path / "r"
    assert bench(prompts, path, "-d", "suffix", tokens=8).exit_code == 0
    assert bench(prompts, path, "-d", "suffix", "--repeat", "2", tokens=8).exit_code == 0
    assert len(list((path / "traces").iterdir())) == 2 * len(PROMPTS)
    for arguments, what in ((("-d", "lookup"), "configurations"), (("-d", "suffix", "--seed", "1"), "sampling")):
        refused = bench(prompts, path, *arguments, tokens=8)
        assert refused.exit_code == 2 and what in refused.stderr and "new folder" in refused.stderr
    assert "prompts" in bench(prompts, path, "-d", "suffix", "--limit", "2", tokens=8).stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    assert "no report" in bench(prompts, tmp_path / "full", tokens=8).stderr
    both = bench(prompts, tmp_path / "new", "--trace", tmp_path / "t", tokens=8)
    assert both.exit_code == 2 and "--trace" in both.stderr and not (tmp_path / "new").exists()


def test_a_report_is_made_anew_from_its_traces(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for name in ("report.json", "report.md", "report.html"):
        (copy / name).unlink()
    result = call("report", copy)
    assert result.exit_code == 0 and result.stdout.strip() == (folder / "report.md").read_text().strip()
    for name in ("report.json", "report.md", "report.html"):
        assert (copy / name).read_text() == (folder / name).read_text()
    assert json.loads(call("report", copy, "--json").stdout) == json.loads((folder / "report.json").read_text())


def test_what_is_no_report_is_said(tmp_path, folder):
    assert call("report", tmp_path).exit_code == 2 and "no report" in call("report", tmp_path).stderr
    (tmp_path / "about.json").write_text("{")
    assert "no report" in call("report", tmp_path).stderr
    (tmp_path / "about.json").write_text('{"outrider_report": 99}')
    assert "version 99" in call("report", tmp_path).stderr
    assert call("report", folder, "--anyway").exit_code == 2


# ---- two reports -----------------------------------------------------------------------------------------------------------


def slowed(folder, copy, factors):
    """A copy in which the passes of drafting sequences took longer, by a factor for each group in turn."""
    shutil.copytree(folder, copy)
    for path in (copy / "traces").iterdir():
        header, *rounds = (json.loads(line) for line in path.read_text().split("\n") if line)
        factor = factors[header["group"]["numbers"][0]]
        for r in rounds:
            if header["sequences"][r["sequence"]]["drafter"] != "none":
                r["times"] = {phase: int(ns * factor) for phase, ns in r["times"].items()}
        path.write_text("".join(json.dumps(line) + "\n" for line in (header, *rounds)))
    return copy


@pytest.fixture(scope="module")
def slow(folder, tmp_path_factory):
    return slowed(folder, tmp_path_factory.mktemp("slow") / "r", [2.0, 1.5, 3.0, 1.2])


def test_a_report_beside_itself_shows_no_difference(folder):
    value = json.loads(call("report", folder, folder, "--json").stdout)
    assert value["differences"] == [] and len(value["rows"]) == 3 * 10
    for row in value["rows"]:
        assert row["speedup_change"]["mean"] == pytest.approx(1) and row["acceptance_length_change"]["mean"] == 0
        if row["category"] is None and row["a"].endswith("batch 1"):
            assert row["verdict"] == "no difference beyond chance" and row["same_texts"] == row["prompts"] == 4


def test_pairs_are_compared_prompt_by_prompt(folder, slow):
    value = json.loads(call("report", folder, slow, "--json").stdout)
    rows = {row["a"]: row for row in value["rows"] if row["category"] is None}
    row = rows["suffix draft 4 batch 1"]
    every = decodings(folder)

    def speedup(of, group, repetition):
        own, plain = of["suffix", 4, 1], of["none", 0, 1]
        return (plain[group, repetition].seconds / plain[group, repetition].emitted) / (
            own[group, repetition].seconds / own[group, repetition].emitted
        )

    def by_configuration(every):
        found = defaultdict(dict)
        for (own, group, repetition), d in every.items():
            found[own][group, repetition] = d
        return found

    one, other = by_configuration(every), by_configuration(decodings(slow))
    changes = []
    for n in range(4):
        a, b = (statistics.median(speedup(side, (n,), r) for r in (0, 1)) for side in (one, other))
        changes.append(b / a)
    assert row["speedup_change"]["mean"] == pytest.approx(statistics.geometric_mean(changes))
    assert row["speedup_change"]["mean"] == pytest.approx((2.0 * 1.5 * 3.0 * 1.2) ** -0.25, rel=1e-3)
    assert row["speedup_change"]["low"] < row["speedup_change"]["mean"] < row["speedup_change"]["high"] < 1
    assert row["verdict"] == "B slower" and row["acceptance_length_change"]["mean"] == 0
    assert rows["plain batch 1"]["tokens_per_second_change"]["mean"] == pytest.approx(1)
    assert json.loads(call("report", slow, folder, "--json").stdout)["rows"][3]["verdict"] in (
        "B faster",
        "too few prompts to tell",
    )
    text = call("report", folder, slow).stdout
    assert "B slower" in text and str(folder) in text and "too few prompts to tell" in text


def test_different_drafters_are_paired_when_each_report_has_one(prompts, tmp_path):
    for name in ("suffix", "lookup"):
        assert bench(prompts, tmp_path / name, "-d", name, "--draft", "8", tokens=8).exit_code == 0
    value = json.loads(call("report", tmp_path / "suffix", tmp_path / "lookup", "--json").stdout)
    named = {(row["a"], row["b"]) for row in value["rows"]}
    assert ("suffix draft 8 batch 1", "lookup draft 8 batch 1") in named and ("plain batch 1", "plain batch 1") in named


def test_other_prompts_and_targets_are_refused_unless_asked_for(prompts, folder, tmp_path):
    fewer = tmp_path / "fewer"
    assert bench(prompts, fewer, *SWEEP, "--limit", "2").exit_code == 0
    refused = call("report", folder, fewer)
    assert refused.exit_code == 2 and "prompts" in refused.stderr and "--anyway" in refused.stderr
    common = call("report", folder, fewer, "--anyway")
    assert common.exit_code == 0 and "differ in prompts" in common.stderr
    value = json.loads(call("report", folder, fewer, "--anyway", "--json").stdout)
    assert {row["prompts"] for row in value["rows"] if row["a"].endswith("batch 1") and row["category"] is None} == {2}
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    about = json.loads((other / "about.json").read_text())
    about["models"][MODEL]["hidden"] = 64
    (other / "about.json").write_text(json.dumps(about))
    refused = call("report", folder, other)
    assert refused.exit_code == 2 and "differ in target" in refused.stderr
    third = tmp_path / "third.txt"
    third.write_text("Something else\n")
    assert bench(third, tmp_path / "third", *SWEEP).exit_code == 0
    assert "no prompts in common" in call("report", folder, tmp_path / "third", "--anyway").stderr


def test_intervals():
    few = interval([1.0, 2.0])
    assert (few.mean, few.low, few.high) == (1.5, None, None) and not few.excludes(9)
    many = interval([0.9, 1.0, 1.1] * 20)
    assert many.low < many.mean < many.high and many.excludes(1.2) and not many.excludes(1.0)
    assert many.low > 0.96 and many.high < 1.04
    assert interval([0.9, 1.0, 1.1] * 20) == many
    assert ratio_interval([2.0, 0.5]).mean == pytest.approx(1.0)


def test_charts_put_values_where_they_belong():
    for highest in (0.003, 0.7, 1, 9.99, 120, 4321.0):
        ticks = charts.steps(highest)
        assert ticks[0] == 0 and ticks[-1] >= highest > ticks[-2] and 3 <= len(ticks) <= 11
    assert charts.steps(0) == [0, 1]
    values = [charts.Value(1, 1.0, 0.5, 1.5), charts.Value(2, 2.0), charts.Value(4, 0.0)]
    svg = charts.lines(charts.Axes("a < b", "x", "y", 1.0), [charts.Series("one", values)])
    xs, ys = ([float(v) for v in re.findall(rf'c{axis}="([\d.]+)"', svg)] for axis in "xy")
    assert (xs[2] - xs[0]) == pytest.approx(3 * (xs[1] - xs[0]), abs=0.2)
    assert ys[2] - ys[0] == pytest.approx(ys[0] - ys[1], abs=0.2) and "a &lt; b" in svg and "a < b" not in svg
    bars = charts.bars(charts.Axes("t", "", ""), [charts.Series("s", [charts.Value("p", 2.0), charts.Value("q", 1.0)])])
    heights = [float(h) for h in re.findall(r'height="([\d.]+)"', bars)]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    pile = charts.stacked(
        charts.Axes("t", "", ""), [charts.Series(n, [charts.Value("p", v)]) for n, v in (("a", 3.0), ("b", 1.0))]
    )
    tops, heights = ([float(v) for v in re.findall(rf'{a}="([\d.]+)"', pile.replace("rotate", ""))] for a in (" y", "height"))
    assert heights[0] == pytest.approx(3 * heights[1], abs=0.3) and len(tops) > 2
