"""Runs configurations beside plain decoding, in turns, so that a machine that warms up or slows down favours none.

A group is as many prompts as the batch is large, of one category; the last group of a category is filled up from its start.
For each repetition and group there is one decoding per configuration, plain decoding among them, and the order is rotated
from one to the next. A configuration's figures are those of its median decoding of each group, by time per token.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

from ..drafters import NoDrafter
from ..engine import Engine, Prompt, Result
from ..errors import LogitsError
from ..sampling import SamplingParams
from ..trace import Statistics, combine
from .compare import Difference, comparable, difference

PLAIN = "none"


@dataclass(frozen=True)
class Configuration:
    """What is measured. Plain decoding is the one with the drafter `none` and a draft of 0."""

    target: str
    drafter: str
    draft: int | str
    batch: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def plain(self) -> Configuration:
        """Plain decoding that this is compared with."""
        return Configuration(self.target, PLAIN, 0, self.batch)

    @property
    def is_plain(self) -> bool:
        return self.drafter == PLAIN

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"options": dict(self.options)}

    def __str__(self) -> str:
        return f"{self.target} {self.drafter} draft {self.draft} batch {self.batch}"


@dataclass(frozen=True)
class Group:
    """Prompts that are decoded together: their numbers, and their category."""

    numbers: tuple[int, ...]
    category: str


@dataclass(frozen=True)
class Run:
    """One decoding of one group. differences: for each prompt, where its text departs from plain decoding's, or None;
    None altogether where the settings do not fix the text.
    """

    configuration: Configuration
    group: Group
    repetition: int
    each: tuple[Statistics, ...]
    results: tuple[Result, ...]
    differences: tuple[Difference | None, ...] | None = None

    @property
    def statistics(self) -> Statistics:
        return combine(self.each)

    @property
    def seconds_per_token(self) -> float:
        figures = self.statistics
        return figures.total_seconds / figures.emitted if figures.emitted else 0.0


def make_groups(categories: Sequence[str], batch: int) -> list[Group]:
    """Groups of `batch` prompts of one category; the prompts go by their numbers."""
    members: dict[str, list[int]] = defaultdict(list)
    for number, category in enumerate(categories):
        members[category].append(number)
    groups = []
    for category, numbers in members.items():
        for start in range(0, len(numbers), batch):
            groups.append(Group(tuple(numbers[(start + i) % len(numbers)] for i in range(batch)), category))
    return groups


def configurations(
    target: str, drafters: Mapping[str, Mapping[str, Any]], drafts: Sequence[int | str], batch: int
) -> list[Configuration]:
    """Every drafter (with its options) at every draft length, for one target and batch size; without plain decoding."""
    return [Configuration(target, name, draft, batch, options) for name, options in drafters.items() for draft in drafts]


def schedule(chosen: Sequence[Configuration], categories: Sequence[str], repeat: int) -> list[tuple[Configuration, Group, int]]:
    """What `measure` yields for configurations of one target and batch size, in its order: what runs, which group, which time."""
    return [
        (configuration, group, repetition)
        for repetition in range(repeat)
        for group in make_groups(categories, chosen[0].batch)
        for configuration in (chosen[0].plain, *chosen)
    ]


def measure(
    engines: Mapping[Configuration, Engine],
    prompts: Sequence[tuple[Prompt, str]],
    params: SamplingParams,
    repeat: int = 1,
    trace: Callable[[list[Run]], None] = lambda _: None,
    known: Callable[[Group, int], list[Run] | None] = lambda *_: None,
) -> Iterator[Run]:
    """Every Run of these configurations, all of one target and one batch size. prompts: with their categories.

    trace: gets the Runs of one group and repetition, plain decoding's first, with their Results' rounds; the Runs that are
    yielded hold figures, tokens and text only. known: for a group and a repetition, its Runs where they were measured before.
    """
    first = next(iter(engines))
    plain = Engine(engines[first].target, NoDrafter(), 0, engines[first].accept)
    everything = {first.plain: plain, **engines}
    order = list(everything)
    groups = make_groups([category for _, category in prompts], first.batch)
    _warm_up(everything, prompts[0][0], params)
    for repetition in range(repeat):
        for place, group in enumerate(groups):
            if (before := known(group, repetition)) is not None:
                yield from map(_light, before)
                continue
            shift = (repetition + place) % len(order)
            runs = {}
            for configuration in order[shift:] + order[:shift]:
                results = everything[configuration].generate([prompts[i][0] for i in group.numbers], params)
                _refuse_errors(configuration, results)
                runs[configuration] = Run(configuration, group, repetition, tuple(r.stats for r in results), tuple(results))
            expected = runs[first.plain]
            turn = [_compared(everything[c], runs[c], expected, params, prompts) for c in order]
            trace(turn)
            yield from map(_light, turn)


def _warm_up(engines: Mapping[Configuration, Engine], prompt: Prompt, params: SamplingParams) -> None:
    """A few tokens with each configuration, not counted: the first passes of a process are slow."""
    few = SamplingParams(max_tokens=4, temperature=params.temperature, prediction=params.prediction)
    for engine in engines.values():
        engine.generate(prompt, few)


def _refuse_errors(configuration: Configuration, results: Iterable[Result]) -> None:
    for result in results:
        if result.error:
            raise LogitsError(f"{configuration}: {result.error}")


def _compared(engine: Engine, run: Run, expected: Run, params: SamplingParams, prompts: Sequence[tuple[Prompt, str]]) -> Run:
    if run is expected or not comparable(params, run.results[0].rule):
        return run
    found = tuple(
        difference(engine.target, engine.encode(prompts[number][0]), params, plain.tokens, result.tokens)
        for number, plain, result in zip(run.group.numbers, expected.results, run.results)
    )
    return replace(run, differences=found)


def _light(run: Run) -> Run:
    return replace(run, results=tuple(replace(result, rounds=()) for result in run.results))


# ---- summaries ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A configuration's figures over the groups that were measured with it and with plain decoding.

    ratio: tokens per second over those of our own plain decoding of the same groups. differing: of `compared` texts, those
    that depart from plain decoding's; unexplained: those of them that rounding does not explain.
    """

    configuration: Configuration
    statistics: Statistics
    plain: Statistics
    runs: int
    compared: int
    differing: int
    unexplained: int
    rule: str
    lossy: bool
    category: str | None = None

    @property
    def ratio(self) -> float | None:
        mine, plain = self.statistics.tokens_per_second, self.plain.tokens_per_second
        return mine / plain if mine and plain else None

    @property
    def drafted_nothing(self) -> bool:
        """Where something should have been: with the draft length ``auto`` it may be the decision."""
        return not self.configuration.is_plain and self.configuration.draft != "auto" and self.statistics.proposed == 0


