"""A run's state on disk: written whole or not at all, so that what is there can always be gone on from."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Mapping

import torch

from ..errors import LoadError, ParameterError

FILE = "checkpoint.pt"


def save(folder: Path, state: Mapping[str, Any]) -> None:
    """Raises LoadError when it cannot be written; the one before is whole then."""
    part = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=folder, prefix=".checkpoint-")
        with os.fdopen(handle, "wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, folder / FILE)
    except (OSError, RuntimeError) as error:  # PyTorch's writer makes a RuntimeError of a full disk
        if part is not None and os.path.exists(part):
            os.unlink(part)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        kept = ", the one before is whole" if (folder / FILE).exists() else ""
        raise LoadError(f"cannot write the checkpoint in {folder}: {reason}{kept}; make room and call it again") from error


def load(folder: Path) -> dict[str, Any] | None:
    """The state, or None where there is none. Raises LoadError for a damaged file."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, for a damaged file
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise LoadError(f"{path} cannot be read: {first[0]}; --restart begins anew") from error


def refuse_other(before: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Raise ParameterError, naming the first difference, where a run would go on with another recipe."""
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise ParameterError(
                f"{where} has a run with {name} {before.get(name)!r}, not {now.get(name)!r}: give the same, another -o, or --restart"
            )
