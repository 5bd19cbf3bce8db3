"""Measuring: what runs beside what, and which figures come of it."""

import json
from dataclasses import replace

import pytest
from tiny import tiny_folder
from typer.testing import CliRunner

import outrider
from outrider.bench import report, runner
from outrider.bench.compare import difference
from outrider.bench.prompts import Prompt, read_prompts
from outrider.bench.runner import Configuration, make_groups, measure, schedule, summarise
from outrider.cli import app
from outrider.errors import OutriderError, ParameterError
from outrider.sampling import SamplingParams
from outrider.trace import combine, read_trace, statistics

MODEL = str(tiny_folder(eos=None))
PARAMS = SamplingParams(max_tokens=24)
PROMPTS = [("The bridge", "a"), ("Please bring", "b"), ("a pen", "a")]


def bench(*args, **more):
    return CliRunner().invoke(app, ["bench", "-t", MODEL, "--max-tokens", "24", *map(str, args)], **more)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [text], "category": c}) + "\n" for text, c in PROMPTS), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def engines():
    target = outrider.load_target(MODEL)
    return {Configuration("t", name, 4, 2): outrider.load(target, name, draft=4) for name in ("suffix", "lookup")}


def test_prompts_of_every_kind(tmp_path, prompts):
    assert read_prompts(prompts) == [Prompt(text, c) for text, c in PROMPTS]
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert read_prompts(str(tmp_path / "p.txt")) == [Prompt("one"), Prompt("two")]
    for name, content in (("a.jsonl", "{"), ("b.jsonl", "[]"), ("c.jsonl", '{"prompt": 3}'), ("d.txt", "\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ParameterError, match=name):
            read_prompts(str(tmp_path / name))


def test_groups_hold_one_category_and_are_full():
    groups = make_groups(["a", "b", "a", "a"], 2)
    assert [(g.numbers, g.category) for g in groups] == [((0, 2), "a"), ((3, 0), "a"), ((1, 1), "b")]


def test_every_group_is_decoded_plainly_too_in_turns(engines, monkeypatch):
    called = []
    generate = outrider.Engine.generate

    def spy(self, prompt, *args, **values):
        called.append(self.drafter.name)
        return generate(self, prompt, *args, **values)

    monkeypatch.setattr(outrider.Engine, "generate", spy)
    runs = list(measure(engines, PROMPTS, PARAMS, repeat=2))
    assert called[3:] == [  # after warming up; the order turns from group to group and from repetition to repetition
        *("none", "suffix", "lookup"),
        *("suffix", "lookup", "none"),
        *("suffix", "lookup", "none"),
        *("lookup", "none", "suffix"),
    ]
    planned = schedule(list(engines), [category for _, category in PROMPTS], 2)
    assert [(run.configuration, run.group, run.repetition) for run in runs] == planned


def test_figures_come_from_rounds_and_texts_are_compared(engines):
    traced = []
    runs = list(measure(engines, PROMPTS, PARAMS, trace=traced.extend))
    for run, full in zip(runs, traced):
        for figures, result in zip(run.each, full.results):
            assert figures == statistics(result.rounds)
        assert all(not result.rounds for result in run.results)
        if not run.configuration.is_plain:
            assert run.differences == (None, None)
    plain, suffix, lookup = summarise(runs)
    assert plain.configuration.is_plain and plain.ratio == 1.0 and plain.statistics.acceptance_length == 1.0
    assert suffix.compared == lookup.compared == 4 and suffix.differing == 0 and not suffix.drafted_nothing
    assert suffix.statistics.emitted == 4 * 24
    assert suffix.ratio == pytest.approx(suffix.statistics.tokens_per_second / plain.statistics.tokens_per_second)
    assert [(row.configuration.drafter, row.category) for row in summarise(runs, by_category=True)][:3] == [
        ("none", "a"),
        ("none", "b"),
        ("suffix", "a"),
    ]


def test_passes_that_serve_several_sequences_are_counted_once(engines):
    engine = next(iter(engines.values()))
    one, two = engine.generate(["The bridge", "The bridge"], PARAMS)
    figures = combine([one.stats, two.stats])
    assert figures.whole_passes == pytest.approx(one.stats.passes) and figures.passes == 2 * one.stats.passes
    together = statistics([*one.rounds, *two.rounds])
    assert replace(together, seconds={}, whole_passes=0) == replace(figures, seconds={}, whole_passes=0)


def test_the_median_run_counts(engines):
    runs = [run for run in measure(engines, PROMPTS[:1], PARAMS) if run.configuration.drafter == "suffix"]

    def slowed(factor):
        each = tuple(replace(s, seconds={k: v * factor for k, v in s.seconds.items()}) for s in runs[0].each)
        return replace(runs[0], each=each)

    assert runner.median_run([slowed(9), slowed(1), slowed(2)]).statistics.total_seconds == pytest.approx(
        2 * runs[0].statistics.total_seconds
    )


def test_impossible_figures_are_refused(engines):
    stats = next(iter(engines.values())).generate("The bridge", PARAMS).stats
    with pytest.raises(OutriderError, match="impossible"):
        combine([replace(stats, accepted=stats.proposed + 1)])
    with pytest.raises(OutriderError, match="impossible"):
        combine([replace(stats, emitted=stats.accepted + stats.passes + 1)])


def test_a_difference_is_found_and_judged():
    target = outrider.load_target(MODEL)
    engine = outrider.load(target, None)
    ids = engine.encode("The bridge")
    for params in (PARAMS, replace(PARAMS, temperature=1.0, seed=3)):
        tokens = engine.generate(ids, params).tokens
        assert difference(target, ids, params, tokens, tokens) is None
        wrong = (*tokens[:5], (tokens[5] + 1) % 300, *tokens[6:])
        found = difference(target, ids, params, tokens, wrong)
        assert found.position == 5 and not found.near_tie and found.gap > 0
        assert (found.expected, found.found) == (tokens[5], wrong[5])
        assert difference(target, ids, params, tokens, tokens[:7]).position == 7


def test_table_and_json(prompts, tmp_path):
    out = tmp_path / "result.json"
    trace = tmp_path / "trace.jsonl"
    result = bench(
        "--prompts", prompts, "-d", "suffix", "-d", "lookup", "--draft", "2,4", "--batch", "1,2", "--out", out, "--trace", trace
    )
    assert result.exit_code == 0, result.output
    assert "By category" in result.stdout and "none (plain)" in result.stdout and "yes (3)" in result.stdout
    value = json.loads(out.read_text())
    assert value["outrider_bench"] == report.RESULT_VERSION and value["versions"]["torch"] and not value["interrupted"]
    assert value["models"][MODEL]["layers"] == 2
    assert [(r["drafter"], r["draft"], r["batch"]) for r in value["rows"]][:3] == [
        ("none", 0, 1),
        ("suffix", 2, 1),
        ("suffix", 4, 1),
    ]
    assert len(value["rows"]) == 2 * 5
    assert len(value["runs"][0]["prompts"]) == 1 and value["runs"][0]["prompts"][0]["statistics"]["emitted"] == 24
    header, rounds = read_trace(trace)
    assert {r.sequence for r in rounds} == set(range(len(header["sequences"])))
    again = bench("--prompts", prompts, "--out", out)
    assert again.exit_code == 2 and "never overwritten" in again.stderr


def test_options_for_one_drafter(prompts):
    arguments = ("--prompts", prompts, "--limit", "1", "-d", "suffix", "-d", "lookup", "-o", "lookup.max_ngram=2", "--json")
    value = json.loads(bench(*arguments).stdout)
    assert [row["options"] for row in value["rows"]] == [{}, {}, {"max_ngram": "2"}]
    assert bench("-d", "suffix", "-d", "lookup", "-o", "max_ngram=2").exit_code == 2


def test_sampled_texts_are_compared_only_with_a_seed(prompts):
    sampled = json.loads(bench("--prompts", prompts, "--temperature", "1", "--json").stdout)
    assert sampled["rows"][1]["compared"] == 0
    coupled = json.loads(bench("--prompts", prompts, "--temperature", "1", "--seed", "1", "--json").stdout)
    assert coupled["rows"][1]["compared"] == 3 and coupled["rows"][1]["differing"] == 0


def test_a_drafter_that_drafts_nothing_fails_the_run(prompts):
    result = bench("--prompts", prompts, "-d", "replay", "-d", "suffix", "--draft", "8")
    assert result.exit_code == 1
    assert "DRAFTED NOTHING" in result.stdout and result.stderr.count("DRAFTED NOTHING") == 1


def test_an_interruption_keeps_what_was_finished(prompts, tmp_path, monkeypatch):
    real = runner.measure

    def interrupted(*args, **values):
        for i, run in enumerate(real(*args, **values)):
            if i == 4:
                raise KeyboardInterrupt
            yield run

    monkeypatch.setattr(runner, "measure", interrupted)
    out = tmp_path / "result.json"
    result = bench("--prompts", prompts, "--out", out)
    assert result.exit_code == 130 and "auto" in result.stdout and "interrupted" in result.stderr
    value = json.loads(out.read_text())
    assert value["interrupted"] is True and len(value["runs"]) == 4


def test_an_interruption_before_anything_was_finished(prompts, tmp_path, monkeypatch):
    def interrupted(*args, **values):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(runner, "measure", interrupted)
    result = bench("--prompts", prompts, "--out", tmp_path / "r.json")
    assert result.exit_code == 130 and not list(tmp_path.glob("*.json"))
