"""Where Outrider keeps files, and that JSON is written whole, or not at all, and as every reader takes it."""

import json
import math
from pathlib import Path

import pytest

from outrider import files, models
from outrider.files import cache_directory, to_json, write_json
from outrider.kernels import choose


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """No home directory, and another folder for temporary files."""

    def none(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.setattr(Path, "expanduser", none)
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in ("OUTRIDER_MODELS", "OUTRIDER_CACHE", "OUTRIDER_KERNEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_without_a_home_directory_files_are_kept_among_the_temporary_ones(homeless, monkeypatch):
    assert cache_directory().parent == homeless
    assert models.directory() == cache_directory() / "models" and choose.cache_file() == cache_directory() / "kernels.json"
    choose.remember({"shape": {"torch": (1.0,) * len(choose.ROWS)}})
    assert choose.recall() == {"shape": {"torch": (1.0,) * len(choose.ROWS)}}
    monkeypatch.setenv("OUTRIDER_MODELS", str(homeless / "m"))
    monkeypatch.setenv("OUTRIDER_CACHE", str(homeless / "k"))
    assert models.directory() == homeless / "m" and choose.cache_file() == homeless / "k"


def test_with_a_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OUTRIDER_MODELS", raising=False)
    assert models.directory() == tmp_path / ".cache" / "outrider" / "models"
    monkeypatch.setenv("OUTRIDER_MODELS", "~/elsewhere")
    assert models.directory() == tmp_path / "elsewhere"


def test_numbers_that_json_does_not_have_become_null():
    value = {"a": [1.5, -math.inf, (math.nan, "x")], "b": {"c": math.inf}, 0.5: None}
    assert json.loads(to_json(value)) == {"a": [1.5, None, [None, "x"]], "b": {"c": None}, "0.5": None}
    assert json.loads(to_json({"p": Path("x"), "a": math.inf}, default=str)) == {"p": "x", "a": None}


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1}, mode=0o444)
    assert json.loads(path.read_text()) == {"a": 1} and path.stat().st_mode & 0o777 == 0o444

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"a": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"] and json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"]
