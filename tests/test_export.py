"""Drafters in other formats: round trips give the same bytes and the same drafts, and what has no place is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import eagles
import published
import pytest
import torch
from test_eagle import NO_LIBRARY, chains
from tiny import tiny_folder
from tiny_gguf import write_gguf
from toys import tiny_target
from typer.testing import CliRunner

from outrider.cli import app
from outrider.drafters import load_drafter
from outrider.drafters.detect import detect
from outrider.drafters.eagle import EagleOptions, open_checkpoint, read_head
from outrider.errors import LoadError, ParameterError
from outrider.export import FORMATS, export
from outrider.models import load_target

EAGLE_3 = ("safeailab", "specforge", "speculators", "gguf")
LAYERS, VOCABULARY = 8, 300


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target(str(tiny_folder(layers=LAYERS, context=1024)), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def gguf(target: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target's own file."""
    from transformers import AutoTokenizer

    return write_gguf(tmp_path_factory.mktemp("target") / "t.gguf", target.model, AutoTokenizer.from_pretrained(target.name))


def head(place: Path, dialect: str = "safeailab", half: bool = False, draft: Any = range(0, 300, 3), **changes: Any) -> str:
    """A random head. changes: to the layer's config; those of `flags` to the head's."""
    flags = changes.pop("flags", {})
    config, tensors = eagles.make(dialect, vocab=VOCABULARY, draft=draft, rope_theta=50000.0, **changes)
    if half:
        tensors = {name: x.bfloat16() if x.is_floating_point() else x for name, x in tensors.items()}
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + torch.rand(96)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": 1 + torch.rand(32) for i in range(3)}
    return eagles.write(place, dialect, {**config, **flags}, tensors)


def content(path: str) -> dict[str, bytes]:
    place = Path(path)
    return {
        file.name if place.is_dir() else "": file.read_bytes() for file in ([place] if place.is_file() else place.iterdir())
    }


def place(folder: Path, name: str, form: str) -> str:
    return str(folder / (f"{name}.gguf" if form == "gguf" else name))


def weights(target: Any, source: str) -> dict[str, torch.Tensor]:
    """All that is read, before it is packed."""
    head = read_head(open_checkpoint(source), target, EagleOptions())
    return {**dict(head.named_parameters()), "ids": head.draft_ids, "layers": torch.tensor(head.layers)}


# ---- round trips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", EAGLE_3)
def test_round_trips_give_the_same_bytes(form: str, half: bool, target: Any, gguf: str, tmp_path: Path) -> None:
    source = head(tmp_path / "source", half=half)
    first = export(source, form, place(tmp_path, "first", form), gguf).path
    wanted = weights(target, source)
    for other in EAGLE_3:
        there = export(first, other, place(tmp_path, f"there-{other}", other), gguf).path
        back = export(there, form, place(tmp_path, f"back-{other}", form), gguf).path
        assert content(back) == content(first), other
        found = weights(target, there)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), other


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_residual": True},
        {"norm_before_fc": True, "norm_before_residual": True},
        {"norm_output": True, "fc_norm": True},
    ],
    ids=lambda f: "+".join(f),
)
def test_flags_and_layers_go_along(flags: dict[str, bool], target: Any, gguf: str, tmp_path: Path) -> None:
    """All that two formats both know."""
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}
    source = head(tmp_path / "source", "speculators", flags={**flags, **layers})
    for form in EAGLE_3[1:]:
        refused = {"specforge": "norm_before_residual", "gguf": "fc_norm"}.get(form)
        if refused in flags:
            with pytest.raises(ParameterError, match=rf"cannot be written as {form}: it has norm_\w+|fc_norm"):
                export(source, form, place(tmp_path, form, form), gguf)
            continue
        made = export(source, form, place(tmp_path, form, form), gguf).path
        recipe = load_drafter(made, target).head.recipe  # type: ignore[attr-defined]
        assert recipe.layers == (1, 4, 7)
        assert (recipe.norm_before_residual, recipe.input_norm) == (
            flags.get("norm_before_residual", False),
            flags.get("norm_before_fc", False),
        )
        assert (recipe.norm_output, recipe.fc_norm) == (flags.get("norm_output", False), flags.get("fc_norm", False))


