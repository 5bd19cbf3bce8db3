"""GGUF files as users have them: tokenizer and template, parameters, a full cache, and files that are broken."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tiny import TEMPLATE, tiny_folder, tiny_tokenizer
from tiny_gguf import quantised, write_gguf
from toys import letters, tiny_model
from typer.testing import CliRunner

import outrider
from outrider.cli import app
from outrider.drafters import NoDrafter
from outrider.engine import Engine
from outrider.errors import CacheError, LoadError, ParameterError
from outrider.targets import llama
from outrider.targets.hf_tokenizer import HFTokenizer
from outrider.targets.transformers import TransformersTarget
from outrider.text import Detokenizer
from outrider.tree import DraftTree

FOLDER = Path(tempfile.mkdtemp(prefix="outrider-gguf-"))
LIBRARIES = llama.installed()
if not LIBRARIES:
    pytest.skip("no llama.cpp library is installed: pip install 'outrider[gguf]'", allow_module_level=True)
every_library = pytest.mark.parametrize("library", LIBRARIES)
UMLAUTS = "Grüße 😀 aus Köln,\n\n  zwei\tSpalten <end>und weiter"


@functools.cache
def file() -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_folder(eos=None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return write_gguf(FOLDER / "model.gguf", AutoModelForCausalLM.from_pretrained(folder), tokenizer, 0, TEMPLATE, padding=20)


def load(library: str, path: str | None = None, **values: Any) -> Any:
    return outrider.load_target(path or file(), gguf_library=library, gguf=values)


# ---- tokenizer ------------------------------------------------------------------------------------------------------


@every_library
def test_tokenizer_is_the_models(library: str) -> None:
    t, hf = load(library), HFTokenizer(tiny_tokenizer())
    assert t.vocab_size == t.tokenizer.size == hf.size and t.eos == {0}
    assert t.tokenizer.vocabulary() == hf.vocabulary()
    for text in (UMLAUTS, "hello", " x", ""):
        ids = hf.encode(text)
        assert t.tokenizer.encode(text) == t.tokenizer.encode_plain(text) == ids
        assert t.tokenizer.decode(ids) == hf.decode(ids)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "😀?"}]
    assert t.tokenizer.chat(turns) == hf.chat(turns)
    stream = Detokenizer(t.tokenizer)
    pieces = [stream.push(token) for token in t.tokenizer.encode(UMLAUTS)]
    assert "".join(pieces) + stream.flush() == t.tokenizer.decode(t.tokenizer.encode(UMLAUTS))
    assert not any("\ufffd" in piece for piece in pieces) and "" in pieces


def sentencepiece() -> Any:
    """A tokenizer as Llama 2 and Mistral have it: a space before the text, spaces as a letter, bytes for what is unknown."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    spaced = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer = spaced
    trained.train_from_iterator(
        ["hello there", "the end of the text", "hollow shells"], trainers.BpeTrainer(vocab_size=60, show_progress=False)
    )
    learned = json.loads(trained.to_str())["model"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *sorted(learned["vocab"], key=learned["vocab"].get)]
    merges = [tuple(pair) for pair in learned["merges"]]
    made = Tokenizer(
        models.BPE(dict(zip(texts, range(len(texts)))), merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = spaced
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@every_library
def test_sentencepiece(library: str, tmp_path: Path) -> None:
    hf = sentencepiece()
    model = tiny_model("llama", 1, torch.float32, 0.3, vocab_size=len(hf), hidden_size=64, num_hidden_layers=1)
    t = load(library, write_gguf(tmp_path / "spm.gguf", model, hf, 2))
    assert t.eos == {2} and t.tokenizer.vocabulary() == hf.get_vocab()
    for text in ("hello there", "the end, Grüße 😀\n\n  of", " x", "  two", "shells"):
        ids = t.tokenizer.encode(text)
        assert ids == hf.encode(text) and ids[1:] == t.tokenizer.encode_plain(text)
        assert t.tokenizer.decode(ids) == hf.decode(ids, skip_special_tokens=True) == text
        stream = Detokenizer(t.tokenizer, ids)
        pieces = [stream.push(token) for token in t.tokenizer.encode_plain(UMLAUTS)]
        assert "".join(pieces) + stream.flush() == " " + UMLAUTS, "what is emitted keeps its space"
        assert not any("\ufffd" in piece for piece in pieces)


@every_library
def test_a_file_in_parts(library: str, tmp_path: Path) -> None:
    model = tiny_model("llama", 1, torch.float32, 0.3, vocab_size=64, hidden_size=64, num_hidden_layers=2)
    whole, parts = (
        write_gguf(tmp_path / f"{name}.gguf", model, tensors_of_a_file=n) for name, n in (("whole", 0), ("parts", 7))
    )
    assert Path(parts).name == "parts-00001-of-00003.gguf"
    work = DraftTree.chain(5, (9, 13))
    wanted, found = (t.forward([(t.open(), work)])[0].logits.clone() for t in (load(library, whole), load(library, parts)))
    assert torch.equal(found, wanted)
    with pytest.raises(LoadError, match="first"):
        load(library, str(tmp_path / "parts-00002-of-00003.gguf"))
    Path(tmp_path / "parts-00003-of-00003.gguf").unlink()
    with pytest.raises(LoadError, match="parts-00003-of-00003"):
        load(library, parts)


@every_library
def test_templates_that_refuse_or_are_broken(library: str) -> None:
    for template, message in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "template"),
        ("{{ messages.__class__.__mro__ }}", "template"),
        (None, "no chat template"),
    ):
        path = write_gguf(FOLDER / "template.gguf", tiny_model("qwen2", vocab_size=300), tiny_tokenizer(), 0, template)
        with pytest.raises(ParameterError, match=message):
            load(library, path).tokenizer.chat([{"role": "user", "content": "x"}])


