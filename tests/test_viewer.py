"""The page of traces in a real browser: every view on real traces, every number recomputed, keys, links, damage, size."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from browser import browser, page, watched  # noqa: F401
from page_figures import Account, Place, accepted, ancestors, decision_on, first_refused, says
from traces import CASES, folder, lines, trace

from outrider.colours import COLOURS
from outrider.viewer import page as page_of

SAMPLED = ["block", "rejection", "traversal", "siblings", "chosen", "coupled", "typical"]

FIGURES = """() => [...document.querySelectorAll("[data-n]")].filter((e) => e.checkVisibility()).map((e) => {
  const around = (name) => e.closest(`[data-${name}]`)?.getAttribute(`data-${name}`) ?? null;
  const text = [...e.childNodes].filter((c) => c.nodeType === 3).map((c) => c.data).join("");
  return {name: e.dataset.n, text, trace: around("trace"), sequence: around("sequence"), round: around("round"), node: around("node"), depth: around("depth")};
})"""
STRAY = """() => {
  const known = "[data-n], [data-verbatim], [data-header], [data-prompt], [data-token], .token, .ordinal, option, dialog, script, style, .unseen, svg title";
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (/[0-9]/.test(node.data.replaceAll("min(1, p/q)", "")) && !node.parentElement.closest(known)) found.push(node.data);
  }
  return found;
}"""


def show(page: Any, *files: Path, at: str = "") -> Account:  # noqa: F811
    """Open the page of these files at a place; what it ought to say."""
    made = folder() / "page.html"
    made.write_text(page_of(files), encoding="utf-8")
    page.goto("about:blank")
    page.goto(f"{made.as_uri()}#{at}")
    return Account(*files)


GO = """at => new Promise((done) => {
  if (location.hash === "#" + at) return done();
  addEventListener("hashchange", () => setTimeout(done), {once: true});
  location.hash = at;
})"""


def go(page: Any, at: str) -> None:  # noqa: F811
    """Go to another place of the page."""
    page.evaluate(GO, at)


def check_figures(page: Any, account: Account, prefill: bool = False) -> set[str]:  # noqa: F811
    """Every number in sight is what the account says, and there is no other. Returns the names of the figures."""
    home = page.evaluate("() => ({...document.getElementById('main').dataset})")
    seen: set[str] = set()
    for figure in page.evaluate(FIGURES):
        whole = {name: None if figure[name] is None else int(figure[name]) for name in ("round", "node", "depth")}
        sequence = int(figure["sequence"] if figure["sequence"] is not None else home["sequence"])
        place = Place(figure["trace"] or home["trace"], sequence, **whole, prefill=prefill)
        name, text = figure["name"], figure["text"]
        if name in ("clock", "total", "tokens-now", "passes-now"):
            continue  # of the race at one moment: its own test
        value = account.expected(name, place)
        values = value if isinstance(value, list) else [value]
        assert any(says(text, v, name) for v in values), f"{name} at {place} is shown as {text!r}; the trace says {value}"
        seen.add(name)
    assert page.evaluate(STRAY) == [], "numbers that are no figures"
    return seen


# ---- figures and words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, "cut"])
def test_every_number_of_every_round_is_in_the_trace(name: str, page: Any) -> None:  # noqa: F811
    account = show(page, trace(name))
    rounds = account.rounds(Place(trace(name).name, 0))
    seen: set[str] = set()
    for number in range(1, len(rounds) + 1)[:5]:
        go(page, f"view=step&round={number}")
        seen |= check_figures(page, account)
        go(page, f"view=tree&round={number}&token={len(rounds[number - 1]['tokens']) // 2}")
        seen |= check_figures(page, account)
    assert {"round", "rows", "forward", "duration", "emitted", "time-accept"} <= seen
    if name in SAMPLED:
        assert {"p", "node", "sees", "fallen-with", "p-next", "accepted", "proposed"} <= seen
    if name in ("block", "rejection", "traversal", "siblings"):
        assert {"q", "draw", "test"} <= seen
    assert ("favourite" in seen) == (name == "block")


@pytest.mark.parametrize("name", SAMPLED)
def test_outcomes_and_tokens_are_the_traces(name: str, page: Any) -> None:  # noqa: F811
    show(page, trace(name))
    texts: dict[str, str] = {}
    for r in lines(trace(name))[1][:6]:
        texts |= r["texts"]
        go(page, f"round={r['number'] + 1}")
        rows = page.evaluate(
            "() => [...document.querySelectorAll('.nodes tbody tr')].map(row => ({node: Number(row.dataset.node), "
            "token: row.querySelector('td .token').textContent, word: row.querySelector('.outcome .word').textContent}))"
        )
        assert [row["node"] for row in rows] == list(range(1, len(r["tokens"])))
        for row in rows:
            i = row["node"]
            assert row["token"] == readable(texts[str(r["tokens"][i])])
            assert row["word"] == outcome(r, i)
        final = page.evaluate("() => [...document.querySelectorAll('[data-text=so-far] .token')].at(-1)?.className")
        own = "recovered" if r["path"][-1] in r["parents"][1:] else "bonus" if len(r["tokens"]) > 1 else "plain"
        assert final == f"token role-{own}"


def readable(text: str) -> str:
    if text.strip(" ") == "":
        return "\u2423" * len(text)
    return text.replace("\n", "\u23ce").replace("\t", "\u21e5").replace("\r", "\u240d")


def outcome(r: dict[str, Any], i: int) -> str:
    if i in r["path"]:
        return "accepted" if r["path"].index(i) <= accepted(r) else "cut off"
    above = ancestors(r, i)[1:-1]
    if any(node not in r["path"] for node in above):
        return "fell too"
    was_tested = any(test["node"] == i for test in r["tests"])
    return "refused" if was_tested or r["parents"][i] == r["path"][-1] else "not needed"


@pytest.mark.parametrize("name", [*SAMPLED, "suffix", "cut"])
def test_the_reasons_are_true(name: str, page: Any) -> None:  # noqa: F811
    """What a reason says was tested was tested, with the values that its words give it."""
    show(page, trace(name))
    kinds = set()
    for r in lines(trace(name))[1][:10]:
        if len(r["tokens"]) == 1:
            continue
        go(page, f"round={r['number'] + 1}")
        for i, why in enumerate(page.locator(".nodes .why").all_inner_texts(), 1):
            why = why.replace("\xa0", " ")
            test = decision_on(r, i) if any(t["node"] == i for t in r["tests"]) else None
            siblings = [j for j, parent in enumerate(r["parents"]) if parent == r["parents"][i]]
            if "min(1, p/q)" in why:
                assert test and test["probability"] == pytest.approx(min(1, r["p"][i] / r["q"][i])) and siblings[0] == i
                kinds.add("ratio")
            if "with just that probability" in why:
                assert test and test["probability"] == pytest.approx(r["p"][i]) and r["q"][i] is None
                kinds.add("p")
            if "of what the refusals before it left" in why:
                assert test and siblings.index(i) > 0
                kinds.add("sibling")
            if "which is below it" in why:
                end = test or decision_on(r, r["path"][-1])
                assert end["draw"] < end["probability"]
            if "which is not below it" in why:
                assert test and test["draw"] >= test["probability"]
            if "was refused" in why and "p = 0," in why:
                assert r["p"][i] == 0
            if "replaced it" in why:
                assert i == first_refused(r) and ("residual" in why or name in ("coupled", "typical", "suffix"))
                kinds.add("replaced")
            assert ("was kept" in why) == (i in r["path"]), why
            assert ("had ended before it" in why) == (outcome(r, i) == "cut off")
    wanted = {"rejection": {"ratio", "replaced"}, "siblings": {"ratio", "sibling"}, "chosen": {"p", "sibling"}}
    assert wanted.get(name, set()) <= kinds


def test_why_was_that_token_refused_and_what_replaced_it(page: Any) -> None:  # noqa: F811
    """The question of someone who sees this for the first time: the answer is in the token's own row."""
    rounds = lines(trace("rejection"))[1]
    r = next(r for r in rounds if len(r["path"]) > 1 and r["path"][-1] in r["parents"][1:])
    token = first_refused(r)
    show(page, trace("rejection"))
    page.locator("#sought").fill(str(r["number"] + 1))
    page.keyboard.press("Enter")
    row = page.locator(f".nodes tr[data-node='{token}']")
    test = decision_on(r, token)
    why = row.locator(".why").inner_text().replace("\xa0", " ")
    pattern = (
        rf"Token {token} .+ was refused: the target gave it p = (\S+), the drafter q = (\S+), so it is kept with probability "
        r"min\(1, p/q\) = (\S+), drawn (\S+), which is not below it\. .+ replaced it, drawn from the residual, .+ \(p = (\S+)\)\."
    )
    found = re.fullmatch(pattern, why, re.DOTALL)
    assert found, why
    values = (r["p"][token], r["q"][token], test["probability"], test["draw"], r["p_next"])
    assert all(says(text, value, "p") for text, value in zip(found.groups(), values))


