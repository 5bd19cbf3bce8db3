"""Training on a tiny target: every kind learns one text by heart, runs go on exactly, processes add up, nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_cli import call
from test_data import QUESTIONS, made
from tiny import tiny_folder

from outrider.drafters.eagle_training import EagleTraining
from outrider.errors import LoadError, ParameterError
from outrider.files import sole_writer
from outrider.models import load_target
from outrider.train import checkpoint
from outrider.train.features import Features
from outrider.train.kinds import KINDS
from outrider.train.loop import Plan, Run, Settings
from outrider.train.order import Order, split
from outrider.train.record import read_log
from outrider.train.store import Sample, Store
from outrider.train.teacher import count_vocabulary

MODEL = str(tiny_folder(eos=None))
OWN = {
    "eagle3": ["-O", "layers=0,1,2", "-O", "vocabulary=150"],
    "draft-model": ["-O", "count=1"],
    "medusa": ["-O", "train_output=true", "-O", "vocabulary=150"],
    "hydra": ["-O", "vocabulary=150"],
}
FEWER = ["-O", "count=1", "-O", "vocabulary=280"]
"""A draft model with 20 of the tiny tokenizer's 40 merges."""


@pytest.fixture(scope="module")
def target():
    return load_target(MODEL)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    made(target, folder, max_tokens=24)
    return folder


