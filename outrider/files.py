"""Files that Outrider keeps: where, and how JSON is written."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any


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