# ---- the views -------------------------------------------------------------------------------------------------------------


def test_stepping_shows_draft_verify_keep_commit_in_turn(page: Any) -> None:  # noqa: F811
    account = show(page, trace("rejection"), at="round=2&step=draft")
    r = account.round(Place("rejection.jsonl", 0, 1))
    assert page.locator(".phases .now button").inner_text().endswith("Draft")
    assert page.locator(".nodes [data-n=q]").count() == len(r["tokens"]) - 1
    assert page.locator(".nodes [data-n=p]").count() == 0 and page.locator(".nodes .role-refused").count() == 0
    page.keyboard.press("ArrowRight")
    assert page.locator(".nodes td[data-label='Target p'] [data-n=p]").count() == len(r["tokens"]) - 1
    assert page.locator(".nodes td[data-label=Drawn] [data-n=draw]").count() == 0
    page.keyboard.press("ArrowRight")
    assert page.locator(".nodes td[data-label=Drawn] [data-n=draw]").count() == len(r["tests"])
    assert "step=keep" in page.url
    page.keyboard.press("ArrowRight")
    assert page.locator(".phases .now button").inner_text().endswith("Commit") and "step=" not in page.url
    page.keyboard.press("ArrowRight")
    assert "round=3" in page.url and "step=draft" in page.url
    page.keyboard.press("ArrowLeft")
    assert page.url.endswith("round=2")