@pytest.fixture(scope="module")
def one(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    made(target, folder, prompts=[target.tokenizer.chat([{"role": "user", "content": QUESTIONS[0]}])], max_tokens=40)
    return folder


def new_run(target, data, folder, steps=8, restart=False, kind="eagle3", start=None, **plan):
    plan = {
        "steps": steps,
        "batch": 2,
        "precision": "float32",
        "held_out": 1,
        "log": 1,
        "evaluate": 0,
        "save": 0,
        "lr": 3e-3,
        **plan,
    }
    options = EagleTraining(layers=(0, 1, 2), vocabulary=60) if kind == "eagle3" else KINDS[kind].load()[1]()
    return Run(target, Store(data), Settings(kind, options, Plan(**plan), False, start, restart), Path(folder))


def weights(run):
    return {name: tensor.clone() for name, tensor in run.trainee.state_dict().items()}


# ---- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, own", [*((kind, OWN.get(kind, [])) for kind in KINDS), ("draft-model", FEWER)])
def test_learns_one_text_by_heart(kind, own, one, tmp_path):
    """Field reports name this the best single test of a training: what is trained must be what is run."""
    measure = ["--measure-draft", 3, "--measure-tokens", 40, "--measure-option", "min_probability=0"]
    plan = ["--steps", 250, "--lr", 5e-3, "--batch", 1, "--precision", "float32", "--log", 50, "--evaluate", 250]
    result = call("train", kind, MODEL, "--data", one, "-o", tmp_path, *own, *plan, *measure, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    before, after = [line["held_out"] for line in found["log"] if "held_out" in line]
    assert after["loss"] < before["loss"] and after["implied_length"] > before["implied_length"]
    assert found["measured"]["acceptance_rate"] >= 0.95, found["measured"]
    assert found["measured"]["acceptance_length"] >= 3.3, found["measured"]
    card = (tmp_path / "README.md").read_text()
    assert f"{found['measured']['acceptance_length']:.3f}" in card and "torch" in card and kind in card
    assert len(read_log(tmp_path / "training")) == len(found["log"])


def test_reduced_vocabulary_counts_answers_alone():
    samples = [Sample([9, 9, 9, 3, 4, 4], 3), Sample([8, 8, 4, 5], 2)]
    assert count_vocabulary(samples, 3, 10).tolist() == [3, 4, 5]
    assert count_vocabulary(samples, 5, 10).tolist() == [0, 1, 3, 4, 5]
    assert count_vocabulary(samples, 0, 10).tolist() == list(range(10))


def test_first_token_of_an_answer_is_learnt(target, data):
    """Pairs, labels and mask of a short text: the pair before the prompt's last guesses the answer's first token."""
    run = new_run(target, data, data / "unused")
    sample = run.samples[0]
    batch = run.features.batch([0])
    rows = batch.rows(0)
    assert rows.tolist() == list(range(sample.prompt - 2, len(sample.tokens) - 2))
    assert batch.tokens[rows + 2].tolist() == list(map(int, sample.tokens[sample.prompt :]))
    assert batch.best[rows + 1].tolist() == list(map(int, sample.tokens[sample.prompt :]))  # greedy text


def test_states_in_training_are_those_in_serving(target, data):
    """A head's states of the unrolled steps equal those that the drafter computes for a chain of the same tokens."""
    from outrider.targets.attention import NAME, KVSlot, Segment
    from outrider.tree import DraftTree

    run = new_run(target, data, data / "unused", kind="eagle3")
    trainee, batch = run.trainee, run.features.batch([0])
    seen = []
    trainee.guess = lambda states: seen.append(states) or type(trainee).guess(trainee, states)
    with torch.no_grad():
        trainee(batch)
        first = batch.first[0]
        head, tokens = trainee.head, batch.tokens.tolist()
        head.body.set_attn_implementation(NAME)
        features = trainee.fuse(torch.cat([batch.hidden[key] for key in trainee.layers], dim=-1))
        slot, row = KVSlot(), 3  # the draft that begins at the fourth pair of the answer
        end = first + row + 1
        pairs = DraftTree.chain(tokens[1], tokens[2 : end + 1])
        states = head.run(tokens[1 : end + 1], features[:end], list(range(end)), [Segment(slot, pairs, 0)])
        assert torch.allclose(states[-1], seen[0][row], atol=1e-4)
        slot.length = end
        state = states[-1:]
        for step in (1, 2):
            token = tokens[end + step]
            tree = DraftTree.chain(tokens[end], tokens[end + 1 : end + step + 1])
            state = head.run([token], head.recycle(state), [end - 1 + step], [Segment(slot, tree, 0, since=step)])
            slot.length += 1
            assert torch.allclose(state[0], seen[step][row], atol=1e-4), step


# ---- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [3, 5])
def test_stopped_and_gone_on_with_is_the_same(target, data, tmp_path, stop):
    whole = new_run(target, data, tmp_path / "whole")
    whole.go()
    part = new_run(target, data, tmp_path / "part")
    step = part._train_step

    def interrupted(*args):
        step(*args)
        if part.step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    part._train_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        part.go()
    rest = new_run(target, data, tmp_path / "part")
    assert rest.step == stop
    rest.go()
    one, other = weights(whole), weights(rest)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part")]
    assert files[0]["d2t"].equal(files[1]["d2t"])
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "part/model.safetensors").read_bytes()
    logs = [
        [(line["step"], line["train"]) for line in read_log(tmp_path / name / "training") if "train" in line]
        for name in ("whole", "part")
    ]
    assert logs[0] == logs[1] and [number for number, _ in logs[0]] == list(range(1, 9))


def test_goes_on_with_the_data_that_it_began_with(target, tmp_path):
    folder = tmp_path / "data"
    made(target, folder, tokens=80)
    new_run(target, folder, tmp_path / "run", steps=2).go()
    began = len(Store(folder).samples())
    made(target, folder)
    assert len(Store(folder).samples()) > began
    run = new_run(target, folder, tmp_path / "run", steps=2)
    assert len(run.samples) == began


def test_another_recipe_is_refused(target, data, tmp_path):
    new_run(target, data, tmp_path, steps=2).go()
    with pytest.raises(ParameterError, match=r"lr 0\.003, not 0\.01.*--restart"):
        new_run(target, data, tmp_path, steps=2, lr=0.01)
    assert new_run(target, data, tmp_path, steps=2, lr=0.01, restart=True).step == 0


def test_begins_with_a_run_or_with_a_finished_drafter(target, data, tmp_path):
    run = new_run(target, data, tmp_path / "first", steps=3)
    run.go()
    after_run = weights(new_run(target, data, tmp_path / "second", start=tmp_path / "first"))
    shutil.rmtree(tmp_path / "first" / "training")
    after_files = weights(new_run(target, data, tmp_path / "third", start=tmp_path / "first"))
    for name, tensor in weights(run).items():
        assert torch.equal(after_run[name], tensor), name
        assert torch.allclose(after_files[name].float(), tensor.float(), rtol=1e-2, atol=1e-6), name  # bfloat16
    with pytest.raises(ParameterError, match="no run in that folder"):
        new_run(target, data, tmp_path / "fourth", kind="medusa", start=tmp_path / "first")


def test_two_runs_do_not_share_a_folder(data, tmp_path):
    (tmp_path / "training").mkdir()
    lock = sole_writer(tmp_path / "training")
    result = call("train", "eagle3", MODEL, "--data", data, "-o", tmp_path, *OWN["eagle3"])
    lock.release()
    assert result.exit_code == 2 and "another process is writing" in result.output, result.output


def test_cached_states_are_the_targets(target, data, tmp_path):
    plain = new_run(target, data, tmp_path / "a", steps=1).features
    copied = tmp_path / "data"
    copied.mkdir()
    for file in data.iterdir():
        if file.is_file():
            (copied / file.name).write_bytes(file.read_bytes())
    settings = Settings("eagle3", EagleTraining(layers=(0, 1, 2), vocabulary=60), Plan(steps=1))
    run = Run(target, Store(copied), settings, tmp_path / "b")
    for _ in range(2):  # computed, then read
        mine, true = run.features.batch([2, 0]), plain.batch([2, 0])
        assert torch.equal(mine.best, true.best) and torch.equal(mine.tokens, true.tokens)
        for key in true.hidden:
            assert torch.allclose(mine.hidden[key], true.hidden[key], rtol=0.01, atol=1e-3)
    fewer = Features(run.teacher, run.samples, (1,), copied)  # what is there serves
    assert len(list(copied.glob("features-*"))) == 1
    assert fewer.batch([2]).hidden.keys() == {1, "final"}
    assert all(torch.equal(state, run.features.batch([2]).hidden[key]) for key, state in fewer.batch([2]).hidden.items())


# ---- writing ----------------------------------------------------------------------------------------------------------


def test_killed_while_writing_leaves_the_one_before(tmp_path):
    checkpoint.save(tmp_path, {"step": 1, "weights": torch.arange(10)})
    code = (
        "import os, sys, torch; from pathlib import Path; from outrider.train import checkpoint\n"
        "real = torch.save\n"
        "def half(state, file):\n"
        "    real(state, file); file.flush(); os.ftruncate(file.fileno(), 100); os._exit(9)\n"
        "torch.save = half\n"
        "checkpoint.save(Path(sys.argv[1]), {'step': 2, 'weights': torch.arange(20)})\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 9
    assert checkpoint.load(tmp_path)["step"] == 1


def test_full_disk_keeps_the_run(target, data, tmp_path, monkeypatch):
    run = new_run(target, data, tmp_path, steps=4)
    run._train_step(0.0, 0)
    run.save()
    before = (tmp_path / "model.safetensors").read_bytes()
    run._train_step(0.0, 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(LoadError, match=r"No space left.*is whole"):
        run.save()
    monkeypatch.undo()
    monkeypatch.setattr(run.trainee, "write", full)
    with pytest.raises(LoadError, match="No space left"):
        run.save()
    monkeypatch.undo()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.rglob(".*")), "no scraps are left"
    assert new_run(target, data, tmp_path, steps=4).step == 2


@pytest.mark.parametrize(
    "args, said",
    [
        (["eagle2"], "unknown kind"),
        (["eagle3", "-O", "stepps=2"], "no option 'stepps'"),
        (["eagle3", "-O", "layers=9"], "layer entries 0 to 2"),
        (["eagle3", "--lr", "0"], "lr must be"),
        (["medusa", "-O", "heads=0"], "heads and blocks"),
        (["draft-model", "-O", "layers=5"], "layers of"),
        (["eagle3", "--precision", "int4"], "precision must be"),
        (["eagle3", "-O", "vocabulary=1"], "vocabulary must be"),
        (["eagle3", "--start", "nowhere"], "no run in that folder"),
    ],
)
def test_mistakes(data, tmp_path, args, said):
    kind, *rest = args
    own = [] if "-O" in rest else OWN.get(kind, [])
    result = call("train", kind, MODEL, "--data", data, "-o", tmp_path, *own, *rest)
    assert result.exit_code == 2 and said in result.output, result.output


def test_data_without_answers_or_of_another_vocabulary(target, tmp_path):
    Store.create(tmp_path / "empty", target.vocab_size, {})
    result = call("train", "medusa", MODEL, "--data", tmp_path / "empty", "-o", tmp_path / "out")
    assert result.exit_code == 2 and "no answer to learn from" in result.output
    Store.create(tmp_path / "other", 7, {"target": "another"})
    result = call("train", "medusa", MODEL, "--data", tmp_path / "other", "-o", tmp_path / "out")
    assert result.exit_code == 2 and "another vocabulary" in result.output


# ---- order and processes ----------------------------------------------------------------------------------------------


def test_order():
    order = Order([3, 5, 7, 9, 11], 2, seed=1)
    seen = [number for step in range(5) for number in order(step)]
    assert sorted(seen[:5]) == sorted(seen[5:]) == [3, 5, 7, 9, 11] and seen[:5] != seen[5:]
    assert Order([3, 5, 7, 9, 11], 2, seed=1)(4) == order(4)
    assert split(10, 3) == (list(range(3, 10)), [0, 1, 2]) and split(20, 3)[1] == [0, 1, 2]
    assert split(1, 3) == ([0], [0])


def test_two_processes_are_one_with_the_double_batch(data, tmp_path):
    def losses(name, batch, accumulate, *launcher):
        plan = [
            "--steps",
            5,
            "--batch",
            batch,
            "--accumulate",
            accumulate,
            "--precision",
            "float32",
            "--log",
            1,
            "--evaluate",
            0,
        ]
        args = ["train", "eagle3", MODEL, "--data", data, "-o", tmp_path / name, *OWN["eagle3"], *plan, "--held-out", 1]
        command = [sys.executable, *launcher, "-m", "outrider", *args, "--no-cache", "--measure-tokens", 2]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return [line["train"]["losses"] for line in read_log(tmp_path / name / "training") if "train" in line]

    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1]  # torchrun within
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", 0]
    two, one = losses("two", 1, 2, *launch), losses("one", 2, 2)
    assert len(one) == 5 and torch.allclose(torch.tensor(two), torch.tensor(one), rtol=1e-4)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert all(torch.allclose(files[0][n].float(), files[1][n].float(), atol=0.02) for n in files[0])
