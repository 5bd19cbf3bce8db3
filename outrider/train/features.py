"""Batches with the target's states: computed as they are needed, or kept in a file for small data."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Sequence

import torch
from torch import Tensor

from ..errors import LoadError
from ..targets.base import LayerKey
from .store import Sample
from .teacher import Teacher
from .trainee import Batch


class Features:
    """States of samples. With a cache they are computed once, and kept in bfloat16 in files beside the data.

    `states.bin` holds for each row the states side by side, `best.bin` the most likely token's id plus one, 0 for a row that was
    never computed. The folder's name says which states; one that has more than are needed serves as well.
    """

    def __init__(self, teacher: Teacher, samples: Sequence[Sample], layers: Sequence[LayerKey], cache: Path | None):
        self.teacher, self.samples = teacher, samples
        self.keys: list[LayerKey] = list(dict.fromkeys((*layers, "final")))
        self._held = self.keys
        self._starts = [0]
        for sample in samples:
            self._starts.append(self._starts[-1] + len(sample.tokens))
        self._states: Tensor | None = None
        if cache is not None:
            self._open(cache)

    @property
    def row_bytes(self) -> int:
        """What a token takes in the cache."""
        return 2 * len(self._held) * self.teacher.target.hidden_size + 4

    def _open(self, cache: Path) -> None:
        target = self.teacher.target
        what = f"{target.name} {target.dtype} {[len(s.tokens) for s in self.samples[:100]]}"
        name = f"features-{hashlib.blake2b(what.encode(), digest_size=6).hexdigest()}"
        for other in sorted(cache.glob(f"{name}-*")):
            held = [int(key) if key.isdigit() else key for key in other.name.removeprefix(f"{name}-").split(".")]
            if set(self.keys) <= set(held):
                self._held = held
        folder = cache / "-".join((name, ".".join(map(str, self._held))))
        rows, width = self._starts[-1], len(self._held) * target.hidden_size
        try:
            folder.mkdir(parents=True, exist_ok=True)
            states, best = folder / "states.bin", folder / "best.bin"
            there = best.stat().st_size // 4 if best.exists() else 0
            needed = (rows - there) * self.row_bytes
            if shutil.disk_usage(folder).free < needed:
                raise OSError(28, f"{needed / 2**30:.1f} GiB are needed")
            for path, size in ((states, 2 * width), (best, 4)):
                with open(path, "ab") as file:
                    file.truncate(max(rows * size, os.path.getsize(path)))
            self._states = torch.from_file(str(states), shared=True, size=rows * width, dtype=torch.bfloat16).view(rows, width)
            self._best = torch.from_file(str(best), shared=True, size=rows, dtype=torch.int32)
        except (OSError, RuntimeError) as error:
            raise LoadError(
                f"cannot keep the target's states in {folder}: {error}; --no-cache computes them anew each time"
            ) from error

    @property
    def is_cached(self) -> bool:
        return self._states is not None

    def look(self, number: int) -> tuple[dict[LayerKey, Tensor], Tensor]:
        """States and most likely tokens of one sample. In the file a token's number is one higher, so that 0 is none."""
        rows = slice(self._starts[number], self._starts[number + 1])
        if self._states is not None and bool((self._best[rows] > 0).all()):
            parts = dict(zip(self._held, self._states[rows].chunk(len(self._held), dim=-1)))
            device = self.teacher.target.device
            return {key: parts[key].to(device) for key in self.keys}, self._best[rows].long().to(device) - 1
        states, best = self.teacher.look(self.samples[number].tokens, self._held)
        if self._states is not None:
            self._states[rows] = torch.cat([states[key] for key in self._held], dim=-1).to("cpu", torch.bfloat16)
            self._best[rows] = (best + 1).to("cpu", torch.int32)  # last: it says that the states are there
            return self.look(number)  # as they are kept, so that a run that goes on later sees the same
        return states, best

    def batch(self, numbers: Sequence[int], with_prompts: bool = False) -> Batch:
        """The batch of these samples. with_prompts: what is guessed is the whole text, not the answers alone."""
        looked = [self.look(number) for number in numbers]
        chosen = [self.samples[number] for number in numbers]
        device = self.teacher.target.device
        tokens = torch.cat([torch.as_tensor(list(map(int, s.tokens))) for s in chosen]).to(device)
        hidden = {key: torch.cat([states[key] for states, _ in looked]).float() for key in self.keys}
        best = torch.cat([best for _, best in looked])
        prompts = tuple(0 if with_prompts else s.prompt for s in chosen)
        return Batch(tokens, tuple(len(s.tokens) for s in chosen), prompts, hidden, best)