def test_numbers_of_layers_mean_the_same_ones(target: Any, gguf: str, tmp_path: Path) -> None:
    """SpecForge's numbers name outputs, unless the last state of all is among them."""
    for entries, outputs in (([1, 4, 7], [0, 3, 6]), ([1, 4, 8], [1, 4, 8])):
        source = head(tmp_path / f"{entries}", "speculators", flags={"eagle_aux_hidden_state_layer_ids": entries})
        made = export(source, "specforge", str(tmp_path / f"{outputs}-{entries}"), target.name).path
        config = json.loads(Path(made, "config.json").read_text())
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == outputs
        assert list(load_drafter(made, target).layers) == entries
    source = head(tmp_path / "zero", "speculators", flags={"eagle_aux_hidden_state_layer_ids": [0, 4, 7]})
    with pytest.raises(ParameterError, match="layer 0"):
        export(source, "specforge", str(tmp_path / "never"), target.name)


ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_a_stretched_rotation(target: Any, gguf: str, tmp_path: Path) -> None:
    source = head(tmp_path / "source", "specforge", rope_scaling=ROPE)
    made = export(source, "gguf", str(tmp_path / "h.gguf"), gguf).path
    turns = [load_drafter(s, target).head.body.rotary_emb.inv_freq for s in (source, made)]  # type: ignore[attr-defined]
    assert torch.equal(*turns) and turns[0][-1] < 0.2 * 50000.0 ** -(3 / 4)
    first, back = (export(s, "specforge", str(tmp_path / f"s{i}"), gguf).path for i, s in enumerate((source, made)))
    assert content(first) == content(back)
    other = bytes(content(made)[""]).replace(b"outrider.rope_parameters", b"somebody.else_parameters")  # as llama.cpp writes it
    Path(tmp_path, "other.gguf").write_bytes(other)
    found = load_drafter(str(tmp_path / "other.gguf"), target).head.body.rotary_emb.inv_freq  # type: ignore[attr-defined]
    assert torch.allclose(found, turns[0], rtol=1e-6)
    with pytest.raises(ParameterError, match="by factors alone"):
        export(str(tmp_path / "other.gguf"), "specforge", str(tmp_path / "never"), gguf)