def summarise(runs: Iterable[Run], by_category: bool = False) -> list[Row]:
    """One Row for each configuration, in the order of their first runs; with `by_category`, one for each category of it."""
    kept: dict[Configuration, dict[Group, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        kept[run.configuration][run.group].append(run)
    rows = []
    for configuration, groups in kept.items():
        beside = kept.get(configuration.plain, {})
        shared = [group for group in groups if group in beside]
        categories: list[str | None] = list(dict.fromkeys(g.category for g in shared)) if by_category else [None]
        for category in categories:
            chosen = [group for group in shared if category in (None, group.category)]
            if chosen:
                rows.append(_row(configuration, [groups[g] for g in chosen], [beside[g] for g in chosen], category))
    return rows


def _row(configuration: Configuration, mine: list[list[Run]], plain: list[list[Run]], category: str | None) -> Row:
    every = [run for runs in mine for run in runs]
    found = [d for run in every if run.differences is not None for d in run.differences]
    result = every[0].results[0]
    return Row(
        configuration,
        statistics=combine(median_run(runs).statistics for runs in mine),
        plain=combine(median_run(runs).statistics for runs in plain),
        runs=len(every),
        compared=len(found),
        differing=sum(d is not None for d in found),
        unexplained=sum(d is not None and not d.near_tie for d in found),
        rule=result.rule,
        lossy=result.lossy,
        category=category,
    )


def median_run(runs: list[Run]) -> Run:
    """The run with the median time per token; of two in the middle the slower one."""
    return sorted(runs, key=lambda run: run.seconds_per_token)[len(runs) // 2]
