"""What the learner works with: a pair of models, settings, and what was measured with them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable

from ..bench.compare import Difference, difference
from ..bench.runner import configurations, measure, summarise
from ..check import Costs
from ..check import measure as measure_costs
from ..demo import REWRITE
from ..drafters import Drafter
from ..engine import Engine, Result
from ..errors import ParameterError
from ..sampling import SamplingParams
from ..targets.base import Target
from ..trace import Round
from .words import Laws

CONTEXT, ROWS = 64, (1, 2, 4, 8)
"""What loading a pair measures: passes over so many rows, after so many tokens."""


@dataclass(frozen=True)
class Settings:
    """How the next run decodes."""

    drafter: str
    options: tuple[tuple[str, str], ...] = ()
    draft: int = 4
    temperature: float = 0.0
    seed: int | None = None
    tokens: int = 64

    def params(self) -> SamplingParams:
        return SamplingParams.make(max_tokens=self.tokens, temperature=self.temperature, seed=self.seed)

    @property
    def name(self) -> str:
        """The drafter with its options."""
        return " ".join([Path(self.drafter).name, *(f"{name}={value}" for name, value in self.options)])


@dataclass(frozen=True)
class Taken:
    """A run that was made: with which settings, of which prompt, and what came of it."""

    settings: Settings
    prompt: str
    result: Result


@dataclass(frozen=True)
class Speed:
    """What a sweep found for one draft length."""

    tokens_per_second: float
    ratio: float
    acceptance_length: float


@dataclass
class Desk:
    """open_target, open_drafter: load a model by name. as_prompt: how the target takes a text. pair: the names of both, and the
    drafter's options.
    """

    pair: tuple[str, str, tuple[tuple[str, str], ...]]
    open_target: Callable[[str], Target]
    open_drafter: Callable[[str, Target, dict[str, str]], Drafter]
    as_prompt: Callable[[Target, str], Any]
    settings: Settings
    target: Target | None = None
    costs: Costs | None = None
    runs: list[Taken] = field(default_factory=list)
    sweep: dict[int, Speed] = field(default_factory=dict)
    plain_speed: float = 0.0
    shown: tuple[Taken, Round] | None = None
    """The round whose tree was last looked at."""
    laws: Laws = field(default_factory=Laws)
    enumerated: list[str] = field(default_factory=list)
    """Rules that were followed through every outcome with these laws."""
    _drafters: dict[tuple[str, tuple[tuple[str, str], ...]], Drafter] = field(default_factory=dict)

    def load(self) -> None:
        """Load the pair, if it is not there."""
        if self.target is None:
            self.target = self.open_target(self.pair[0])
        self.drafter(self.settings)

    def need(self) -> Target:
        """The target. Raises ParameterError before it is loaded."""
        if self.target is None:
            raise ParameterError("there are no models yet: `load` them")
        return self.target

    def drafter(self, settings: Settings) -> Drafter:
        """The drafter of these settings, loaded once."""
        key = settings.drafter, settings.options
        if key not in self._drafters:
            self._drafters[key] = self.open_drafter(settings.drafter, self.need(), dict(settings.options))
        return self._drafters[key]

    def engine(self, settings: Settings) -> Engine:
        plain = settings.drafter == "none"
        return Engine(self.need(), self.drafter(settings), 0 if plain else settings.draft)

    def measure_costs(self) -> Costs:
        """What passes and drafts cost here."""
        self.costs = measure_costs(self.need(), self.drafter(self.settings), CONTEXT, ROWS, repeats=3)
        return self.costs

    def run(self, prompt: str, show: Callable[[Round], None] = lambda _: None) -> Taken:
        """Decode a prompt with the settings as they are; each Round goes to `show` as it comes."""
        engine = self.engine(self.settings)
        (sequence,) = engine.sequences([self.as_prompt(engine.target, prompt)], self.settings.params())
        rounds = []
        with closing(engine.decode([sequence])) as decoding:  # type: ignore[type-var]
            for round in decoding:
                rounds.append(round)
                show(round)
        self.runs.append(Taken(self.settings, prompt, engine.result(sequence, rounds)))
        return self.runs[-1]

    def run_sweep(self, lengths: list[int], tell: Callable[[str], None] = lambda _: None) -> dict[int, Speed]:
        """Measure draft lengths beside plain decoding, in turns, as `outrider bench` does. Joins what was measured before."""
        target, settings = self.need(), self.settings
        if settings.drafter == "none":
            raise ParameterError("plain decoding drafts nothing: choose a drafter first, as `drafter suffix`")
        plan = configurations(target.name, {settings.drafter: {}}, lengths, 1)
        engines = {c: self.engine(replace(settings, draft=int(c.draft))) for c in plan}
        runs = []
        for run in measure(engines, [(self.as_prompt(target, REWRITE), "")], settings.params(), repeat=2):
            runs.append(run)
            tell(str(run.configuration))
        for row in summarise(runs):
            speed = row.statistics.tokens_per_second or 0.0
            if row.configuration.is_plain:
                self.plain_speed = speed
            else:
                self.sweep[int(row.configuration.draft)] = Speed(
                    speed, row.ratio or 0.0, row.statistics.acceptance_length or 0.0
                )
        return self.sweep

    def change(self, **values: Any) -> None:
        """Change settings. A sweep is of one drafter, temperature and length of text; after a change of these it is forgotten."""
        before, self.settings = self.settings, replace(self.settings, **values)
        if replace(before, draft=0, seed=None) != replace(self.settings, draft=0, seed=None):
            self.sweep = {}

    def parted(self, one: Taken, other: Taken) -> Difference | None:
        """Where two runs of one prompt part, and whether rounding explains it."""
        target = self.need()
        ids = Engine(target, self.drafter(one.settings)).encode(self.as_prompt(target, one.prompt))
        return difference(target, ids, one.settings.params(), one.result.tokens, other.result.tokens)

    def clear(self) -> None:
        """Forget what was measured, keep the models."""
        self.runs, self.sweep, self.shown, self.enumerated = [], {}, None, []

    def close(self) -> None:
        for drafter in self._drafters.values():
            drafter.close()
