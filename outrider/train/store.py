"""Training text on disk: token ids, and from where on the target said them itself.

A folder with `data.json` (what the text was made from), `tokens.bin` (all ids, one after the other, 16 bits each where the vocabulary
allows, else 32) and `samples.jsonl` (for each sample its number of tokens, that of its prompt, its key). A sample is written tokens first, so
whatever interrupts the writing, the samples named in `samples.jsonl` are whole; what follows them is cut off when it is opened again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Sequence

import numpy as np

from ..errors import LoadError
from ..files import sole_writer, to_json, write_json

VERSION = 1


@dataclass(frozen=True)
class Sample:
    """tokens: prompt and answer. prompt: how many are the prompt's; the loss is taken on the others alone."""

    tokens: Sequence[int]
    prompt: int


@dataclass(frozen=True)
class Entry:
    """A line of `samples.jsonl`. key: of the prompt, for telling what is done. n: 0 for one that was dropped, and why."""

    n: int
    prompt: int = 0
    key: str = ""
    source: str = ""
    dropped: str | None = None
    start: int = field(default=0, compare=False)

    def line(self) -> str:
        named = {"n": self.n, "prompt": self.prompt, "key": self.key, "source": self.source, "dropped": self.dropped}
        return to_json({name: value for name, value in named.items() if value not in (None, "")})


class Store:
    """The samples of a folder."""

    def __init__(self, folder: str | Path):
        """Opens an existing one. Raises LoadError when it is none, or damaged."""
        self.folder = Path(folder).expanduser()
        try:
            self.facts: dict[str, Any] = json.loads((self.folder / "data.json").read_text(encoding="utf-8"))
            lines = (self.folder / "samples.jsonl").read_bytes().split(b"\n")
        except OSError as error:
            raise LoadError(f"{self.folder} has no training data ({error.strerror}): make some with `outrider data`") from error
        except ValueError as error:
            raise LoadError(f"{self.folder / 'data.json'} is damaged: {error}") from error
        if self.facts.get("version") != VERSION:
            raise LoadError(f"{self.folder}: version {self.facts.get('version')!r} of training data is not known here")
        self.dtype = np.dtype(self.facts["dtype"])
        self.entries: list[Entry] = []
        self.total = 0
        self._index_bytes = 0
        held = self._held()
        for number, line in enumerate(lines[:-1]):  # what follows the last newline was never finished
            entry = self._entry(line, number)
            if entry.start + entry.n > held:
                raise LoadError(f"{self.folder / 'tokens.bin'} ends within sample {number}: it is damaged")
            self.entries.append(entry)
            self.total += entry.n
            self._index_bytes += len(line) + 1

    @classmethod
    def create(cls, folder: str | Path, vocab_size: int, facts: dict[str, Any]) -> Store:
        """A new and empty one. facts: what the text will be made from."""
        place = Path(folder).expanduser()
        try:
            place.mkdir(parents=True, exist_ok=True)
            dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
            (place / "tokens.bin").touch()
            (place / "samples.jsonl").touch()
            write_json(place / "data.json", {"version": VERSION, "dtype": dtype, "vocab_size": vocab_size, **facts})
        except OSError as error:
            raise LoadError(f"cannot write training data to {place}: {error.strerror}") from error
        return cls(place)

    def _held(self) -> int:
        path = self.folder / "tokens.bin"
        return path.stat().st_size // self.dtype.itemsize if path.exists() else 0

    def _entry(self, line: bytes, number: int) -> Entry:
        try:
            entry = Entry(**json.loads(line), start=self.total)
            fits = 0 <= entry.prompt <= entry.n
        except (ValueError, TypeError, KeyError) as error:
            raise LoadError(f"{self.folder / 'samples.jsonl'}, line {number + 1} is damaged: {error}") from error
        if not fits:
            raise LoadError(
                f"{self.folder / 'samples.jsonl'}, line {number + 1}: a prompt of {entry.prompt} in {entry.n} tokens"
            )
        return entry

    def samples(self) -> list[Sample]:
        """All samples, in the order in which they were made. Their tokens are read from the file when they are used."""
        if self.total == 0:
            return []
        tokens: Any = np.memmap(self.folder / "tokens.bin", dtype=self.dtype, mode="r", shape=(self.total,))
        return [Sample(tokens[e.start : e.start + e.n], e.prompt) for e in self.entries if e.n]

    @property
    def keys(self) -> set[str]:
        """Of every prompt that was seen to, dropped ones too."""
        return {entry.key for entry in self.entries}

    def append(self) -> Writer:
        """For adding samples, one process at a time. What an interrupted writer left behind is cut off. Raises LoadError."""
        return Writer(self)


class Writer:
    """Adds samples to a store, each whole or not at all."""

    def __init__(self, store: Store):
        self._lock = sole_writer(store.folder)
        self._store = store
        if len(Store(store.folder).entries) != len(store.entries):
            self._lock.release()
            raise LoadError(f"{store.folder}: another process has added to it; call it again to go on from there")
        self._tokens = _open(store.folder / "tokens.bin", store.total * store.dtype.itemsize)
        self._index = _open(store.folder / "samples.jsonl", store._index_bytes)

    def add(self, sample: Sample | None, key: str, source: str, dropped: str | None = None) -> None:
        """sample: None for one that was dropped. Raises LoadError when it cannot be written; what was added before is safe."""
        store = self._store
        tokens = [] if sample is None else sample.tokens
        entry = Entry(len(tokens), 0 if sample is None else sample.prompt, key, source, dropped, store.total)
        line = entry.line().encode() + b"\n"
        try:
            self._tokens.write(np.asarray(tokens, dtype=store.dtype).tobytes())
            self._index.write(line)
        except OSError as error:
            raise LoadError(
                f"cannot write to {store.folder}: {error.strerror}; the {len(store.entries)} samples before are safe, call it again to go on"
            ) from error
        store.entries.append(entry)
        store.total += entry.n
        store._index_bytes += len(line)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens, self._index):
            file.close()
        self._lock.release()


def _open(path: Path, length: int) -> IO[bytes]:
    """For unbuffered writing from `length` bytes on."""
    try:
        file = open(path, "r+b", buffering=0)  # noqa: SIM115 (open as long as the writer)
        file.truncate(length)
        file.seek(0, os.SEEK_END)
    except OSError as error:
        raise LoadError(f"cannot write to {path}: {error.strerror}") from error
    return file
