"""How far a learner has come, kept in a file: for each pair the objectives that were reached, and the settings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import LoadError
from ..files import write_json
from .desk import Settings

PROGRESS_VERSION = 1


@dataclass(frozen=True)
class Progress:
    """path: the file. pair: which entry of it is ours."""

    path: Path
    pair: tuple[str, str]

    def read(self) -> tuple[list[str], Settings | None]:
        """The names of the objectives that were reached, and the settings then. Raises LoadError for a file that is something else."""
        entry = self._pairs().get(" ".join(self.pair))
        if entry is None:
            return [], None
        try:
            values = entry["settings"]
            settings = Settings(**values | {"options": tuple((str(k), str(v)) for k, v in values["options"])})
            return [str(name) for name in entry["done"]], settings
        except (TypeError, KeyError, ValueError) as error:
            raise self._broken() from error

    def write(self, done: list[str], settings: Settings) -> None:
        """Keep what was reached."""
        pairs = self._pairs() | {" ".join(self.pair): {"done": done, "settings": asdict(settings)}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {"outrider_lab": PROGRESS_VERSION, "pairs": pairs})
        except OSError as error:
            raise LoadError(
                f"cannot keep the lab's progress in {self.path}: {error.strerror}; name another file with --progress"
            ) from error

    def _pairs(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        try:
            value = json.loads(self.path.read_text(encoding="utf-8"))
            if value["outrider_lab"] != PROGRESS_VERSION:
                raise LoadError(
                    f"{self.path} is of version {value['outrider_lab']} of the lab; name another file with --progress"
                )
            return dict(value["pairs"])
        except OSError as error:
            raise LoadError(f"cannot read the lab's progress {self.path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise self._broken() from error

    def _broken(self) -> LoadError:
        return LoadError(f"{self.path} is no progress of the lab; delete it, or name another file with --progress")
