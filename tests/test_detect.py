"""What a folder given as a drafter is, by its content; and what `outrider check` says about it."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_folder
from toys import tiny_target
from typer.testing import CliRunner

from outrider.cli import app
from outrider.drafters.detect import detect
from outrider.errors import LoadError


def folder(place: Path, config: dict[str, Any], **tensors: torch.Tensor) -> str:
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    save_file(
        {name.replace("__", "."): tensor for name, tensor in tensors.items()} or {"x": torch.ones(1)},
        place / "model.safetensors",
    )
    return str(place)


@pytest.mark.parametrize("kind", published.HEADS)
def test_heads(tmp_path: Path, kind: str) -> None:
    t = tiny_target(dtype=torch.float32)
    place = tmp_path / kind
    if kind == "medusa-2":
        shutil.copytree(tiny_folder(), place)
    source = published.write(place, kind, published.config_of(kind, 3), published.tensors_of(kind, published.make(kind, t)))
    found = detect(source)
    assert found.drafter == ("hydra" if kind.startswith("hydra") else "medusa")
    for word, kinds in (("Medusa-2", ["medusa-2"]), ("vLLM", ["vllm"]), ("Hydra++", ["hydra-prefix"])):
        assert (word in found.dialect) == (kind in kinds)


def test_models() -> None:
    assert detect("smollm2").drafter == "model"
    assert detect(str(tiny_folder())).drafter == "model"


def test_a_model_whose_files_are_wrong_is_left_to_the_loader(tmp_path: Path) -> None:
    place = tmp_path / "m"
    shutil.copytree(tiny_folder(), place)
    (place / "model.safetensors").write_bytes(b"broken")
    assert detect(str(place)).drafter == "model"


def gguf(path: Path, architecture: str) -> str:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    )
    return str(path)


def test_gguf_files(tmp_path: Path) -> None:
    assert detect(gguf(tmp_path / "m.gguf", "llama")).drafter == "model"
    assert detect(gguf(tmp_path / "e.gguf", "eagle3")).drafter == "eagle"
    assert detect(gguf(tmp_path / "d.gguf", "dflash")).drafter == "dflash"
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(LoadError, match="is a file"):
        detect(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"speculators_model_type": "peagle"}, "'peagle'"),
        ({"speculators_model_type": "dspark", "dflash_config": {}}, "'dspark'"),
        ({}, "no drafter that is known"),
        ({"medusa_num_heads": 3}, "no drafter that is known"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadError, match=said):
        detect(folder(tmp_path / "f", config))


def test_modules_without_their_model(tmp_path: Path) -> None:
    parts = {"mtp__fc__weight": torch.ones(1), "mtp__layers__0__input_layernorm__weight": torch.ones(1)}
    found = detect(folder(tmp_path / "mtp", {"model_type": "qwen3_5"}, **parts))
    assert found.drafter == "mtp" and "Qwen3.5" in found.dialect
    whole = {**parts, "model__embed_tokens__weight": torch.ones(1)}
    assert detect(folder(tmp_path / "whole", {"model_type": "qwen3_5"}, **whole)).drafter == "model"


def test_adapters_and_empty_folders_are_refused(tmp_path: Path) -> None:
    place = folder(tmp_path / "adapter", {})
    Path(place, "adapter_config.json").write_text("{}")
    with pytest.raises(LoadError, match="LoRA"):
        detect(place)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match="no weights"):
        detect(str(tmp_path / "empty"))
    with pytest.raises(LoadError, match="no such model folder"):
        detect(str(tmp_path / "nowhere"))


# ---- the command line ---------------------------------------------------------------------------------------------------


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra-prefix"])
def test_check_says_what_it_found(tmp_path: Path, kind: str) -> None:
    from outrider.models import load_target

    t = load_target(str(tiny_folder(context=1024)), device="cpu")
    module = published.make(kind, t)
    source = published.write(tmp_path / kind, kind, published.config_of(kind, 3), published.tensors_of(kind, module))
    result = call("check", t.name, source, "--context", 16, "--json")
    assert result.exit_code == 0, result.output
    everything = json.loads(result.stdout)
    found = everything["drafter"]
    assert all(list(by_length) == ["1", "2", "3"] for by_length in everything["speedup"].values()), "there are three heads"
    assert found["name"] == kind.split("-")[0] and found["weights"]["heads"] == 3
    assert found["weights"]["dialect"] == detect(source).dialect
    if kind != "medusa":
        assert found["weights"]["embeddings"] == "the target's" and found["weights"]["grounded"] is True
    shown = call("check", t.name, source, "--context", 16)
    assert found["weights"]["dialect"] in shown.stdout and "last hidden state" in " ".join(shown.stdout.split())


def test_check_says_what_does_not_fit(tmp_path: Path) -> None:
    t = tiny_target(dtype=torch.float32, hidden_size=64)
    module = published.make("medusa", t)
    source = published.write(tmp_path / "m", "medusa", published.config_of("medusa", 3), published.tensors_of("medusa", module))
    result = call("check", tiny_folder(context=1024), source)
    assert result.exit_code == 2
    line = result.stderr.strip() if result.stderr else result.output.strip()
    assert "0.0.linear.weight" in line and "[64, 64]" in line and "[32, 32]" in line and "Medusa-1" in line


def test_run_with_a_folder_of_heads(tmp_path: Path) -> None:
    from outrider.models import load_target

    t = load_target(str(tiny_folder()), device="cpu")
    module = published.make("medusa", t)
    source = published.write(tmp_path / "m", "medusa", published.config_of("medusa", 3), published.tensors_of("medusa", module))
    wanted = call("run", "-t", t.name, "-d", "none", "--max-tokens", 12, "hello").stdout
    for how in (["-d", source], ["-d", "medusa", "-o", f"model={source}"], ["-d", source, "-o", "shape=tree", "-o", "width=3"]):
        result = call("run", "-t", t.name, *how, "--max-tokens", 12, "hello")
        assert result.exit_code == 0 and result.stdout == wanted, result.output