def test_the_text_over_the_rounds_is_the_output(page: Any) -> None:  # noqa: F811
    for name in ("block", "suffix", "coupled"):
        account = show(page, trace(name), at="view=text&round=2")
        seen = check_figures(page, account)
        assert {"per-pass", "rate", "longest", "place-first"} <= seen
        page.locator("details summary", has_text="By depth").click()
        assert {"reached", "kept", "kept-share"} <= check_figures(page, account)
        texts: dict[str, str] = {}
        expected = []
        for r in lines(trace(name))[1]:
            texts |= r["texts"]
            expected += [readable(texts[str(token)]) for token in r["emitted"]]
        shown = page.locator(".text-view .text .token").all_text_contents()
        assert [text.replace("\u23ce\n", "\u23ce") for text in shown] == expected
        assert page.evaluate(
            "() => { const c = document.querySelector('canvas'); const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; return d.some(x => x) }"
        )
        page.locator(".text-view .text .token").nth(20).click()
        number = int(re.search(r"round=(\d+)", page.url)[1])  # type: ignore[index]
        first = account._place_first(Place(trace(name).name, 0, number - 1))
        assert first <= 21 < first + len(account.round(Place(trace(name).name, 0, number - 1))["emitted"])
    assert {"hard", "easy-last"} <= seen


