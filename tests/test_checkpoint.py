"""Checkpoints of heads: what is read, what is refused, and that each refusal is one line that names the file, tensor or key."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.drafters.checkpoint import Checkpoint, resolve
from outrider.errors import LoadError

TENSORS = {
    "0.0.linear.weight": torch.arange(16.0).view(4, 4),
    "0.0.linear.bias": torch.arange(4.0),
    "1.0.linear.weight": torch.ones(4, 4, dtype=torch.bfloat16),
    "d2t": torch.tensor([0, 3, 5]),
    "t2d": torch.tensor([True, False]),
}


class Harmful:
    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def write(folder: Path, how: str = "safetensors", tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"heads": 2, "name": "x", "theta": 5, "on": True, "off": None}))
    names = sorted(tensors)
    if how == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif how in ("bin", "pt"):
        torch.save(tensors, folder / ("pytorch_model.bin" if how == "bin" else "medusa_lm_head.pt"))
    elif how == "legacy":
        torch.save(tensors, folder / "old.bin", _use_new_zipfile_serialization=False)
    else:
        end = "safetensors" if how == "sharded" else "bin"
        first = "model.safetensors" if how == "sharded" else "pytorch_model.bin"
        where = {name: f"part-{i % 2}.{end}" for i, name in enumerate(names)}
        for file in set(where.values()):
            part = {name: tensors[name] for name in names if where[name] == file}
            if how == "sharded":
                save_file(part, folder / file)
            else:
                torch.save(part, folder / file)
        (folder / f"{first}.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def message(action: Any) -> str:
    with pytest.raises(LoadError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text and len(text) > 20
    return text


@pytest.mark.parametrize("how", ["safetensors", "sharded", "bin", "pt", "legacy", "sharded bins"])
def test_reads_every_kind_of_file(tmp_path: Path, how: str) -> None:
    checkpoint = Checkpoint.read(write(tmp_path, how))
    assert checkpoint.config["heads"] == 2 and set(checkpoint.tensors) == set(TENSORS)
    assert checkpoint.count(r"(\d+)\.0\.linear\.weight") == 2 and checkpoint.shape("0.0.linear.weight") == (4, 4)
    for name, kind in (("0.0.linear.weight", "float"), ("1.0.linear.weight", "float"), ("d2t", "int"), ("t2d", "bool")):
        assert name in checkpoint.rest
        tensor = checkpoint.take(name, *TENSORS[name].shape, kind=kind)
        assert torch.equal(tensor, TENSORS[name]) and tensor.dtype == TENSORS[name].dtype
    assert checkpoint.rest == ["0.0.linear.bias"]
    assert "0.0.linear.bias" in message(checkpoint.refuse_rest)
    checkpoint.ignore("0.0.linear.bias", "nowhere")
    checkpoint.refuse_rest()


def test_safetensors_win_and_training_files_are_no_weights(tmp_path: Path) -> None:
    folder = write(tmp_path)
    torch.save({"other": torch.ones(1)}, folder / "pytorch_model.bin")
    assert "other" not in Checkpoint.read(folder)
    folder = write(tmp_path / "two", "pt")
    (folder / "training_args.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "made")))
    (folder / "optimizer.pt").write_bytes(b"whatever")
    assert set(Checkpoint.read(folder).tensors) == set(TENSORS) and not (tmp_path / "made").exists()


@pytest.mark.parametrize("plain", [True, False])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, plain: bool) -> None:
    folder, made = write(tmp_path), tmp_path / "made"
    (folder / "model.safetensors").unlink()
    bad = {"weight": Harmful(made)}
    if plain:
        (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps(bad, protocol=2))
    else:
        torch.save(bad, folder / "medusa_lm_head.pt")
    text = message(lambda: Checkpoint.read(folder))
    assert "medusa_lm_head.pt" in text and "mkdir" in text and "refused" in text and "safetensors" in text
    assert not made.exists()
    torch.save({"weight": torch.nn.Linear(1, 1)}, folder / "medusa_lm_head.pt")
    assert "refused" in message(lambda: Checkpoint.read(folder))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read(write(tmp_path))
    assert "has no tensor fc.weight" in message(lambda: checkpoint.take("fc.weight", 4, 4))
    assert checkpoint.take("fc.weight", 4, 4, optional=True) is None
    text = message(lambda: checkpoint.take("0.0.linear.weight", 8, None))
    assert "0.0.linear.weight" in text and "[4, 4]" in text and "[8, any]" in text
    assert "[4]" in message(lambda: checkpoint.take("0.0.linear.bias", 4, 4, optional=True))
    assert "int64" in message(lambda: checkpoint.take("d2t", 3)) and "d2t" in message(lambda: checkpoint.take("d2t", 3))
    assert "bool" in message(lambda: checkpoint.take("t2d", 2, kind="int"))
    assert "integers" in message(lambda: checkpoint.take("0.0.linear.bias", 4, kind="int"))
    assert not checkpoint.taken, "what was refused is not taken"


def test_a_part_of_the_names(tmp_path: Path) -> None:
    names = {
        "model.embed.weight": torch.ones(2, 2),
        "medusa_head.0.1.weight": torch.ones(3, 2),
        "medusa_head.0.x": torch.ones(1),
    }
    part = Checkpoint.read(write(tmp_path, tensors=names)).under("medusa_head.")
    assert part.take("0.1.weight", 3, 2).shape == (3, 2) and part.rest == ["0.x"]
    assert "medusa_head.0.x" in message(part.refuse_rest)
    assert "medusa_head.0.y" in message(lambda: part.take("0.y", 1))


def test_counting_finds_gaps(tmp_path: Path) -> None:
    tensors = {f"{i}.weight": torch.ones(1) for i in (0, 1, 3)} | {"b.2": torch.ones(1)}
    checkpoint = Checkpoint.read(write(tmp_path, tensors=tensors))
    assert "number 2" in message(lambda: checkpoint.count(r"(\d+)\.weight"))
    assert "number 0" in message(lambda: checkpoint.count(r"b\.(\d+)"))
    assert checkpoint.count(r"c\.(\d+)") == 0


def test_config_values_are_checked(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read(write(tmp_path))
    assert checkpoint.value("heads") == 2 and checkpoint.value("theta", float) == 5.0 and checkpoint.value("on", bool)
    assert checkpoint.value("off", bool, True) is True and checkpoint.value("nowhere", str, None) is None
    for key, kind in (("nowhere", int), ("off", int), ("name", int), ("heads", bool), ("on", int)):
        text = message(lambda key=key, kind=kind: checkpoint.value(key, kind))  # type: ignore[misc]
        assert repr(key) in text and "config.json" in text
    checkpoint.config |= {"medusa_trick": 3, "medusa_off": False}
    checkpoint.refuse_flags("hydra_")
    assert "'medusa_trick'" in message(lambda: checkpoint.refuse_flags("medusa_"))
    checkpoint.value("medusa_trick")
    checkpoint.refuse_flags("medusa_")


def test_damaged_folders(tmp_path: Path) -> None:
    assert "no such folder" in message(lambda: Checkpoint.read(tmp_path / "nowhere"))
    assert "no weights" in message(lambda: Checkpoint.read(tmp_path))
    for how, file in (("safetensors", "model.safetensors"), ("bin", "pytorch_model.bin")):
        folder = write(tmp_path / how, how)
        content = (folder / file).read_bytes()
        for broken in (content[: len(content) // 2], b"garbage", b""):
            (folder / file).write_bytes(broken)
            assert file in message(lambda folder=folder: Checkpoint.read(folder))  # type: ignore[misc]
    folder = write(tmp_path / "c")
    (folder / "config.json").write_text("{")
    assert "config.json" in message(lambda: Checkpoint.read(folder))
    (folder / "config.json").write_text("[]")
    assert "config.json" in message(lambda: Checkpoint.read(folder))
    folder = write(tmp_path / "s", "sharded")
    (folder / "part-1.safetensors").unlink()
    assert "part-1.safetensors" in message(lambda: Checkpoint.read(folder))
    folder = write(tmp_path / "d", "pt")
    torch.save({"d2t": torch.ones(1)}, folder / "more.pt")
    text = message(lambda: Checkpoint.read(folder))
    assert "d2t" in text and "more.pt" in text and "medusa_lm_head.pt" in text
    folder = write(tmp_path / "n", "pt", {"state_dict": {"a": torch.ones(1)}})  # type: ignore[dict-item]
    assert "'state_dict'" in message(lambda: Checkpoint.read(folder))


def test_a_source_is_a_folder_or_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    assert "no such model folder" in message(lambda: resolve(str(tmp_path / "nowhere")))

    def snapshot(source: str, allow_patterns: list[str]) -> str:
        if source != "someone/heads":
            raise OSError("Repository Not Found\nand more")
        if "*.pt" in allow_patterns:
            write(tmp_path / "snapshot", "pt")
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert len(Checkpoint.read(resolve("someone/heads")).tensors) == len(TENSORS)
    text = message(lambda: resolve("someone/else"))
    assert "someone/else" in text and "Repository Not Found" in text
