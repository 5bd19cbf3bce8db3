"""The command line on a tiny model: what is printed, where, and with which exit code."""

import json
import subprocess
import sys

import pytest
from tiny import tiny_folder
from typer.testing import CliRunner

import outrider
from outrider.cli import app
from outrider.drafters import TABLE
from outrider.models import SHIPPED
from outrider.trace import read_trace, statistics

MODEL = str(tiny_folder(eos=None))
SHORT = ["--max-tokens", "40"]


def call(*args, **more):
    return CliRunner().invoke(app, [str(a) for a in args], **more)


def run(*args, **more):
    result = call("run", "-t", MODEL, *SHORT, *args, **more)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def expected():
    """What the library says to the same prompt as a user message."""
    engine = outrider.load(MODEL)
    return engine.generate([{"role": "user", "content": "The bridge"}], max_tokens=40)


def test_help_does_not_wait_for_torch():
    code = "import sys, outrider.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert call("--help").exit_code == 0
    assert outrider.__version__ in call("--version").stdout


@pytest.mark.parametrize("command", ["run", "bench", "check", "demo", "drafters", "models"])
def test_every_command_has_help(command):
    assert call(command, "--help").exit_code == 0


def test_piped_output_is_exactly_the_text(expected):
    result = run("The bridge")
    assert result.stdout == expected.text
    assert f"{expected.stats.emitted} tokens" in result.stderr
    assert "tokens per pass" in result.stderr and "accepted" in result.stderr


def test_prompt_from_file_and_stdin(expected, tmp_path):
    (tmp_path / "prompt.txt").write_text("The bridge", encoding="utf-8")
    assert run("--file", tmp_path / "prompt.txt").stdout == expected.text
    assert run(input="The bridge").stdout == expected.text


def test_raw_and_system_change_the_prompt(expected):
    texts = {expected.text, run("The bridge", "--raw").stdout, run("The bridge", "--system", "Say little.").stdout}
    assert len(texts) == 3


def test_without_a_template_the_prompt_goes_in_as_it_is():
    plain = str(tiny_folder(eos=None, template=None))
    result = call("run", "-t", plain, *SHORT, "The bridge")
    assert result.stdout == run("The bridge", "--raw").stdout
    assert call("run", "-t", plain, "--system", "x", "y").exit_code == 2


def test_json_has_everything(expected):
    value = json.loads(run("The bridge", "--json", "--logprobs", "2", "--seed", "5").stdout)
    assert value["text"] == expected.text and tuple(value["tokens"]) == expected.tokens
    assert value["rule"] == "coupled" and value["seed"] == 5 and value["lossy"] is False
    assert len(value["logprobs"]) == len(value["tokens"]) and len(value["logprobs"][0]["top"]) == 2
    assert value["stats"]["emitted"] == 40 and value["finish_reason"] == "length"
    assert value["drafter"] == {"name": "auto", "options": value["drafter"]["options"]} and value["draft"] == "auto"


def test_a_seed_gives_one_text_with_any_drafter():
    texts = {
        run("The bridge", "--temperature", "0.9", "--seed", "7", "-d", d).stdout for d in ("none", "suffix", "lookup", MODEL)
    }
    assert len(texts) == 1


def test_options_reach_the_drafter():
    asked = ("-d", "suffix", "-o", "shape=tree", "-o", "max_length=2", "--draft", "6")
    value = json.loads(run("The bridge", "--json", *asked).stdout)
    assert value["drafter"]["options"]["shape"] == "tree" and value["rule"] == "traversal"
    assert len(value["stats"]["accepted_by_depth"]) <= 2


def test_trace_can_be_read_back(tmp_path):
    path = tmp_path / "run.jsonl"
    value = json.loads(run("The bridge", "--json", "--trace", path).stdout)
    header, rounds = read_trace(path)
    stats = json.loads(json.dumps(statistics(rounds).as_dict()))
    assert stats == value["stats"]
    assert header["rule"] == value["rule"] and header["seed"] == value["seed"] and header["lossy"] is False
    assert header["versions"]["outrider"] and header["machine"]["cores"] and header["sampling"]["max_tokens"] == 40
    assert header["target"]["name"] == MODEL and header["drafter"]["name"] == "auto"
    assert len(header["sequences"]) == 1