def test_the_tree_and_its_mask(page: Any) -> None:  # noqa: F811
    for name in ("traversal", "coupled"):
        rounds = lines(trace(name))[1]
        show(page, trace(name))
        for r in rounds[:5]:
            go(page, f"view=tree&round={r['number'] + 1}")
            assert page.locator(".tree .node[data-node]").count() == len(r["tokens"])
            for row in page.locator(".mask .row").all():
                node = int(row.get_attribute("data-node"))
                assert [int(x) for x in row.get_attribute("data-sees").split()] == ancestors(r, node)
                cells = sum(int(h) + 1 for h in re.findall(r"h(\d+)v", row.locator("path").get_attribute("d")))
                side = int(page.locator(".mask").get_attribute("width")) // len(r["tokens"])
                assert cells == side * len(ancestors(r, node))
            kept = page.locator(".tree .node.role-accepted").evaluate_all("nodes => nodes.map(n => Number(n.dataset.node))")
            assert sorted(kept) == sorted(r["path"][1 : accepted(r) + 1])
        page.locator(".mask .row[data-node='2']").click()
        assert page.locator(".tree .node.chosen").get_attribute("data-node") == "2" and "token=2" in page.url
        page.locator(".tree .node[data-node='3']").focus()
        page.keyboard.press("Enter")
        assert page.locator(".mask .row.chosen").get_attribute("data-node") == "3"
        assert page.evaluate("() => document.activeElement.dataset.node") == "3", "the focus was lost"


def test_the_race_runs_on_measured_times(page: Any) -> None:  # noqa: F811
    account = show(page, trace("plain"), trace("suffix"), at="view=race")
    lanes = [Place("plain.jsonl", 0), Place("suffix.jsonl", 0)]
    assert {"done", "speed", "ratio", "seconds", "prefill"} <= check_figures(page, account)
    ends = [account.ends(lane) for lane in lanes]
    total = max(e[-1] for e in ends)
    for share in (0, 250, 500, 1000):
        page.locator(".race-controls input[type=range]").fill(str(share))
        at = share / 1000 * total
        now = page.evaluate("() => [...document.querySelectorAll('[data-n=passes-now]')].map(e => Number(e.textContent))")
        assert now == [sum(end <= at + 1e-12 for end in e) for e in ends]
        tokens = page.evaluate("() => [...document.querySelectorAll('[data-n=tokens-now]')].map(e => Number(e.textContent))")
        assert tokens == [sum(len(r["emitted"]) for r in account.rounds(lane)[:n]) for lane, n in zip(lanes, now)]
        assert [page.locator(".lane-text").nth(i).locator(".token").count() for i in (0, 1)] == tokens
    assert says(page.locator("[data-n=total]").inner_text().rstrip("s\n "), total)
    page.locator("text=count the prompt's prefill").click()
    check_figures(page, account, prefill=True)
    assert says(
        page.locator("[data-n=total]").inner_text().rstrip("s\n "),
        max(account.ends(Place(p.trace, 0, prefill=True))[-1] for p in lanes),
    )


def test_playing_takes_the_measured_time(page: Any) -> None:  # noqa: F811
    account = show(page, trace("plain"), trace("suffix"), at="view=race")
    page.get_by_label("Speed of playing").select_option("0.1")
    total = max(account.ends(Place(f"{name}.jsonl", 0))[-1] for name in ("plain", "suffix"))
    began = page.evaluate("() => performance.now()")
    page.locator("#main").focus()
    page.keyboard.press("Space")
    page.wait_for_function("() => document.querySelector('[data-key=play]').textContent === 'Pause'")
    page.wait_for_function("() => document.querySelector('[data-key=play]').textContent === 'Play'", polling="raf")
    took = (page.evaluate("() => performance.now()") - began) / 1000
    assert 10 * total <= took < 10 * total + 1.5


def test_comparing_drafters(page: Any) -> None:  # noqa: F811
    account = show(page, *map(trace, ("plain", "suffix", "lookup", "block")), at="view=compare")
    seen = check_figures(page, account)
    assert {"candidates", "ratio", "propose-share", "most-passes", "most-seconds", "parting"} <= seen
    assert page.locator(".compared tbody tr").count() == 4 and page.locator(".chart").count() == 2
    assert page.locator("td", has_text="same as plain").count() == 2
    ends = page.locator("[data-chart=passes] .series").evaluate_all("paths => paths.map(p => p.getTotalLength() > 0)")
    assert ends == [True] * 4
    page.locator(".compared button", has_text="lookup").click()
    assert "view=step" in page.url and page.evaluate("() => main.dataset.trace") == "lookup.jsonl"