# ---- decoding -------------------------------------------------------------------------------------------------------


@every_library
def test_decodes_like_the_same_weights_on_transformers(library: str) -> None:
    own = TransformersTarget.load(str(tiny_folder(eos=None)), device="cpu")
    t = load(library)
    wanted = Engine(own, NoDrafter()).generate("The bridge over", max_tokens=24, ignore_eos=True)
    for drafter, options in (("none", {}), ("suffix", {"shape": "tree"}), ("suffix", {"shape": "chain"})):
        found = outrider.load(t, drafter, options).generate("The bridge over", max_tokens=24, ignore_eos=True)
        assert found.tokens == wanted.tokens and found.text == wanted.text
    across = outrider.load(str(tiny_folder(eos=None)), file(), gguf_library=library, gguf={"n_ctx": 200})
    assert across.generate("The bridge over", max_tokens=24, ignore_eos=True).tokens == wanted.tokens
    assert outrider.load(file(), gguf_library="transformers").target.dtype == torch.float32


@every_library
def test_a_full_cache_is_an_error_that_changes_nothing(library: str) -> None:
    t = load(library, n_ctx=256, n_ubatch=64)
    tokens = letters(None, 200)
    first, second = t.open(), t.open()
    for _ in t.prefill(first, tokens):
        pass
    with pytest.raises(CacheError, match="n_ctx = 256"):
        for slot in [second, *(t.open() for _ in range(3))]:
            for _ in t.prefill(slot, tokens):
                pass
    node = DraftTree((5, 6, 7, 8), (-1, 0, 0, 1))
    (output,) = t.forward([(first, node)])
    after = output.logits.clone()
    t.commit(first, ())
    for slot in list(t._slots.values()):
        t.close(slot)
    fresh = t.open()
    for _ in t.prefill(fresh, tokens):
        pass
    (output,) = t.forward([(fresh, node)])
    assert (after - output.logits).abs().max() < 2e-3 * after.abs().max()
    t.commit(fresh, ())
    t.close(fresh)
    assert t.open_slots == 0


@every_library
def test_trees_do_not_use_the_cache_up(library: str) -> None:
    """Refused branches leave holes between the cells that are kept; many rounds must not run out of room."""
    t = load(library, n_ctx=128)
    slot = t.open()
    bush = DraftTree((5, *range(6, 46)), (-1, *[0] * 20, *range(1, 21)))
    for round in range(60):
        t.forward([(slot, bush)])
        t.commit(slot, (0, 20, 40))
        if slot.length > 100:
            t.truncate(slot, round)
    text = slot.tokens[:]
    (output,) = t.forward([(slot, DraftTree.chain(7))])
    after = output.logits.clone()
    t.commit(slot, ())
    t.close(slot)
    fresh = t.open()
    for _ in t.prefill(fresh, text):
        pass
    (output,) = t.forward([(fresh, DraftTree.chain(7))])
    assert (after - output.logits).abs().max() < 2e-3 * after.abs().max()
    t.close(fresh)


@every_library
def test_too_many_sequences(library: str) -> None:
    t = load(library, n_seq_max=3)
    slots = [t.open() for _ in range(2)]
    with pytest.raises(CacheError, match="n_seq_max = 3"):
        t.forward([(slots[0], DraftTree((1, 2, 3, 4), (-1, 0, 0, 0)))])
    t.forward([(slots[0], DraftTree((1, 2, 3), (-1, 0, 0)))])
    t.commit(slots[0], (0, 2))
    assert slots[0].tokens == [1, 3]
    t.open()
    with pytest.raises(CacheError, match="n_seq_max"):
        t.open()


# ---- heads ----------------------------------------------------------------------------------------------------------


