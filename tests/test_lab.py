"""The lab: its words and checks, and the whole of it on a real pseudo-terminal, with wrong answers, hints and a resume."""

from __future__ import annotations

import json
import re

import pytest
from terminal import Terminal
from tiny import tiny_folder

from outrider.accept import RULES
from outrider.cli.lab import copy_of, desk_for, usual_drafter
from outrider.cli.lab_views import roles
from outrider.cli.options import Loading
from outrider.errors import LoadError, ParameterError
from outrider.lab import course
from outrider.lab.course import COURSE
from outrider.lab.desk import Settings, Speed
from outrider.lab.progress import Progress
from outrider.lab.words import Laws, emitted, keep_the_likeliest, kept, recovered, redraw_from_p, ways
from outrider.models import folder
from outrider.targets import llama

TARGET = str(tiny_folder(eos=None, context=2048))
PAIR = ("-t", TARGET, "-d", "early-exit", "-o", "upto=1", "-o", "min_probability=0")
BY_NAME = {objective.name: objective for objective in COURSE}
STEPS = [*BY_NAME]


@pytest.fixture(scope="module")
def desk():
    made = desk_for(TARGET, "early-exit", {"upto": "1", "min_probability": "0"}, Loading())
    made.load()
    yield made
    made.close()


@pytest.fixture
def fresh(desk):
    desk.clear()
    desk.laws, desk.costs = Laws(), None
    desk.settings = Settings("early-exit", (("upto", "1"), ("min_probability", "0")), tokens=24)
    return desk


def check(desk, name, words):
    return BY_NAME[name].check(desk, words.split())


# ---- three words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("laws", [Laws(), Laws((0.1, 0.0, 0.9), (0.0, 1.0, 0.0)), Laws((1 / 3, 1 / 3, 1 / 3), (0.9, 0.1, 0.0))])
def test_shipped_rules_emit_the_targets_law(rule, laws):
    found = ways(RULES[rule], laws)
    assert sum(way.probability for way in found) == pytest.approx(1, abs=1e-12)
    assert emitted(found) == pytest.approx(laws.p, abs=1e-12)
    assert kept(found) == pytest.approx([min(p, q) for p, q in zip(laws.p, laws.q)], abs=1e-12)
    assert recovered(found) == pytest.approx([max(p - q, 0) for p, q in zip(laws.p, laws.q)], abs=1e-12)


def test_the_wrong_rules_are_wrong():
    for rule in (redraw_from_p, keep_the_likeliest):
        found = emitted(ways(rule, Laws()))
        assert sum(found) == pytest.approx(1) and max(abs(x - p) for x, p in zip(found, Laws().p)) > 0.05


def test_laws_must_be_laws():
    for p in ((0.5, 0.5, 0.5), (1.5, -0.5, 0.0), (1.0,)):
        with pytest.raises(ParameterError, match="add up to 1"):
            Laws(p)


# ---- checks ----------------------------------------------------------------------------------------------------------------


def test_the_pair_is_reached_by_loading_and_measuring(fresh):
    assert not BY_NAME["pair"].check(fresh, None).done
    fresh.measure_costs()
    assert BY_NAME["pair"].check(fresh, None).done
    assert f"{fresh.costs.rows[1]:.1f} ms" in BY_NAME["pair"].why(fresh)


def test_the_rate_is_that_of_the_last_run(fresh):
    assert "run" in check(fresh, "rate", "0.5").said
    stats = fresh.run("The bridge over the river").result.stats
    assert not check(fresh, "rate", f"{stats.acceptance_length}").done
    assert "tokens per pass" in check(fresh, "rate", f"{stats.acceptance_length:.3f}").said
    for wrong in ("", "many", "1 2", "1/0"):
        assert "one number" in check(fresh, "rate", wrong).said
    rate = stats.accepted / stats.proposed
    assert not check(fresh, "rate", f"{rate + 0.05}").done
    for right in (f"{rate:.3f}", f"{100 * rate:.1f}%", f"{stats.accepted}/{stats.proposed}"):
        assert check(fresh, "rate", right).done
    fresh.change(drafter="none", options=())
    fresh.run("The bridge")
    assert "no run with drafts" in check(fresh, "rate", "0").said


