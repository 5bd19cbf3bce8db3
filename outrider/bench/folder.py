"""A report's folder: what is measured, the traces of what has been measured so far, and the report made of them.

    about.json     the question (what is measured, of what, on what), the models, the command, the rooflines
    traces/        one trace for each group of prompts and repetition: every configuration's rounds, plain decoding's among them
    report.json, report.md, report.html

A trace is there whole or not at all, so an interrupted measurement goes on where it stopped. Everything in the report is computed
from the traces, except the rooflines, which are measurements of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from .. import machine
from ..engine import Result
from ..errors import LoadError, ParameterError
from ..files import to_json, write_json
from ..sampling import SamplingParams
from ..text import Tokenizer
from ..trace import Round, TraceWriter, read_trace, statistics
from .compare import Difference
from .prompts import Prompt
from .runner import Configuration, Group, Run, make_groups

REPORT_VERSION = 1


def question(plans: Sequence[Configuration], prompts: Sequence[Prompt], params: SamplingParams, **more: Any) -> dict[str, Any]:
    """What decides the figures: two measurements with the same question can be continued, or put beside each other."""
    return {
        "configurations": [configuration.as_dict() for configuration in plans],
        "prompts": [{"sha256": hashlib.sha256(p.text.encode()).hexdigest(), "category": p.category} for p in prompts],
        "sampling": asdict(params),
        **more,
        "versions": machine.versions(),
        "machine": machine.machine(),
    }


@dataclass(frozen=True)
class Folder:
    """A folder with measurements. about: what ``about.json`` says."""

    path: Path
    about: dict[str, Any]

    @classmethod
    def make(cls, path: str | Path, asked: dict[str, Any]) -> Folder:
        """A new folder, or an old one that asked the same, to go on in. Raises ParameterError for one that asked something else."""
        place = Path(path)
        asked = json.loads(to_json(asked))
        if (place / "about.json").exists():
            there = cls.open(place)
            _refuse_another(place, there.about["question"], asked)
            return there
        try:
            if place.exists() and (not place.is_dir() or any(place.iterdir())):
                raise ParameterError(f"{place} is there already and is no report; name a new folder")
            (place / "traces").mkdir(parents=True, exist_ok=True)
            folder = cls(
                place,
                {"outrider_report": REPORT_VERSION, **machine.manifest(), "question": asked, "models": {}, "rooflines": {}},
            )
            folder.note()
        except OSError as error:
            raise LoadError(f"cannot write a report to {place}: {error.strerror}") from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> Folder:
        """A folder that is there. Raises LoadError for anything else."""
        try:
            about = json.loads((Path(path) / "about.json").read_text(encoding="utf-8"))
            version = about["outrider_report"]
        except OSError as error:
            raise LoadError(f"{path} is no report: cannot read about.json ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{path} is no report: about.json is not one's") from error
        if version != REPORT_VERSION:
            raise LoadError(f"{path} is a report of version {version}; this Outrider reads version {REPORT_VERSION}")
        return cls(Path(path), about)

    def note(self, **more: Any) -> None:
        """Write down more about the measurement."""
        self.about.update(more)
        write_json(self.path / "about.json", self.about)

    # ---- traces ---------------------------------------------------------------------------------------------------------

    def _trace(self, target: str, batch: int, group: Group, repetition: int) -> Path:
        asked = self.about["question"]
        targets = list(dict.fromkeys(c["target"] for c in asked["configurations"]))
        groups = make_groups([p["category"] for p in asked["prompts"]], batch)
        name = f"t{targets.index(target)}-b{batch:03}-r{repetition:03}-g{groups.index(group):04}.jsonl"
        return self.path / "traces" / name

    def keep(self, runs: Sequence[Run], tokenizer: Tokenizer | None, texts: Mapping[str, str]) -> None:
        """Write the trace of one group and repetition, from Runs whose Results have their rounds. texts: the prompts, by number."""
        first = runs[0]
        path = self._trace(first.configuration.target, first.configuration.batch, first.group, first.repetition)
        part = path.with_suffix(".part")
        header = {
            **machine.manifest(),
            "sampling": self.about["question"]["sampling"],
            "prompts": {str(number): texts[str(number)] for number in first.group.numbers},
            "group": asdict(first.group),
            "repetition": first.repetition,
            "sequences": [
                {
                    **run.configuration.as_dict(),
                    "prompt": number,
                    "compared": run.differences is not None,
                    "difference": asdict(where) if (where := run.differences and run.differences[i]) else None,
                }
                for run in runs
                for i, number in enumerate(run.group.numbers)
            ],
        }
        with TraceWriter(part, header) as trace:
            for sequence, result in enumerate(result for run in runs for result in run.results):
                for round in result.rounds:
                    trace.write(replace(round, sequence=sequence), tokenizer)
        os.replace(part, path)

    def find(self, target: str, batch: int, group: Group, repetition: int) -> list[Run] | None:
        """The Runs of one group and repetition, if they have been measured."""
        path = self._trace(target, batch, group, repetition)
        return read_runs(path) if path.exists() else None

    def turns(self) -> Iterator[list[Run]]:
        """The Runs of every trace, with their rounds, in the order of repetitions and prompts."""
        yield from map(read_runs, sorted((self.path / "traces").glob("*.jsonl")))


def _refuse_another(place: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    differing = [name for name in {**there, **asked} if there.get(name) != asked.get(name)]
    if differing:
        raise ParameterError(
            f"{place} holds a report that differs in {', '.join(differing)}; ask the same as there to go on, or name a new folder"
        )


def read_runs(path: Path) -> list[Run]:
    """The Runs of one trace of a report."""
    header, rounds = read_trace(path)
    try:
        group = Group(tuple(header["group"]["numbers"]), header["group"]["category"])
        own: list[list[Round]] = [[] for _ in header["sequences"]]
        for round in rounds:
            own[round.sequence].append(round)
        results = [_result(mine) for mine in own]
        runs = []
        for start in range(0, len(results), len(group.numbers)):
            entries = header["sequences"][start : start + len(group.numbers)]
            configuration = Configuration(
                **{name: entries[0][name] for name in ("target", "drafter", "draft", "batch", "options")}
            )
            mine = tuple(results[start : start + len(group.numbers)])
            differences = tuple(_difference(e["difference"]) for e in entries) if entries[0]["compared"] else None
            runs.append(Run(configuration, group, header["repetition"], tuple(r.stats for r in mine), mine, differences))
    except (KeyError, TypeError, IndexError) as error:
        raise LoadError(f"{path} is not the trace of a report ({error!r})") from error
    return runs


def _difference(value: dict[str, Any] | None) -> Difference | None:
    return None if value is None else Difference(**value | {"gap": math.inf if value["gap"] is None else value["gap"]})


def _result(rounds: Sequence[Round]) -> Result:
    """What came of a sequence, as far as its rounds say."""
    first, last = rounds[0], rounds[-1]
    return Result(
        text="".join(r.text for r in rounds),
        tokens=tuple(token for r in rounds for token in r.emitted),
        finish_reason=last.finish or "cancelled",
        logprobs=None,
        stats=statistics(rounds),
        rounds=tuple(rounds),
        prompt_tokens=first.context,
        seed=first.seed,
        rule=first.rule,
        lossy=first.lossy,
        error=last.error,
    )
