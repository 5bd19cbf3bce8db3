"""Smaller copies of GGUF files: what is in them, what they compute, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_tokenizer
from tiny_gguf import write_gguf
from toys import tiny_model
from typer.testing import CliRunner

from outrider.check import Costs, cheaper
from outrider.drafters.vocabulary import Translated, in_words_of
from outrider.errors import LoadError, ParameterError
from outrider.requantise import requantise
from outrider.targets import llama
from outrider.targets.gguf import GgufTarget
from outrider.tree import DraftTree

if not llama.installed():
    pytest.skip("no llama.cpp library is installed: pip install 'outrider[gguf]'", allow_module_level=True)
every_library = pytest.mark.parametrize("library", llama.installed())
TEMPLATE = "{% for m in messages %}The bridge {{ m.content }}{% endfor %}"
TEXT = "The bridge over the river"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = tiny_tokenizer(380)
    model = tiny_model("qwen2", 0, torch.float32, 0.1, hidden_size=64, intermediate_size=128, vocab_size=len(tokenizer))
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model, tokenizer, template=TEMPLATE)


def types(path: str | Path) -> dict[str, str]:
    import gguf

    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(str(path)).tensors}


def logits(target: Any, tokens: list[int]) -> torch.Tensor:
    slot = target.open()
    for _ in target.prefill(slot, tokens[:-1]):
        pass
    (output,) = target.forward([(slot, DraftTree.chain(tokens[-1]))])
    found = output.logits[0].clone()
    target.close(slot)
    return found


@every_library
def test_coarser_weights(source: str, library: str, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    told: list[tuple[int, int]] = []
    made = requantise(source, str(out), "q4_0", "q8_0", library=library, say=lambda *done: told.append(done))
    assert made.size == out.stat().st_size < made.original_size == Path(source).stat().st_size
    assert made.tokens == made.original_tokens == len(tiny_tokenizer(380))
    found = types(out)
    assert found["output.weight"] == "Q8_0" and found["token_embd.weight"] == "Q4_0" and found["blk.0.ffn_up.weight"] == "Q4_0"
    assert found["blk.0.attn_norm.weight"] == "F32"
    assert told == sorted(told) and all(0 < done <= of for done, of in told)
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]
    whole, small = (GgufTarget.load(str(path), library) for path in (source, out))
    tokens = whole.tokenizer.encode_plain(TEXT)  # type: ignore[union-attr]
    one, other = logits(whole, tokens), logits(small, tokens)
    assert 0 < float((one - other).abs().max()) < 0.5 * float(one.abs().max())
    again = tmp_path / "again.gguf"  # a quantised file is requantised too
    requantise(str(out), str(again), "q8_0", library=library)
    assert types(again)["blk.0.ffn_up.weight"] == "Q8_0"


@every_library
def test_fewer_tokens(source: str, library: str, tmp_path: Path) -> None:
    out, same = tmp_path / "fewer.gguf", tmp_path / "all.gguf"
    made = requantise(source, str(out), "q8_0", vocabulary=256, library=library)
    requantise(source, str(same), "q8_0", library=library)
    assert made.tokens == 320 < made.original_tokens == len(tiny_tokenizer(380))
    whole, small = GgufTarget.load(str(same), library), GgufTarget.load(str(out), library)
    mine, theirs = whole.tokenizer, small.tokenizer
    assert mine is not None and theirs is not None and small.vocab_size == 320
    assert {mine.token_text(t) for t in whole.eos} == {theirs.token_text(t) for t in small.eos}
    assert {"The", "Ġbridge"} <= set(theirs.vocabulary()) < set(mine.vocabulary())  # words of the chat template stay
    text = "The bridge, abc"
    pieces = [[t.token_text(i) for i in t.encode_plain(text)] for t in (mine, theirs)]
    assert pieces[0] == pieces[1] and "Ġbridge" in pieces[0]
    drafter = in_words_of(whole, small)
    assert isinstance(drafter, Translated) and len(drafter.overlap.shared) == 320
    tokens = [mine.vocabulary()[theirs.token_text(t)] for t in theirs.encode_plain(text)]
    one, other = logits(whole, tokens), logits(drafter, tokens)
    shared = list(drafter.overlap.shared)
    assert float((one[shared] - other[shared]).abs().max()) < 1e-3 * float(one.abs().max())
    assert bool((other == -torch.inf).sum() == whole.vocab_size - 320)


def test_what_is_refused(source: str, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    for problem, arguments in {
        "unknown type 'q5'; known: q8_0,": {"kind": "q5"},
        "unknown type 'x'": {"output_kind": "x"},
        "vocabulary must be at least 256; got 12": {"vocabulary": 12},
        "unknown GGUF library": {"library": "other"},
    }.items():
        with pytest.raises(ParameterError, match=problem):
            requantise(source, str(out), **arguments)
    with pytest.raises(ParameterError, match="there is no folder"):
        requantise(source, str(tmp_path / "no" / "out.gguf"))
    with pytest.raises(LoadError, match="no such file"):
        requantise(str(tmp_path / "none.gguf"), str(out))
    out.write_bytes(b"kept")
    with pytest.raises(ParameterError, match="is there already"):
        requantise(source, str(out))
    with pytest.raises(ParameterError, match="is there already"):
        requantise(source, source, overwrite=True)
    assert out.read_bytes() == b"kept"
    requantise(source, str(out), overwrite=True)
    assert types(out)["output.weight"] == "Q4_0"
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(source).read_bytes()[:20_000])
    for vocabulary in (None, 300):
        with pytest.raises(LoadError, match=r"broken.gguf cannot be (requantised|read): \S"):
            requantise(str(broken), str(tmp_path / "never.gguf"), vocabulary=vocabulary)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken.gguf", "out.gguf"]


def test_command_line(source: str, tmp_path: Path) -> None:
    from outrider.cli import app

    out = tmp_path / "out.gguf"
    done = CliRunner().invoke(app, ["models", "requantise", source, str(out), "--type", "iq4_nl", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["size"] == out.stat().st_size
    again = CliRunner().invoke(app, ["models", "requantise", source, str(out)])
    assert again.exit_code == 2 and "is there already" in again.output


def test_check_proposes_it(source: str) -> None:
    target = GgufTarget.load(source)
    dear, cheap = Costs(128, {1: 10.0, 2: 11.0}, 4.0, 3.0, {1: 1.0}), Costs(128, {1: 10.0, 2: 11.0}, 2.0, 1.0, {1: 1.0})
    proposal = cheaper(dear, target)
    assert proposal is not None and "40% of a plain pass" in proposal
    assert f"outrider models requantise {source} OUT.gguf --type q4_0 (" in proposal
    assert cheaper(cheap, target) is None
    target.vocab_size = 151936
    assert "--type q4_0 --vocabulary 32768" in (cheaper(dear, target) or "")