def test_a_quantised_head(target: Any, gguf: str, tmp_path: Path) -> None:
    """As llama.cpp's tools write it: read as what its blocks mean."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    from outrider.gguf_file import add_key, open_gguf

    source = head(tmp_path / "source")
    made = open_gguf(export(source, "gguf", str(tmp_path / "h.gguf"), gguf).path)
    writer = GGUFWriter(tmp_path / "q.gguf", "eagle3")
    for name, value in made.values().items():
        if name != "general.architecture":
            add_key(writer, name, value, made.kinds()[name])
    for part in made.tensors:
        coarse = part.data.ndim == 2
        kind = GGMLQuantizationType.Q8_0 if coarse else part.tensor_type
        writer.add_tensor(part.name, quants.quantize(part.data, kind) if coarse else part.data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    exact, coarse_ones = weights(target, source), weights(target, str(tmp_path / "q.gguf"))
    for name, value in coarse_ones.items():
        assert torch.allclose(value.float(), exact[name].float(), atol=0.01), name
    assert not torch.equal(coarse_ones["fc.weight"], exact["fc.weight"]) and torch.equal(coarse_ones["ids"], exact["ids"])


def test_heads_that_borrow_their_output_matrix(target: Any, gguf: str, tmp_path: Path) -> None:
    config, tensors = eagles.make("specforge", vocab=VOCABULARY)
    del tensors["lm_head.weight"]
    source = eagles.write(tmp_path / "source", "specforge", {**config, "draft_vocab_size": None}, tensors)
    made = export(source, "gguf", str(tmp_path / "h.gguf"), gguf).path
    assert load_drafter(made, target).describe()["output matrix"] == "the target's"
    back = export(made, "specforge", str(tmp_path / "back"), gguf).path
    assert json.loads(Path(back, "config.json").read_text())["draft_vocab_size"] is None
    with pytest.raises(ParameterError, match="no output matrix of its own"):
        export(source, "speculators", str(tmp_path / "never"), gguf)


def test_eagle_1_heads_have_one_format(target: Any, tmp_path: Path) -> None:
    source = head(tmp_path / "source", "eagle")
    made = export(source, "safeailab", str(tmp_path / "made"), target.name)
    again = export(made.path, "safeailab", str(tmp_path / "again"), target.name)
    assert "EAGLE-1/2" in made.found and content(made.path) == content(again.path)
    ours, theirs = (dict(read_head(open_checkpoint(s), target, EagleOptions()).named_parameters()) for s in (source, made.path))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())
    for form in EAGLE_3[1:]:
        with pytest.raises(ParameterError, match="EAGLE-1/2"):
            export(source, form, place(tmp_path, form, form), target.name)


@pytest.mark.parametrize("kind", ["medusa", "medusa-2", "vllm"])
def test_medusa(kind: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder(), tmp_path / "source")
    module = published.make(kind, tiny_target(dtype=torch.float32, vocab_size=300), heads=3, layers=2)
    if kind != "medusa-2":
        shutil.rmtree(tmp_path / "source")
    source = published.write(tmp_path / "source", kind, published.config_of(kind, 3, 2), published.tensors_of(kind, module))
    made = export(source, "medusa", str(tmp_path / "made"), str(tiny_folder()))
    assert detect(made.path).dialect == "Medusa-1 heads (FasterDecoding)" and sorted(made.files) == [
        "config.json",
        "medusa_lm_head.pt",
    ]
    state = torch.load(tmp_path / "made" / "medusa_lm_head.pt", weights_only=True)
    module.load_state_dict(state)  # the authors' own names and shapes
    again = export(made.path, "medusa", str(tmp_path / "again"), str(tiny_folder()))
    assert content(again.path) == content(made.path)
    assert json.loads(content(made.path)["config.json"])["medusa_num_heads"] == 3


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("source", ["safeailab", "gguf"])
def test_the_speculators_library_loads_it_with_the_same_logits(source: str, target: Any, gguf: str, tmp_path: Path) -> None:
    eagle3 = pytest.importorskip("speculators.models.eagle3", reason=NO_LIBRARY)
    first = head(tmp_path / "source")
    if source == "gguf":
        first = export(first, "gguf", str(tmp_path / "h.gguf"), gguf).path
    made = export(first, "speculators", str(tmp_path / "made"), target.name).path
    config = eagle3.Eagle3SpeculatorConfig.from_pretrained(made)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = eagle3.Eagle3DraftModel.from_pretrained(made, config=config)
    theirs.embed_tokens.weight.data = target.model.get_input_embeddings().weight.data.clone()  # of the target, as everywhere
    hidden, tokens = torch.randn(12, 96), torch.randint(0, VOCABULARY, (12,))
    wanted: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda *a: wanted.append(a[2][0].detach()))
    with torch.no_grad():
        theirs(hidden[None], tokens[None], torch.zeros(1, 12, dtype=torch.long), ttt_steps=4)
    ours: Any = load_drafter(first, target).head  # type: ignore[attr-defined]
    with torch.inference_mode():
        found = chains(ours, tokens.tolist(), ours.fuse(hidden), 4)
    for k in range(4):
        assert torch.allclose(found[k, : 12 - k][:, ::3], wanted[k][: 12 - k], atol=1e-4, rtol=0), k


# ---- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("safeailab", {"flags": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}}, "reads layers 1, 4, 7; SafeAILab's code reads 2, 4, 5"),
        ("safeailab", {"flags": {"norm_before_residual": True}}, "has norm_before_residual"),
        ("safeailab", {"rope_parameters": {"rope_theta": 1e4, **ROPE}}, "rotation is of the kind 'llama3'"),
        ("specforge", {"family": "qwen3", "head_dim": 16}, "family 'qwen3'"),
        ("gguf", {"family": "qwen3", "head_dim": 16}, "family 'qwen3'"),
        ("gguf", {"hidden_act": "gelu"}, "activation is 'gelu'"),
        ("gguf", {"flags": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 7]}, "taken": 4}, "reads 4 layers"),
    ],
)  # fmt: skip
def test_what_has_no_place(form: str, changes: dict[str, Any], said: str, gguf: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=f"cannot be written as {form}: .*{said}"):
        export(head(tmp_path / "source", "speculators", **changes), form, place(tmp_path, "out", form), gguf)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_other_kinds_of_drafters(target: Any, tmp_path: Path) -> None:
    small = tiny_target(dtype=torch.float32, vocab_size=300)
    made = {}
    for kind in ("medusa", "hydra"):
        module = published.make(kind, small)
        made[kind] = published.write(tmp_path / kind, kind, published.config_of(kind, 3), published.tensors_of(kind, module))
    for source, form, said in (
        (made["medusa"], "speculators", "Medusa-1 heads .* cannot be written as speculators .*formats for it: medusa"),
        (made["hydra"], "medusa", "Hydra heads have one format"),
        (str(tiny_folder()), "gguf", "a whole model"),
        (head(tmp_path / "eagle"), "medusa", "formats for it: safeailab, specforge, speculators, gguf"),
        (head(tmp_path / "more"), "onnx", "unknown format 'onnx'; known: safeailab"),
    ):
        with pytest.raises(ParameterError, match=said):
            export(source, form, str(tmp_path / "out.gguf"), target.name)


def test_a_target_that_does_not_fit(target: Any, gguf: str, tmp_path: Path) -> None:
    source = head(tmp_path / "source")
    with pytest.raises(ParameterError, match="must be given as its GGUF file"):
        export(source, "gguf", str(tmp_path / "h.gguf"), target.name)
    with pytest.raises(LoadError, match="made for another target"):
        export(source, "safeailab", str(tmp_path / "out"), str(tiny_folder(hidden=64)))
    with pytest.raises(LoadError, match="there is no folder /nowhere"):
        export(source, "safeailab", str(tmp_path / "out"), "/nowhere")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(30))
    with pytest.raises(LoadError, match="no GGUF header, or a damaged one"):
        export(source, "gguf", str(tmp_path / "h.gguf"), str(tmp_path / "broken.gguf"))


def test_damaged_and_foreign_gguf_files(target: Any, gguf: str, tmp_path: Path) -> None:
    made = export(head(tmp_path / "source"), "gguf", str(tmp_path / "h.gguf"), gguf).path
    whole = content(made)[""]
    for old, new, said in (
        (b"eagle3.target_layers", b"eagle3.another_thing", "key eagle3.another_thing is not known"),
        (b"blk.0.attn_q.weight", b"blk.0.attn_z.weight", "tensor blk.0.attn_z.weight is not known"),
        (b"eagle3.block_count", b"eagle4.block_count", "no key eagle3.block_count"),
    ):
        Path(tmp_path, "x.gguf").write_bytes(whole.replace(old, new))
        with pytest.raises(LoadError, match=said):
            load_drafter(str(tmp_path / "x.gguf"), target)
    Path(tmp_path, "x.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LoadError, match=r"x\.gguf cannot be read"):
        load_drafter(str(tmp_path / "x.gguf"), target)


# ---- files -----------------------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_unasked(target: Any, tmp_path: Path) -> None:
    source, out = head(tmp_path / "source"), tmp_path / "out"
    export(source, "safeailab", str(out), target.name)
    before = content(str(out))
    with pytest.raises(ParameterError, match="--force"):
        export(source, "specforge", str(out), target.name)
    assert content(str(out)) == before
    export(source, "specforge", str(out), target.name, force=True)
    assert content(str(out)) != before
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ParameterError, match=r"holds notes.txt"):
        export(source, "specforge", str(out), target.name, force=True)
    with pytest.raises(ParameterError, match="is what would be exported"):
        export(source, "safeailab", source, target.name, force=True)
    with pytest.raises(ParameterError, match="there is no folder"):
        export(source, "safeailab", str(tmp_path / "no" / "out"), target.name)
    with pytest.raises(ParameterError, match=r"ends in \.gguf"):
        export(source, "gguf", str(tmp_path / "h"), target.name)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk full", "stopped"])
def test_a_failure_leaves_what_was_there(error: BaseException, target: Any, tmp_path: Path, monkeypatch: Any) -> None:
    source, out = head(tmp_path / "source"), tmp_path / "out"
    export(source, "safeailab", str(out), target.name)
    before = content(str(out))

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(LoadError if isinstance(error, OSError) else KeyboardInterrupt, match=r"No space|^$"):
        export(source, "specforge", str(out), target.name, force=True)
    assert content(str(out)) == before and sorted(f.name for f in tmp_path.iterdir()) == ["out", "source"]


def test_command_line(target: Any, gguf: str, tmp_path: Path) -> None:
    def call(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["export", *arguments])

    source, out = head(tmp_path / "source"), str(tmp_path / "h.gguf")
    made = call(source, out, "--format", "gguf", "-t", gguf, "-o", "norm_before_residual=true", "--json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert found["found"] == "EAGLE-3 (SafeAILab)" and found["files"] == {"h.gguf": Path(out).stat().st_size}
    assert load_drafter(out, target).head.recipe.norm_before_residual  # type: ignore[attr-defined]
    again = call(source, out, "--format", "gguf", "-t", gguf)
    assert again.exit_code == 2 and "--force" in again.stderr
    shown = call(source, out, "--format", "gguf", "-t", gguf, "--force")
    assert shown.exit_code == 0 and f"llama-server -m {gguf} --spec-type draft-eagle3 --spec-draft-model {out}" in shown.stderr
    assert set(FORMATS) <= set(call("--help").stdout.replace(",", " ").replace(".", " ").split())