def test_a_benchmark_is_compared_prompt_by_prompt(page: Any) -> None:  # noqa: F811
    account = show(page, trace("bench"))
    header = lines(trace("bench"))[0]
    options = page.locator("#sequences option").all_inner_texts()
    assert len(options) == len(set(options)) == len(header["sequences"]) == 12
    for sequence in (1, 4, 10):
        go(page, f"view=compare&trace=1&sequence={sequence}")
        assert page.locator(".compared tbody tr").count() == 6
        check_figures(page, account)
        go(page, f"view=race&trace=1&sequence={sequence}")
        check_figures(page, account)


# ---- getting about ---------------------------------------------------------------------------------------------------------


def test_keys_slider_and_finding(page: Any) -> None:  # noqa: F811
    account = show(page, trace("block"))
    rounds = account.rounds(Place("block.jsonl", 0))
    keys = {
        "End": len(rounds),
        "PageUp": len(rounds) - 1,
        "Home": 1,
        "PageDown": 2,
        "Shift+ArrowRight": 3,
        "Shift+ArrowLeft": 2,
    }
    for key, number in keys.items():
        page.keyboard.press(key)
        assert page.url.endswith(f"round={number}"), key
        assert page.locator("#place [data-n=round]").inner_text() == str(number)
        assert page.locator("#slider").input_value() == str(number - 1)
        assert page.locator("#slider").get_attribute("aria-valuetext") == f"Round {number} of {len(rounds)}"
        assert f"Round {number}." in page.locator("#live").inner_text()
    page.locator("#slider").fill("4")
    assert page.url.endswith("round=5")
    page.keyboard.press("ArrowDown")
    assert "token=1" in page.url and page.locator("#live").inner_text().startswith("Token 1 ")
    for key, view in zip("12345", ("step", "race", "tree", "text", "compare")):
        page.locator("#main").focus()
        page.keyboard.press(key)
        assert f"view={view}" in page.url and page.locator("nav [aria-current=page]").count() == 1
    page.keyboard.press("1")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    texts: dict[str, str] = {}
    for r in rounds:
        texts |= r["texts"]
    outputs = ["".join(texts[str(t)] for t in r["emitted"]) for r in rounds]
    sought = outputs[6][:3]
    page.keyboard.type(sought)
    page.keyboard.press("Enter")
    text = "".join(outputs)
    starts = [len("".join(outputs[:i])) for i in range(len(outputs))]
    at = text.lower().find(sought.lower(), starts[5])
    at = text.lower().find(sought.lower()) if at < 0 else at
    assert page.url.split("round=")[1] == str(sum(start <= at for start in starts))


def test_a_link_leads_back(page: Any) -> None:  # noqa: F811
    show(page, trace("plain"), trace("traversal"), at="view=tree&trace=2&sequence=0&round=3&token=2")
    link = page.url
    assert page.locator(".tree .node.chosen").get_attribute("data-node") == "2"
    page.goto("about:blank")
    page.goto(link)
    assert page.url == link and page.locator(".tree .node.chosen").get_attribute("data-node") == "2"
    for nonsense in ("round=9999", "view=none&round=x&token=77", "trace=9&sequence=5", "round=0", "token=-1&step=no"):
        go(page, nonsense)
        assert page.locator("#place").inner_text().startswith("Round ")


def test_it_can_be_used_without_seeing_it(page: Any) -> None:  # noqa: F811
    show(page, trace("traversal"))
    nameless = """() => [...document.querySelectorAll('button, input, select, a, [role=button], [role=img], dialog, nav, footer')]
        .filter(e => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.textContent.trim() || e.labels?.length))
        .map(e => e.outerHTML)"""
    for view in ("step", "race", "tree", "text", "compare"):
        go(page, f"view={view}&round=2")
        assert page.evaluate(nameless) == []
        assert page.locator("main h2").count() == 1 and page.locator("html[lang=en]").count() == 1
    assert page.locator("#live[aria-live=polite]").count() == 1
    go(page, "view=step&round=3")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert (
        page.evaluate("() => document.activeElement.id") == "main" and page.locator("#place [data-n=round]").inner_text() == "3"
    )
    page.locator(".phases button").first.focus()
    page.keyboard.press("Enter")
    assert "step=draft" in page.url and page.evaluate("() => document.activeElement.dataset.key") == "phase-draft"