def test_lengths_are_judged_by_what_was_measured(fresh):
    assert "at least four" in check(fresh, "length", "4 never").said
    fresh.sweep = {n: Speed(10.0 * r, r, 1.5) for n, r in ((1, 1.2), (2, 1.5), (4, 1.49), (8, 0.9), (16, 0.7))}
    assert not check(fresh, "length", "1 8").done and not check(fresh, "length", "2 16").done
    assert not check(fresh, "length", "2 never").done and not check(fresh, "length", "2").done
    assert check(fresh, "length", "4 8").done and fresh.settings.draft == 4
    assert course.best_lengths(fresh) == [2, 4] and course.first_loss(fresh) == 8
    fresh.sweep = {n: Speed(10.0, r, 1.5) for n, r in ((1, 1.2), (2, 1.5), (4, 1.4), (8, 1.3))}
    assert "as far as 16" in check(fresh, "length", "2 never").said
    fresh.sweep[16] = Speed(10.0, 1.1, 1.5)
    assert check(fresh, "length", "2 never").done


def test_a_sweep_is_forgotten_when_it_no_longer_applies(fresh):
    fresh.sweep = {1: Speed(1, 1, 1)}
    fresh.change(draft=7, seed=3)
    assert fresh.sweep
    fresh.change(temperature=0.5)
    assert not fresh.sweep


def test_a_sweep_measures_beside_plain_decoding(fresh):
    told = []
    found = fresh.run_sweep([1, 3], told.append)
    assert set(found) == {1, 3} and fresh.plain_speed > 0 and len(told) == 2 * 3
    assert found[3].ratio == pytest.approx(found[3].tokens_per_second / fresh.plain_speed)
    fresh.change(drafter="none", options=())
    with pytest.raises(ParameterError, match="choose a drafter"):
        fresh.run_sweep([1])


def test_a_tree_is_judged_by_its_round(fresh):
    fresh.run("The bridge")
    chain = next(r for r in fresh.runs[-1].result.rounds if r.proposed)
    assert "first" in check(fresh, "tree", "1 bonus").said
    fresh.shown = fresh.runs[-1], chain
    assert "chain" in check(fresh, "tree", "1 bonus").said
    fresh.change(options=(("upto", "1"), ("shape", "tree"), ("min_probability", "0")), draft=6)
    rounds = fresh.run("The bridge").result.rounds
    for round in (r for r in rounds if r.own and any(p != i - 1 for i, p in enumerate(r.parents))):
        fresh.shown = fresh.runs[-1], round
        other = "bonus" if round.own == "recovered" else "recovered"
        assert check(fresh, "tree", f"{round.accepted} {round.own}").done
        assert not check(fresh, "tree", f"{round.accepted + 1} {round.own}").done
        assert not check(fresh, "tree", f"{round.accepted} {other}").done
        became = roles(round)
        assert became.count("accepted") == round.accepted + 1 and not check(fresh, "tree", "bonus").done


def test_one_seed_needs_three_drafters_and_one_text(fresh):
    assert check(fresh, "seed", "x").said and not BY_NAME["seed"].check(fresh, None).said
    fresh.change(temperature=0.8, seed=7)
    own = fresh.settings.options
    for drafter, options in (("early-exit", own), ("suffix", ()), ("suffix", ()), ("none", ())):
        assert not BY_NAME["seed"].check(fresh, None).done
        fresh.change(drafter=drafter, options=options)
        fresh.run("The bridge")
    assert BY_NAME["seed"].check(fresh, None).done
    assert len({run.result.text for run in fresh.runs}) == 1
    wrong = fresh.runs[0].result.tokens
    forged = fresh.runs[0].result.__class__(
        **fresh.runs[0].result.__dict__ | {"tokens": (*wrong[:5], (wrong[5] + 1) % 200, *wrong[6:])}
    )
    fresh.runs[0] = fresh.runs[0].__class__(fresh.runs[0].settings, "The bridge", forged)
    verdict = BY_NAME["seed"].check(fresh, None)
    assert not verdict.done and "must not be" in verdict.said


def test_sums_by_hand_are_compared_with_the_engines(fresh):
    assert check(fresh, "kept", "0.2 0.3 0.1 0.4").done and check(fresh, "kept", "1/5 30% 0.1 0.4").done
    assert "once it is drafted" in check(fresh, "kept", "1 0.4286 1 0.4").said
    assert "no" in check(fresh, "kept", "0.2 0.5 0.1 0.4").said and "Four numbers" in check(fresh, "kept", "0.2").said
    right = "0.3 0 0.1 0.5 0.3 0.2"
    assert "enumerate rejection" in check(fresh, "sums", right).said
    assert "maybe at all" in check(fresh, "sums", "0.3 0 0.1 0.5 0.3 0.3").said
    fresh.enumerated.append("rejection")
    assert check(fresh, "sums", right).done
    fresh.laws = Laws((0.6, 0.2, 0.2), (0.1, 0.1, 0.8))
    assert not check(fresh, "kept", "0.2 0.3 0.1 0.4").done and check(fresh, "kept", "0.1 0.1 0.2 0.6").done


