"""Colours, legend and last line of `run` and `demo`, on a real pseudo-terminal and without one."""

from __future__ import annotations

import re

import pytest
from terminal import Terminal
from tiny import tiny_folder
from toys import Scripted, run, tiny_target
from typer.testing import CliRunner

import outrider
from outrider.cli import app
from outrider.cli.screen import counts
from outrider.colours import COLOURS
from outrider.sampling import SamplingParams
from outrider.trace import read_trace, statistics

MODEL = str(tiny_folder(eos=None))
SHORT = ("-t", MODEL, "--max-tokens", "60")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])[;m]")  # foreground colours among the marks


def test_what_the_targets_own_token_is():
    target = tiny_target()
    prompt = [5, 6, 7]
    (wanted,), _ = run(target, Scripted([[]]), [prompt], SamplingParams(max_tokens=9))
    text = [*prompt, *wanted.tokens]
    wrong = [*text[:6], (text[6] + 1) % 101, *text[7:]]
    _, (rounds,) = run(target, Scripted([wrong]), [prompt], SamplingParams(max_tokens=9), draft=4)
    first = rounds[0]
    assert (first.accepted, first.own) == (3, "recovered")
    _, (rounds,) = run(target, Scripted([text[:6]]), [prompt], SamplingParams(max_tokens=9), draft=4)
    assert (rounds[0].accepted, rounds[0].own) == (3, "bonus")
    assert rounds[1].own == "plain"
    found = counts(rounds)
    assert found["accepted"] + found["recovered"] + found["bonus"] + found["plain"] == 9
    assert found["drafted"] == found["accepted"] + found["refused"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    trace = tmp_path_factory.mktemp("run") / "t.jsonl"
    terminal = Terminal("run", *SHORT, "The bridge", "--trace", trace)
    assert terminal.end() == 0
    return terminal, read_trace(trace)[1]


def test_a_terminal_shows_roles_in_colour_with_a_legend_and_figures(shown):
    terminal, rounds = shown
    assert "\x1b[4;32m" in terminal.seen  # accepted: green, underlined
    found = counts(rounds)
    assert found["accepted"] and found["bonus"] + found["recovered"]
    for role in ("accepted", "refused", "recovered", "bonus"):
        assert (f"{found[role]} {role}" in terminal.plain) == (found[role] > 0)
    last = terminal.plain.rstrip().splitlines()[-1]
    assert f"{statistics(rounds).emitted} tokens;" in last and "tokens per pass" in last
    assert "".join(r.text for r in rounds) in terminal.plain


def test_every_piece_has_the_colour_of_its_role(shown):
    terminal, rounds = shown
    codes = {"accepted": "4;32", "recovered": "33", "bonus": "36"}
    wanted = ""
    for r in rounds:
        for text, drafted in r.pieces:
            code = codes.get("accepted" if drafted else r.own)
            wanted += f"\x1b[{code}m{text}\x1b[0m" if code else text
    assert wanted in terminal.seen


def test_no_color_and_dumb_terminals():
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        terminal = Terminal("run", *SHORT, "The bridge", **environment)
        assert terminal.end() == 0
        assert not COLOUR.search(terminal.seen) and "accepted" in terminal.plain


def test_a_pipe_gets_the_text_alone():
    result = CliRunner().invoke(app, ["run", *SHORT, "The bridge"])
    engine = outrider.load(MODEL)
    assert result.stdout == engine.generate([{"role": "user", "content": "The bridge"}], max_tokens=60).text
    assert "\x1b" not in result.output and "bonus" not in result.stderr


def test_the_demo_has_them_too():
    folder = str(tiny_folder(eos=None, context=2048))
    terminal = Terminal("demo", "-t", folder, "-d", "suffix", "--draft", "8", "--max-tokens", "40", "--only", "2")
    assert terminal.end() == 0
    assert "\x1b[4;32m" in terminal.seen and " accepted" in terminal.plain
    assert re.search(r"In all: \d+\.\d\d times plain decoding with suffix .* accepted / \d+ proposed$", terminal.plain.rstrip())


def test_the_demos_last_line_is_a_figure_of_all_prompts():
    folder = str(tiny_folder(eos=None, context=2048))
    arguments = ["demo", "-t", folder, "--max-tokens", "12"]
    out = CliRunner().invoke(app, arguments).stdout
    found = re.search(r"(\d+) accepted / (\d+) proposed$", out.rstrip())
    assert found and "\x1b" not in out
    rows = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) / (\d+) +│", out)]
    assert len(rows) == 4 and tuple(map(sum, zip(*rows))) == tuple(map(int, found.groups()))


def test_every_role_has_a_colour_and_a_meaning():
    assert list(COLOURS) == ["drafted", "accepted", "refused", "recovered", "bonus"]
    values = list(COLOURS.values())
    assert len({c.light for c in values}) == len({c.dark for c in values}) == len({c.terminal for c in values}) == 5