def brightness(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("role", COLOURS)
def test_colours_can_be_read(role: str) -> None:
    for colour, ground in ((COLOURS[role].light, "#ffffff"), (COLOURS[role].dark, "#1d2024")):
        one, other = sorted((brightness(colour), brightness(ground)))
        assert (other + 0.05) / (one + 0.05) >= 4.5


def test_light_and_dark(browser: Any) -> None:  # noqa: F811
    for scheme, ground in (("light", "rgb(247, 247, 245)"), ("dark", "rgb(21, 23, 26)")):
        with watched(browser, color_scheme=scheme) as opened:
            show(opened, trace("block"))
            painted = "() => getComputedStyle(document.body).backgroundColor"
            assert opened.evaluate(painted) == ground
            opened.locator("#theme").click()
            assert opened.evaluate(painted) != ground
            opened.keyboard.press("t")
            assert opened.evaluate(painted) == ground


def test_nothing_is_too_wide_for_a_telephone(browser: Any) -> None:  # noqa: F811
    with watched(browser, viewport={"width": 390, "height": 800}) as opened:
        show(opened, trace("plain"), trace("traversal"))
        for view in ("step", "race", "tree", "text", "compare"):
            go(opened, f"view={view}&trace=2&round=2")
            assert opened.evaluate("() => document.documentElement.scrollWidth") <= 390, view


# ---- without a network, with damage, with much -----------------------------------------------------------------------------


def test_it_works_with_the_network_off(browser: Any) -> None:  # noqa: F811
    with watched(browser) as opened:
        asked: list[str] = []
        opened.on("request", lambda request: asked.append(request.url))
        opened.context.set_offline(True)
        show(opened, trace("traversal"))
        for view in ("step", "race", "tree", "text", "compare"):
            go(opened, f"view={view}")
        assert opened.locator("main h2").count() == 1
        assert all(url.startswith(("file:", "about:", "data:")) for url in asked)


DAMAGE: dict[str, tuple[Any, str, int]] = {
    "empty": (lambda whole: b"", "is empty", 0),
    "only a header": (lambda whole: whole.split(b"\n")[0] + b"\n", "no rounds in it", 0),
    "cut short": (lambda whole: whole[: whole.rindex(b'"path"')], "last line is cut short", -1),
    "cut in a header": (lambda whole: whole[:90], "does not begin with a trace's header", 0),
    "newer": (
        lambda whole: whole.replace(b'"outrider_trace": 2', b'"outrider_trace": 3', 1),
        "of version 3; this page knows",
        0,
    ),
    "a broken line": (lambda whole: whole.replace(b'"number": 3,', b'"number": {,', 1), "Line 5 is not a round", -1),
    "nonsense in a line": (lambda whole: whole.replace(b'"path": [0', b'"path": [7777', 1), "Line 2 is not a round", -1),
    "no header": (lambda whole: whole.split(b"\n", 1)[1], "does not begin with a trace's header", 0),
    "no header, and a broken line": (
        lambda whole: whole.split(b"\n", 1)[1].replace(b'"number": 3,', b'"number": {,', 1),
        "Line 4 is not a round",
        -1,
    ),
    "no trace": (lambda whole: b"hello\nworld\n", "does not begin with a trace's header", 0),
    "not text": (lambda whole: bytes(range(256)) * 20, "does not begin with a trace's header", 0),
    "another JSON": (lambda whole: b'{"outrider_trace": 2}\n[1]\nnull\n7\n', "lines are not rounds", 0),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_trace_is_told_and_its_readable_part_shown(what: str, page: Any, tmp_path: Path) -> None:  # noqa: F811
    whole = trace("block").read_bytes()
    spoil, message, lost = DAMAGE[what]
    spoiled = spoil(whole)
    assert spoiled != whole
    (tmp_path / "damaged.jsonl").write_bytes(spoiled)
    show(page, tmp_path / "damaged.jsonl")
    assert message in page.locator("#problems").inner_text()
    nothing = what in ("empty", "only a header", "cut in a header", "no trace", "not text", "another JSON")
    if nothing:
        assert "No rounds to show" in page.locator("main").inner_text()
        return
    count = len(lines(trace("block"))[1]) + lost
    assert page.locator("#slider").get_attribute("max") == str(count - 1)
    for view in ("step", "race", "tree", "text", "compare"):
        go(page, f"view={view}")
        assert page.locator("main h2").count() == 1


def test_a_trace_of_version_1_is_shown_without_texts(page: Any, tmp_path: Path) -> None:  # noqa: F811
    header, rounds = lines(trace("rejection"))
    for r in rounds:
        del r["texts"], r["p_next"]
        for test in r["tests"]:
            del test["draw"]
    del header["prompts"]
    old = [{**header, "outrider_trace": 1}, *rounds]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    show(page, tmp_path / "old.jsonl", at="round=2")
    assert "no texts of tokens" in page.locator("#problems").inner_text()
    shown = page.locator(".nodes td[data-label=Token]").all_inner_texts()
    assert shown == [f"#{token}" for token in rounds[1]["tokens"][1:]]


def test_a_text_cannot_become_part_of_the_page(page: Any, tmp_path: Path) -> None:  # noqa: F811
    header, rounds = lines(trace("rejection"))
    evil = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    header["prompts"] = {"0": evil}
    header["drafter"]["name"] = evil
    for r in rounds:
        r["texts"] = dict.fromkeys(r["texts"], evil)
    file = tmp_path / 'a"><script>document.title = 1<.jsonl'
    file.write_text("".join(json.dumps(line) + "\n" for line in [header, *rounds]))
    show(page, file)
    assert evil in page.locator(".nodes .token").first.inner_text()
    for view in ("race", "tree", "text", "compare"):
        go(page, f"view={view}")
    assert page.title() == "Outrider: rounds of a trace"


def test_a_file_is_opened_on_the_page(page: Any) -> None:  # noqa: F811
    show(page, trace("plain"))
    page.locator("#open").set_input_files(str(trace("traversal")))
    page.wait_for_function("() => document.getElementById('main').dataset.trace === 'traversal.jsonl'")
    assert page.locator("#sequences option").count() == 2
    go(page, "view=compare")
    assert page.locator(".compared tbody tr").count() == 2


@pytest.fixture(scope="module")
def long_trace() -> Path:
    """10,000 rounds: 250 real ones on a table as the target, again and again."""
    from test_trace import Sampling

    from outrider.decode import Fixed, Sequence, decode
    from outrider.sampling import SamplingParams
    from outrider.targets.table import TableTarget
    from outrider.trace import TraceWriter

    target = TableTarget(seed=3, eos=(), context_length=4096)
    sequence = Sequence(target, [1, 2, 3], SamplingParams(temperature=1.0, seed=5, max_tokens=4000), "block")
    some = list(islice(decode(target, Sampling(), [sequence], Fixed(4)), 250))
    context, path = 3, folder() / "long.jsonl"
    with TraceWriter(path, {"drafter": {"name": "sampling"}, "draft": 4}) as writer:
        for number, r in enumerate(islice(cycle(some), 10_000)):
            writer.write(replace(r, number=number, context=context), target.tokenizer)
            context += len(r.emitted)
    return path


def test_ten_thousand_rounds_stay_smooth(page: Any, long_trace: Path) -> None:  # noqa: F811
    show(page, long_trace)
    loaded = page.evaluate(
        "() => { const n = performance.getEntriesByType('navigation')[0]; return n.loadEventEnd - n.startTime }"
    )
    assert page.locator("#slider").get_attribute("max") == "9999"
    took = """key => {
      const began = performance.now();
      document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
      document.body.getBoundingClientRect();
      return performance.now() - began;
    }"""
    steps: dict[str, list[float]] = {}
    for view in ("step", "tree", "text"):
        go(page, f"view={view}&round=5000")
        steps[view] = sorted(page.evaluate(took, key) for key in ["PageDown"] * 15)
    for view in ("race", "compare"):
        began = page.evaluate("() => performance.now()")
        go(page, f"view={view}")
        assert page.evaluate("() => performance.now()") - began < 2000
    print(f"loaded in {loaded:.0f} ms; a step takes { ({view: round(times[7], 1) for view, times in steps.items()}) } ms")
    assert loaded < 2000
    assert all(times[7] < 50 for times in steps.values()), steps