@every_library
def test_what_heads_borrow(library: str) -> None:
    path = write_gguf(FOLDER / "q8.gguf", tiny_model("llama", hidden_size=64, intermediate_size=64), quantisation="Q8_0")
    t = load(library, path)
    assert torch.equal(t.embed([3, 50]), torch.from_numpy(quantised(path, "token_embd.weight")[[3, 50]]))
    slot = t.open()
    for _ in t.prefill(slot, [1, 2, 3]):
        pass
    (output,) = t.forward([(slot, DraftTree.chain(4, [5, 6]))], ("final", 1))
    assert (output.logits - t._project(output.hidden["final"])).norm() < 0.05 * output.logits.norm()
    t.commit(slot, (0,))
    assert t.head(output.hidden["final"].clone()).shape == (3, t.vocab_size)
    assert slot.length == 4
    for key in (-1, t.n_layers + 1, "last"):
        with pytest.raises(ParameterError, match="unknown layer"):
            t.forward([(slot, DraftTree.chain(4))], (key,))


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_ctx": 0}, "n_ctx"),
        ({"n_ctx": 10**9}, "a smaller n_ctx"),
        ({"threads": -1}, "threads"),
        ({"cache_type_k": "q3"}, "cache_type_k"),
        ({"n_gpu_layers": 4}, "no GPU"),
        ({"tensor_overrides": "ffn"}, "PATTERN=BUFFER"),
        ({"tensor_overrides": "ffn.*=ABACUS"}, "ABACUS"),
        ({"tensor_overrides": "(=CPU"}, "regular expression"),
        ({"n_ubatch": 9, "n_batch": 8}, "n_ubatch"),
        ({"tempo": 3}, "tempo"),
    ],
)
@every_library
def test_parameters_are_honoured_or_refused(library: str, values: dict[str, Any], message: str) -> None:
    if "n_gpu_layers" in values and llama.candidates(library)[0].has_gpu:
        pytest.skip("this library has a GPU")
    with pytest.raises((ParameterError, LoadError), match=message) as caught:
        load(library, **values)
    assert "\n" not in str(caught.value)


@every_library
def test_placement_reaches_the_library(library: str) -> None:
    t = load(
        library,
        n_ctx="200",
        threads="2",
        repack="no",
        mmap="no",
        n_cpu_moe="1",
        tensor_overrides=r"ffn_up=CPU",
        n_batch=24,
        n_ubatch=8,
        n_seq_max=24,
    )
    shown = t.describe()["placement"]
    assert (shown["n_ctx"], shown["threads"], shown["repack"], shown["mmap"]) == (200, 2, False, False)
    assert t.context_length == 200
    slot = t.open()
    for _ in t.prefill(slot, list(range(5, 50))):
        pass
    (output,) = t.forward([(slot, DraftTree.chain(5, range(6, 56)))])  # more rows than n_batch
    many = output.logits.clone()
    t.commit(slot, range(40))
    (output,) = t.forward([(slot, DraftTree.chain(45, [46]))])
    assert (many[[40, 41]] - output.logits).abs().max() < 2e-3 * many.abs().max()
    t.commit(slot, (0,))
    t.close(slot)


def test_what_ik_gets_wrong_is_refused() -> None:
    if "ik" not in LIBRARIES:
        pytest.skip("ik-llama-cpp-python is not installed")
    with pytest.raises(ParameterError, match="take --gguf-library"):
        load("ik", flash_attention="yes")
    for name, kind in (("cache_type_k", "q8_0"), ("cache_type_v", "f32"), ("cache_type_v", "q4_0")):
        with pytest.raises(ParameterError, match=name):
            load("ik", **{name: kind})


def call(*arguments: Any) -> str:
    """The one line that the command line answers with."""
    result = CliRunner().invoke(app, ["run", *map(str, arguments), "--max-tokens", "4", "hello"])
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@every_library
def test_broken_files(library: str, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        return call("-t", path, "--gguf-library", library)

    content = Path(file()).read_bytes()
    broken = tmp_path / "broken.gguf"
    assert "no such file" in refused(tmp_path / "none.gguf")
    for length in (0, 3, 20, 5000, len(content) - 1000):
        broken.write_bytes(content[:length])
        assert str(broken) in refused(broken)
    broken.write_bytes(b"GGML" + content[4:])
    assert "not a GGUF file" in refused(broken)
    unknown = content.replace(b"llama", b"lemma")
    broken.write_bytes(unknown)
    assert "lemma" in refused(broken)
    writer = gguf.GGUFWriter(str(broken), "clip")
    writer.add_type("mmproj")
    writer.add_tensor("v.position_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "vision projector" in refused(broken)


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "installed", list)
    assert "outrider[gguf]" in call("-t", file())
    assert "outrider[gguf]" in call("-t", file(), "--gguf-library", "ik")
    assert "abacus" in call("-t", file(), "--gguf-library", "abacus")


def test_options_of_the_other_backend() -> None:
    assert "dtype" in call("-t", file(), "--dtype", "float16")
    assert "revision" in call("-t", file(), "--revision", "main")
    assert "GGUF" in call("-t", tiny_folder(eos=None), "-g", "n_ctx=100")
    assert "name=value" in call("-t", file(), "-g", "n_ctx")


def test_check_shows_library_and_placement() -> None:
    result = CliRunner().invoke(app, ["check", file(), "none", "--context", "20", "-g", "n_ctx=250"])
    assert result.exit_code == 0, result.output
    assert "n_ctx 250" in result.stdout and llama.candidates()[0].title in result.stdout
