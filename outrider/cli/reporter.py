"""What `outrider bench` does with what it measured: writes it to a trace file, or to a report's folder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Mapping

from .session import say

if TYPE_CHECKING:
    from ..bench.folder import Folder
    from ..bench.runner import Configuration, Group, Run
    from ..engine import Engine
    from ..text import Tokenizer
    from ..trace import TraceWriter


class Tracer:
    """Writes the Rounds of each Run, with sequence numbers that go on through the whole measurement."""

    def __init__(self, trace: TraceWriter | None):
        self._tokenizer: Tokenizer | None = None
        self._trace = trace
        self._next = 0

    def begin(self, target: str, engines: Mapping[Configuration, Engine]) -> None:
        """These are measured next."""
        self._tokenizer = next(iter(engines.values())).target.tokenizer

    def keep(self, runs: list[Run]) -> None:
        """One group and repetition was measured."""
        if self._trace is None:
            return
        for result in (result for run in runs for result in run.results):
            for round in result.rounds:
                self._trace.write(replace(round, sequence=self._next), self._tokenizer)
            self._next += 1

    def find(self, group: Group, repetition: int) -> list[Run] | None:
        """What was measured before: nothing."""
        return None

    def end(self) -> None:
        """Everything of one target was measured."""

    def finish(self, interrupted: bool) -> None:
        """No more will come."""


class Reporter(Tracer):
    """Keeps Runs in a report's folder, finds those that are there, and makes the report. texts: the prompts, by number."""

    def __init__(self, folder: Folder, texts: Mapping[str, str]):
        super().__init__(None)
        self._folder = folder
        self._texts = texts

    def begin(self, target: str, engines: Mapping[Configuration, Engine]) -> None:
        super().begin(target, engines)
        self._target = target
        self._model = next(iter(engines.values())).target
        self._batch = next(iter(engines)).batch
        self._folder.note(models=self._folder.about["models"] | {target: self._model.describe()})

    def keep(self, runs: list[Run]) -> None:
        self._folder.keep(runs, self._tokenizer, self._texts)

    def find(self, group: Group, repetition: int) -> list[Run] | None:
        return self._folder.find(self._target, self._batch, group, repetition)

    def end(self) -> None:
        from ..bench.costs import roofline_of

        rooflines = self._folder.about["rooflines"]
        if self._target not in rooflines:
            found = roofline_of(self._folder, self._target, self._model)
            self._folder.note(rooflines=rooflines | {self._target: found})

    def finish(self, interrupted: bool) -> None:
        from ..bench.page import write_report

        if any(self._folder.turns()):
            self._folder.note(interrupted=interrupted)
            say(f"report: {write_report(self._folder)}")
