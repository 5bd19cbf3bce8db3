"""Files that Outrider keeps: where, and how JSON is written."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

from filelock import BaseFileLock, FileLock, Timeout

from .errors import LoadError


def cache_directory() -> Path:
    """~/.cache/outrider; where there is no home directory, a folder of this user's own among the temporary ones."""
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError:
        user = getattr(os, "getuid", lambda: "user")()
        return Path(tempfile.gettempdir(), f"outrider-{user}")


def to_json(value: Any, **options: Any) -> str:
    """JSON as every reader takes it: numbers that are infinite or not numbers become null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | Path, value: Any, mode: int | None = None) -> None:
    """Write a file whole or not at all; a failure leaves nothing behind. Raises OSError where it cannot be written."""
    text = to_json(value, indent=1)
    handle, part = tempfile.mkstemp(dir=Path(path).resolve().parent, prefix=".outrider-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        if mode is not None:
            os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def sole_writer(folder: str | Path) -> BaseFileLock:
    """A lock on a folder, until it is released or the process ends. Raises LoadError when another process has it."""
    lock = FileLock(Path(folder) / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise LoadError(f"another process is writing to {folder}: let it finish, or write to another folder") from None
    except OSError as error:
        raise LoadError(f"cannot write to {folder}: {error.strerror}") from error
    return lock


@contextmanager
def appearing(path: str | Path) -> Iterator[Path]:
    """A place for a file or folder to be written at; at the end of the block it becomes `path`, and replaces what was there.

    Until then, and after any failure, `path` is as it was. Raises OSError where it cannot be written.
    """
    place = Path(path).absolute()
    scratch = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    part, old = scratch / place.name, scratch / f"{place.name}.old"
    try:
        yield part
        if place.is_dir():
            os.rename(place, old)  # a folder cannot be replaced in one step
        os.replace(part, place)
    except BaseException:
        if old.exists() and not place.exists():
            os.rename(old, place)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
