"""Training data on a tiny target: what is made, kept, gone on with and refused."""

import json

import pytest
from test_cli import call
from tiny import tiny_folder

from outrider.errors import LoadError, OutriderError, ParameterError
from outrider.models import load_target
from outrider.train.data import Recipe, as_tokens, generate, report
from outrider.train.prompts import read_conversations, user_prefix
from outrider.train.store import Sample, Store

QUESTIONS = ["Where is the bridge?", "Who brings a pen?", "When is the meeting?", "Is the hall closed?", "Why a notebook?"]


@pytest.fixture(scope="module")
def target():
    return load_target(str(tiny_folder(context=160)))


def lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def asked(target, questions=QUESTIONS):
    return [target.tokenizer.chat([{"role": "user", "content": text}]) for text in questions]


def made(target, folder, tokens=10_000, prompts=None, **recipe):
    store = (Store if (folder / "data.json").exists() else lambda f: Store.create(f, target.vocab_size, {}))(folder)
    recipe = {"magpie": 0.0, "max_tokens": 12, "min_distinct": 0.0, "batch": 3, **recipe}
    generate(target, store, Recipe(tokens=tokens, **recipe), asked(target) if prompts is None else prompts)
    return store


@pytest.mark.parametrize(
    "value",
    [
        "Why?",
        {"prompt": "Why?"},
        {"question": "Why?", "answer": "So."},
        {"text": "Why?"},
        {"instruction": "Why?", "input": ""},
        {"turns": ["Why?", "And then?"]},
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
    ],
)
def test_shapes_of_prompts(tmp_path, value):
    assert read_conversations(lines(tmp_path / "p.jsonl", [value])) == [[{"role": "user", "content": "Why?"}]]


def test_lines_are_what_newlines_part(tmp_path):
    value = {"instruction": "Add\u2028up", "input": "1 2"}
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert read_conversations(path) == [[{"role": "user", "content": "Add\u2028up\n\n1 2"}]]


@pytest.mark.parametrize("value", [{}, {"prompt": " "}, {"messages": [{"role": "robot", "content": "x"}]}, 7, {"turns": [3]}])
def test_prompts_of_no_shape_are_named(tmp_path, value):
    with pytest.raises(ParameterError, match="line 2"):
        read_conversations(lines(tmp_path / "p.jsonl", ["fine", value]))


def test_answers_are_the_targets_own(target, tmp_path):
    store = made(target, tmp_path)
    samples = store.samples()
    assert len(samples) == len(QUESTIONS)
    by_prompt = {tuple(map(int, s.tokens[: s.prompt])): list(map(int, s.tokens[s.prompt :])) for s in samples}
    import outrider

    engine = outrider.load(target, None)
    for prompt in asked(target):
        assert by_prompt[tuple(prompt)] == list(engine.generate(prompt, max_tokens=12).tokens)
    found = report(store)
    assert found["tokens"] == sum(len(s.tokens) for s in samples) and 0 < found["mask_share"] < 1
    assert (tmp_path / "tokens.bin").stat().st_size == 2 * store.total


def test_prompts_of_the_targets_own_making(target, tmp_path):
    prefix = user_prefix(target)
    assert target.tokenizer.chat([{"role": "user", "content": "Why?"}])[: len(prefix)] == prefix
    store = made(target, tmp_path, tokens=150, magpie=1.0, magpie_tokens=60, prompts=[], max_prompt=100, batch=8)
    assert store.samples() and {entry.source for entry in store.entries} == {"magpie"}
    for sample in store.samples():
        assert list(sample.tokens[: len(prefix)]) == prefix and len(prefix) < sample.prompt < len(sample.tokens)
    keys = [entry.key for entry in store.entries if entry.n]
    assert len(keys) == len(set(keys))


def test_goes_on_without_doing_anything_twice(target, tmp_path):
    first = made(target, tmp_path, tokens=30)
    had = len(first.entries)
    assert 0 < had < len(QUESTIONS)
    before = [list(s.tokens) for s in first.samples()]
    after = made(target, tmp_path)
    assert len(after.entries) == len(QUESTIONS) == len(after.keys)
    assert [list(s.tokens) for s in after.samples()][:had] == before


def test_what_an_interruption_tore_is_cut_off(target, tmp_path):
    store = made(target, tmp_path)
    whole = [list(s.tokens) for s in store.samples()]
    with open(tmp_path / "tokens.bin", "ab") as file:
        file.write(b"\1\2\3")
    with open(tmp_path / "samples.jsonl", "ab") as file:
        file.write(b'{"n": 7, "pro')
    again = Store(tmp_path)
    assert [list(s.tokens) for s in again.samples()] == whole
    with again.append() as writer:
        writer.add(Sample([5, 6, 7], 1), "new", "file")
    assert [list(s.tokens) for s in Store(tmp_path).samples()] == [*whole, [5, 6, 7]]