def test_wrong_reasons_are_refuted_by_the_engine(fresh):
    assert check(fresh, "why", "c").done and check(fresh, "why", "C").done
    for choice in "abd":
        verdict = check(fresh, "why", choice)
        assert not verdict.done and verdict.said.startswith("No:")
    assert "One of" in check(fresh, "why", "e").said


def test_every_solution_solves_its_objective(fresh):
    fresh.run("The bridge over the river")
    fresh.sweep = {n: Speed(10.0, 1 + n / 100, 1.5) for n in (1, 2, 4, 16)}
    fresh.enumerated.append("rejection")
    for name in ("rate", "length", "kept", "sums", "why"):
        last = BY_NAME[name].solution(fresh)[-1]
        assert check(fresh, name, last.removeprefix("answer ")).done, name
        assert BY_NAME[name].why(fresh)


# ---- the usual pair ----------------------------------------------------------------------------------------------------


def test_without_a_library_for_a_copy_the_drafter_is_suffix(monkeypatch, capsys):
    def missing(name):
        raise LoadError("no binding of it is installed")

    monkeypatch.setattr(llama, "candidates", missing)
    assert usual_drafter("smollm2") == "suffix" and "no binding" in capsys.readouterr().err
    monkeypatch.setattr(llama, "candidates", lambda name: [])
    assert usual_drafter("smollm2") == str(copy_of("smollm2")) and copy_of("smollm2").suffix == ".gguf"
    assert usual_drafter(TARGET) == "suffix"


# ---- progress --------------------------------------------------------------------------------------------------------------


def test_progress_is_kept_for_each_pair(tmp_path):
    path = tmp_path / "sub" / "lab.json"
    mine, other = Progress(path, ("a", "b")), Progress(path, ("a", "c"))
    assert mine.read() == ([], None)
    settings = Settings("b", (("shape", "tree"),), seed=4)
    mine.write(["pair", "rate"], settings)
    other.write(["pair"], Settings("c"))
    assert mine.read() == (["pair", "rate"], settings) and other.read()[0] == ["pair"]
    path.write_text("{}")
    with pytest.raises(LoadError, match="no progress"):
        mine.read()
    path.write_text(json.dumps({"outrider_lab": 9, "pairs": {}}))
    with pytest.raises(LoadError, match="version 9"):
        mine.read()


# ---- the whole of it -------------------------------------------------------------------------------------------------------


class Learner:
    """Plays the lab on a terminal, reading answers off the screen as a person would."""

    def __init__(self, progress, *pair, seconds=120, **environment):
        self.terminal = Terminal("lab", "--progress", progress, *pair, columns=200, **environment)
        self.seconds = seconds
        self.terminal.expect("lab> ", seconds)

    def type(self, line):
        """What the lab says to a command."""
        self.terminal.send(line)
        return self.terminal.expect("lab> ", self.seconds)

    def reaches(self, name, line):
        said = self.type(line)
        assert f"✓ {BY_NAME[name].title}" in said, said
        return said

    def interrupted_run(self):
        """A long run, ended by Ctrl-C once its text has begun to come."""
        self.type("tokens 1000")
        self.terminal.send("run")
        self.terminal.expect("run\n")
        while len(self.terminal.plain) - self.terminal.at < 20:
            assert self.terminal.read(self.seconds)
        self.terminal.interrupt()
        assert "Stopped" in self.terminal.expect("lab> ", self.seconds)


def read_rate(said):
    drafted, kept_ = re.search(r"(\d+) drafted, (\d+) kept", said).groups()
    return f"{kept_}/{drafted}"


def read_lengths(said):
    """The answer to the sweep, from its table."""
    rows = [re.findall(r"[\d.]+", line) for line in said.splitlines() if line.startswith("│")]
    ratios = {int(row[0]): float(row[2]) for row in rows if row[0] != "0"}
    slower = [n for n, ratio in ratios.items() if ratio < 1]
    return f"{max(ratios, key=ratios.get)} {min(slower) if slower else 'never'}"


