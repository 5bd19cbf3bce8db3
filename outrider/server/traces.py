"""Traces of chosen requests: files as `outrider run --trace` writes them, kept in a folder and served by their number."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Sequence

from .. import machine
from ..engine import Engine
from ..errors import LoadError
from ..trace import TraceWriter
from .scheduler import Job

MOST = 100
"""Traces that are kept; the oldest go."""
NAME = re.compile(r"[a-z]+-[0-9a-f]{32}")


class Traces:
    """The folder; without a name a temporary one that goes with the server."""

    def __init__(self, folder: str | None = None):
        self._temporary = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="outrider-traces-"))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LoadError(f"--traces: cannot make the folder {folder}: {error.strerror}") from error

    def open(self, name: str, engine: Engine, jobs: Sequence[Job]) -> TraceWriter:
        """A writer for one request's Rounds; its sequences are the request's choices."""
        kept = sorted(self.folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        for path in kept[: max(len(kept) - MOST + 1, 0)]:
            path.unlink(missing_ok=True)
        first = jobs[0].sequence
        drafter = first.drafter or engine.drafter
        prompts = [job.sequence for job in jobs if job.is_first]
        per_prompt = len(jobs) // len(prompts)
        decode = engine.target.tokenizer.decode if engine.target.tokenizer else lambda tokens: ""
        return TraceWriter(
            self.folder / f"{name}.jsonl",
            {
                **machine.manifest(),
                "target": engine.target.describe(),
                "drafter": {"name": drafter.name, "options": asdict(drafter.options)},
                "draft": first.most_drafted,
                "sampling": asdict(first.params),
                "rule": first.rule,
                "lossy": first.lossy,
                "seed": first.sampler.seed,
                "prompts": {i: decode(s.tokens[: s.prompt_length]) for i, s in enumerate(prompts)},
                "sequences": [
                    {"prompt": job.choice // per_prompt, "prompt_tokens": job.sequence.prompt_length} for job in jobs
                ],
            },
        )

    def find(self, name: str) -> Path | None:
        """The file of a trace."""
        path = self.folder / f"{name}.jsonl"
        return path if NAME.fullmatch(name) and path.is_file() else None

    def close(self) -> None:
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)