def test_prediction(tmp_path, expected):
    (tmp_path / "p.txt").write_text(expected.text, encoding="utf-8")
    for prediction in (expected.text, f"@{tmp_path / 'p.txt'}"):
        value = json.loads(run("The bridge", "-d", "prediction", "--prediction", prediction, "--json").stdout)
        assert value["text"] == expected.text and value["stats"]["accepted"] > 0


def test_stop_strings_end_the_text(expected):
    stop = expected.text[10:13]
    assert run("The bridge", "--stop", stop).stdout == expected.text[: expected.text.index(stop)]


def test_a_lossy_rule_is_marked():
    assert "LOSSY" in run("The bridge", "--accept", "typical").stderr
    assert "LOSSY" not in run("The bridge").stderr


def test_drafting_nothing_is_said_loudly():
    assert "DRAFTED NOTHING" in run("The bridge", "-d", "replay").stderr
    assert "DRAFTED NOTHING" not in run("The bridge", "-d", "none").stderr


def interrupt_after(monkeypatch, number):
    decode = outrider.Engine.decode

    def interrupted(self, sequences):
        for i, round in enumerate(decode(self, sequences)):
            if i == number:
                raise KeyboardInterrupt
            yield round

    monkeypatch.setattr(outrider.Engine, "decode", interrupted)


def test_an_interruption_keeps_what_there_is(monkeypatch, expected):
    interrupt_after(monkeypatch, 3)
    result = call("run", "-t", MODEL, *SHORT, "The bridge")
    assert result.exit_code == 130
    assert result.stdout and expected.text.startswith(result.stdout) and "cancelled" in result.stderr
    result = call("run", "-t", MODEL, *SHORT, "The bridge", "--json")
    assert result.exit_code == 130 and json.loads(result.stdout)["finish_reason"] == "cancelled"


def test_chat_goes_on_until_the_input_ends(expected, tmp_path):
    result = run("--chat", "--trace", tmp_path / "t", input="The bridge\n\nAnd now?\n")
    first, second, end = result.stdout.split("\n")
    assert first == expected.text and second and not end
    engine = outrider.load(MODEL)
    turns = [("user", "The bridge"), ("assistant", first), ("user", "And now?")]
    again = engine.generate([{"role": role, "content": text} for role, text in turns], max_tokens=40)
    assert second == again.text
    header, rounds = read_trace(tmp_path / "t")
    assert {r.sequence for r in rounds} == {0, 1}
    assert (header["rule"], header["lossy"], header["seed"]) == ("traversal", False, None)
    assert len({r.seed for r in rounds if r.sequence == 0}) == 1  # drawn, and kept for the turn


def test_ctrl_c_ends_an_answer_but_not_the_chat(monkeypatch):
    interrupt_after(monkeypatch, 3)
    result = run("--chat", input="The bridge\nAnd now?\n")
    assert result.stderr.count("[stopped]") == 2 + 2  # once where it happened, once in the figures


def test_drafters_lists_the_table():
    rows = json.loads(call("drafters", "--json").stdout)
    assert [row["name"] for row in rows] == list(TABLE)
    assert next(row for row in rows if row["name"] == "model")["options"]["greedy"] is False
    assert "suffix" in call("drafters").stdout


def test_models(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path))
    assert call("models", "where", "smollm2").stdout.strip() == str(tmp_path / "smollm2-135m-instruct")
    assert json.loads(call("models", "list", "--json").stdout)[0]["here"] is False
    (tmp_path / "smollm2-135m-instruct").mkdir()
    (tmp_path / "smollm2-135m-instruct" / "config.json").write_text("{}")
    assert json.loads(call("models", "list", "--json").stdout)[0]["here"] is True
    assert {row["name"]: row["here"] for row in json.loads(call("models", "list", "--json").stdout)} == {
        "smollm2": True,
        **dict.fromkeys(SHIPPED, True),
    }
    assert call("models", "get", "smollm2").exit_code == 0
    assert call("models", "get", "unheard").exit_code == 2