def first_half(progress, *pair, **more):
    """Up to the tree, with wrong answers, hints and mistakes on the way; ends by Ctrl-D."""
    learner = Learner(progress, *pair, **more)
    assert "1 of 8" in learner.terminal.plain
    assert "there are no models yet" in learner.type("run") and "no command 'fly'" in learner.type("fly")
    assert "Type `load`" in learner.type("hint")
    learner.reaches("pair", "load")
    assert "run" in learner.type("answer 0.5")
    learner.interrupted_run()
    learner.type("tokens 32")
    assert "tokens per pass" in learner.type("run")
    rate = read_rate(learner.type("rounds"))
    assert "No." in learner.type("answer 7") and "one number" in learner.type("answer what?")
    assert f"answer {rate}" in learner.type("solution")
    learner.reaches("rate", f"answer {rate}")
    assert "takes a whole number" in learner.type("draft 0") and "commas" in learner.type("sweep")
    assert "at least four" in learner.type("answer 4 never")
    answer = read_lengths(learner.type("sweep 1,2,4,8,16"))
    assert "not the fastest" in learner.type("answer 3 never")
    learner.reaches("length", f"answer {answer}")
    learner.terminal.send("\x04")  # Ctrl-D
    assert learner.terminal.end() == 0 and "progress is kept" in learner.terminal.plain


def second_half(progress, *pair, **more):
    """From the tree to the end, after a resume."""
    learner = Learner(progress, *pair, **more)
    assert "Going on after 3 of 8" in learner.terminal.plain and "4 of 8" in learner.terminal.plain
    assert "✓ 3." in learner.type("objectives")
    assert "Look at a tree first" in learner.type("answer 1 bonus")
    assert "unknown drafter" in learner.type("drafter nobody")
    assert "shape=tree" in learner.type("solution")
    assert "shape=tree" in learner.type("drafter pair shape=tree min_probability=0")
    learner.type("draft 8")
    learner.type("run")
    found = len(re.findall(r": kept \(", learner.type("tree")))
    assert "Count the kept nodes" in learner.type(f"answer {found + 1} bonus")
    solution = re.search(r"`(answer \d+ (?:bonus|recovered))`", learner.type("solution")).group(1)
    assert solution.split()[1] == str(found)
    learner.reaches("tree", solution)
    assert "set a `temperature`" in learner.type("answer 7") and "0 or more" in learner.type("temperature -1")
    learner.type("temperature 0.8")
    learner.type("seed 7")
    for name in ("suffix", "none"):
        learner.type(f"drafter {name}")
        said = learner.type("run")
    assert "1 more to go" in said
    learner.type("drafter pair")
    assert "the same text" in learner.reaches("seed", "run")
    assert "min(1, p/q)" in learner.type("words")
    assert "once it is drafted" in learner.type("answer 1 0.4286 1 0.4")
    learner.reaches("kept", "answer 0.2 0.3 0.1 0.4")
    assert "every outcome" in learner.type("enumerate rejection")
    assert "something else for: maybe at all" in learner.type("answer 0.3 0 0.1 0.5 0.3 0.9")
    learner.reaches("sums", "answer 0.3 0 0.1 0.5 0.3 0.2")
    assert "No:" in learner.type("answer d")
    assert "All objectives are reached" in learner.reaches("why", "answer c")
    assert ("\x1b[32m" in learner.terminal.seen) == ("NO_COLOR" not in more)
    kept_ = progress.read_text()
    assert "1 of 8" in learner.type("clear all") and json.loads(progress.read_text()) != json.loads(kept_)
    progress.write_text(kept_)
    learner.terminal.interrupt()  # at the prompt it leaves
    assert learner.terminal.end() == 0


def test_the_lab_from_start_to_end_on_a_terminal(tmp_path):
    first_half(tmp_path / "p.json", *PAIR)
    second_half(tmp_path / "p.json", *PAIR, NO_COLOR="1")
    done = json.loads((tmp_path / "p.json").read_text())["pairs"][f"{TARGET} early-exit"]["done"]
    assert done == STEPS


@pytest.mark.slow
@pytest.mark.skipif(not (folder("smollm2") / "config.json").exists(), reason="outrider models get smollm2 has not been run")
def test_the_lab_on_the_embedded_model(tmp_path):
    """With the usual pair: the packaged model and a coarser copy of it, where a library can run that."""
    first_half(tmp_path / "p.json", seconds=600)
    second_half(tmp_path / "p.json", seconds=600)