def test_one_writer_at_a_time(target, tmp_path):
    store = made(target, tmp_path)
    stale = Store(tmp_path)
    with store.append() as writer:
        with pytest.raises(LoadError, match="another process is writing"):
            Store(tmp_path).append()
        writer.add(Sample([5, 6, 7], 1), "new", "file")
    with pytest.raises(LoadError, match="another process has added"):
        stale.append()
    with Store(tmp_path).append():
        pass


def test_damaged_data_is_refused(target, tmp_path):
    made(target, tmp_path)
    content = (tmp_path / "tokens.bin").read_bytes()
    (tmp_path / "tokens.bin").write_bytes(content[:20])
    with pytest.raises(LoadError, match="ends within sample"):
        Store(tmp_path)
    (tmp_path / "samples.jsonl").write_text('{"n": 3, "prompt": 5}\n')
    with pytest.raises(LoadError, match="line 1"):
        Store(tmp_path)
    with pytest.raises(LoadError, match="outrider data"):
        Store(tmp_path / "nothing")


def test_repetitive_answers_are_left_out_for_good(target, tmp_path):
    loop = made(target, tmp_path, max_tokens=40, min_distinct=1.0)
    dropped = [entry for entry in loop.entries if entry.dropped]
    assert dropped and {entry.dropped for entry in dropped} == {"repetitive answer"}
    assert len(made(target, tmp_path, max_tokens=40, min_distinct=1.0).entries) == len(loop.entries)


@pytest.mark.parametrize("samples", [[], [Sample([1, 2, 3], 0)], [Sample([1, 2, 3], 3)]])
def test_mask_of_all_or_nothing_fails(target, tmp_path, samples):
    store = Store.create(tmp_path, target.vocab_size, {})
    with store.append() as writer:
        for sample in samples:
            writer.add(sample, "k", "file")
    with pytest.raises(ParameterError, match=r"no samples|loss would be taken on"):
        report(store)


def test_full_disk_keeps_what_was_written(target, tmp_path, monkeypatch):
    store = made(target, tmp_path, tokens=30)
    had = [list(s.tokens) for s in store.samples()]
    writer = store.append()

    class Full:
        def write(self, _):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    writer._index.close()
    writer._index = Full()
    with pytest.raises(LoadError, match="No space left"):
        writer.add(Sample([4] * 9, 2), "k", "file")
    assert [list(s.tokens) for s in Store(tmp_path).samples()] == had


def test_prompts_longer_than_the_context(target):
    long = [[{"role": "user", "content": "bridge " * 200}], [{"role": "user", "content": "Why?"}]]
    assert len(as_tokens(target, long, Recipe(max_tokens=20), False)) == 1
    with pytest.raises(ParameterError, match=r"context of .* ends at 160"):
        as_tokens(target, long[:1], Recipe(max_tokens=20), False)


def test_command(tmp_path):
    model, out = str(tiny_folder(context=160)), tmp_path / "data"
    prompts = lines(tmp_path / "p.jsonl", QUESTIONS)
    options = ["--prompts", prompts, "--max-tokens", 12, "--min-distinct", 0, "--json"]
    result = call("data", model, "-o", out, *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["samples"] == len(QUESTIONS) and found["sources"] == {"file": len(QUESTIONS)}
    again = call("data", model, "-o", out, *options)
    assert json.loads(again.stdout)["samples"] == len(QUESTIONS)


@pytest.mark.parametrize(
    "args, said",
    [
        (["-o", "{out}"], "no chat template"),
        (["-o", "{out}", "--raw"], "--raw is for prompts from files"),
        (["-o", "{out}", "--prompts", "{empty}", "--raw"], "has no prompts"),
        (["-o", "{out}", "--prompts", "{out}/none", "--raw"], "cannot read"),
        (["-o", "{out}", "--magpie", "1.5"], "magpie must be"),
        (["-o", "{empty}/x", "--prompts", "{prompts}", "--raw"], "cannot write"),
    ],
)
def test_mistakes(tmp_path, args, said):
    (tmp_path / "empty").write_text("")
    names = {"out": tmp_path / "out", "empty": tmp_path / "empty", "prompts": lines(tmp_path / "p.jsonl", QUESTIONS)}
    result = call("data", tiny_folder(template=None), *(arg.format(**names) for arg in args))
    assert result.exit_code == 2 and said in result.output, result.output
    assert isinstance(result.exception, (SystemExit, OutriderError)) and "Traceback" not in result.output


def test_text_of_another_target_is_not_mixed(target, tmp_path):
    Store.create(tmp_path, target.vocab_size, {"target": "another"})
    result = call("data", tiny_folder(), "-o", tmp_path)
    assert result.exit_code == 2 and "another" in result.output