@pytest.mark.parametrize("drafter", ["suffix", "none", str(tiny_folder(eos=None, layers=1, hidden=16))])
def test_check(drafter):
    arguments = ["check", MODEL, drafter, "--context", "32"]
    value = json.loads(call(*arguments, "--json").stdout)
    assert set(value["costs_ms"]["rows"]) == {"1", "2", "4", "8", "16"}
    assert all(ms > 0 for ms in value["costs_ms"]["rows"].values())
    assert value["target"]["vocabulary"] == 300 and value["target"]["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert set(value["speedup"]) == {"0.5", "0.6", "0.7", "0.8", "0.9"}
    if "/" in drafter:
        assert value["tokenizers"]["equal"] is True and value["drafter"]["model"]["layers"] == 1
        assert value["costs_ms"]["step"] > 0
    result = call(*arguments)
    assert result.exit_code == 0 and value["target"]["dtype"] in result.stdout


def test_check_promises_nothing_for_a_drafter_that_proposed_nothing():
    arguments = ["check", MODEL, "lookup", "-o", "min_ngram=30", "-o", "max_ngram=32", "--context", "64"]
    value = json.loads(call(*arguments, "--json").stdout)
    assert value["costs_ms"]["proposed"] == {"1": 0, "8": 0}
    assert value["speedup"] == value["best"] == {} and value["break_even"] is None
    assert "lookup proposed nothing" in value["verdict"] and "pays" not in value["verdict"]
    shown = call(*arguments).stdout
    assert "proposed nothing" in shown and "0 of 8" in shown and "Expected speed" not in shown
    shown = call("check", MODEL, "lookup", "--context", "64").stdout
    assert "8 of 8" in shown and "Expected speed" in shown


def test_check_measures_drafts_of_a_text_that_grows():
    """What a drafter does with each new token is part of what drafting costs."""
    from outrider.check import measure
    from outrider.drafters.lookup import LookupDrafter

    seen: dict[str, list[int]] = {"propose": [], "observe": []}

    class Watched(LookupDrafter):
        def propose(self, work):
            seen["propose"].append(len(work[0][1]))
            return super().propose(work)

        def observe(self, work):
            ((_, _, output, rows),) = work
            seen["observe"] += [output.start + row for row in range(len(rows))]

    measure(outrider.load_target(MODEL), Watched(), 20, repeats=3)
    assert seen["propose"] == list(range(21, 29)) and seen["observe"] == list(range(27))


def test_check_says_why_not():
    from outrider.check import Costs, verdict

    dear = Costs(128, {1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0, 16: 160.0}, 6.0, 6.0)
    assert dear.break_even() is None
    assert "cannot pay" in verdict(dear, "model") and "60%" in verdict(dear, "model") and "2.0 times" in verdict(dear, "model")
    cheap = Costs(128, {1: 10.0, 2: 10.0, 4: 10.0, 8: 10.0, 16: 10.0}, 0.0, 0.0)
    assert cheap.speedup(0.5, 1) == pytest.approx(1.5) and cheap.speedup(0.8, 3) == pytest.approx((1 - 0.8**4) / 0.2)
    assert "It pays" in verdict(cheap, "suffix")


def test_demo(tmp_path):
    folder = str(tiny_folder(eos=None, context=2048))
    arguments = ["demo", "-t", folder, "--max-tokens", "12"]
    result = call(*arguments, "--trace", tmp_path / "t")
    assert result.exit_code == 0 and result.stdout.count("The same text, token for token") == 4
    header, rounds = read_trace(tmp_path / "t")
    assert len(header["sequences"]) == 8 and {r.sequence for r in rounds} == set(range(8))
    for r in rounds:
        entry = header["sequences"][r.sequence]
        assert (entry["rule"], entry["lossy"]) == (r.rule, r.lossy)
        assert r.drafter in {"none": ("none",), "auto": ("auto", "suffix")}[entry["drafter"]]
    assert len({entry["seed"] for entry in header["sequences"]}) == 8
    value = json.loads(call(*arguments, "--json", "--only", "2").stdout)
    assert [prompt["category"] for prompt in value["prompts"]] == ["fix"] and value["prompts"][0]["same_text"] is True
    assert "two draws" in call(*arguments, "--only", "1", "--temperature", "1").stdout


def test_an_interrupted_demo_shows_what_was_finished(monkeypatch):
    from outrider import demo

    play = demo.play

    def interrupted(plain, drafted, prompt, *rest):
        if prompt.category == "extract":
            raise KeyboardInterrupt
        return play(plain, drafted, prompt, *rest)

    monkeypatch.setattr(demo, "play", interrupted)
    result = call("demo", "-t", str(tiny_folder(eos=None, context=2048)), "--max-tokens", "8", "--json")
    assert result.exit_code == 130
    assert [prompt["category"] for prompt in json.loads(result.stdout)["prompts"]] == ["rewrite", "fix"]
