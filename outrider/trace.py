"""What happened in each round, figures computed from it, and its file format.

A Round is written once and never changed. Every figure that Outrider prints is a function of Rounds. A trace file is JSON
lines: a header (``{"outrider_trace": 2, ...}``), then one Round per line; `docs/trace.md` documents the fields.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Iterable, Sequence

from .accept import Test
from .errors import LoadError, OutriderError
from .files import to_json
from .text import Tokenizer, alone
from .tree import Budget

TRACE_VERSION = 2
READABLE = (1, 2)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target's unprocessed logits, and of the most likely alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Times:
    """Nanoseconds of one sequence's share of each phase: a pass over several sequences is divided evenly among them."""

    prefill: int = 0
    propose: int = 0
    forward: int = 0
    probabilities: int = 0
    accept: int = 0
    cut: int = 0
    commit: int = 0
    observe: int = 0

    @property
    def total(self) -> int:
        """All phases after the prefill."""
        return self.propose + self.forward + self.probabilities + self.accept + self.cut + self.commit + self.observe


class Clock:
    """Measures the phases of a round, one after the other."""

    def __init__(self) -> None:
        self._last = time.perf_counter_ns()
        self._laps: dict[str, int] = {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter_ns()
        self._laps[phase] = now - self._last
        self._last = now

    def share(self, among: int, prefill: int) -> Times:
        return Times(prefill=prefill, **{phase: ns // among for phase, ns in self._laps.items()})


@dataclass(frozen=True)
class Round:
    """One propose, forward, accept, cut, commit, observe of one sequence.

    sequence, number: which sequence, and its how many-eth round, from 0.
    context: tokens before the round, the anchor included.
    tokens, parents, score: the draft tree. p, q: probability of each node's token at its parent (anchor 1.0; q None where
        the token was chosen without chance).
    tests, path: what the accept rule tested and kept, before the cut. emitted: the new tokens, after it. p_next: the target's
        probability of the token that followed the path, which the cut may have left out; None in traces of version 1.
    pieces: the text that became final, in parts with whether a part was drafted; finish: why the sequence ended, if it did.
    seed: given, or drawn for the sequence. rows, sequences: rows and sequences of the whole pass.
    """

    sequence: int
    number: int
    context: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    score: tuple[float, ...] | None
    p: tuple[float, ...]
    q: tuple[float | None, ...]
    tests: tuple[Test, ...]
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    pieces: tuple[tuple[str, bool], ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish: str | None
    error: str | None
    rule: str
    lossy: bool
    seed: int
    drafter: str
    budget: Budget
    rows: int
    sequences: int
    times: Times
    p_next: float | None = None

    @property
    def proposed(self) -> int:
        """Drafted tokens, the anchor excluded."""
        return len(self.tokens) - 1

    @property
    def accepted(self) -> int:
        """Drafted tokens that were emitted."""
        return min(len(self.path) - 1, len(self.emitted))

    @property
    def own(self) -> str | None:
        """What the emitted token that was not drafted is: ``recovered`` after a refusal, ``bonus`` after a path that was kept to its
        end, ``plain`` in a round without a draft. None where the cut left only drafted tokens.
        """
        if len(self.emitted) <= self.accepted:
            return None
        if not self.proposed:
            return "plain"
        return "recovered" if self.path[-1] in self.parents[1:] else "bonus"

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True)
class Statistics:
    """Figures of some Rounds. Formulas: `acceptance_rate` = accepted / proposed; `acceptance_length` = emitted / passes,
    1.0 in plain decoding; `tokens_per_second` = emitted / seconds, the prefill not counted.
    """

    sequences: int
    passes: int
    """Passes of the target, counted per sequence."""
    rows: int
    """Rows of the target that these sequences used."""
    proposed: int
    accepted: int
    emitted: int
    reached_by_depth: tuple[int, ...]
    """Rounds in which a token of depth 1, 2, ... was drafted below a kept path."""
    accepted_by_depth: tuple[int, ...]
    """Rounds in which it was kept."""
    seconds: dict[str, float]
    """By phase."""
    whole_passes: float = 0.0
    """Passes of the target, where one that served several sequences is divided among them."""

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def acceptance_length(self) -> float | None:
        return self.emitted / self.passes if self.passes else None

    @property
    def conditional_rates(self) -> list[float]:
        """Share of rounds in which depth d was kept, of those in which depth d - 1 was kept and d was drafted."""
        return [kept / reached for kept, reached in zip(self.accepted_by_depth, self.reached_by_depth)]

    @property
    def total_seconds(self) -> float:
        """Seconds after the prefill."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "prefill")

    @property
    def tokens_per_second(self) -> float | None:
        return self.emitted / self.total_seconds if self.total_seconds else None

    @property
    def overhead(self) -> float | None:
        """Share of the time that was spent neither in the target's pass nor in the drafter."""
        if not self.total_seconds:
            return None
        return 1 - (self.seconds["forward"] + self.seconds["propose"]) / self.total_seconds

    def as_dict(self) -> dict[str, Any]:
        """All figures, derived ones included, for JSON."""
        names = ("acceptance_rate", "acceptance_length", "conditional_rates", "total_seconds", "tokens_per_second", "overhead")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}

    def check(self) -> None:
        """Raise OutriderError if these figures are impossible; a wrong counter must not become a published number."""
        if self.accepted > self.proposed:
            raise OutriderError(f"impossible figures: {self.accepted} accepted of {self.proposed} proposed tokens")
        if self.emitted > self.accepted + self.passes:
            raise OutriderError(f"impossible figures: {self.emitted} emitted, {self.accepted} accepted in {self.passes} passes")


def statistics(rounds: Iterable[Round]) -> Statistics:
    """Figures of these rounds, checked against what is possible."""
    rounds = list(rounds)
    reached: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    for r in rounds:
        if len(r.path) > len(r.tokens) or len(r.emitted) > len(r.path):
            raise OutriderError(
                f"impossible figures: round {r.number} of sequence {r.sequence} proposed {r.proposed}, kept {len(r.path) - 1} "
                f"and emitted {len(r.emitted)} tokens"
            )
        accepted = r.accepted
        for depth in range(1, accepted + 1):
            reached[depth] += 1
            kept[depth] += 1
        refused_below = r.path[accepted] in r.parents[1:] and len(r.emitted) > accepted
        if refused_below:
            reached[accepted + 1] += 1
    seconds = {f.name: sum(getattr(r.times, f.name) for r in rounds) / 1e9 for f in fields(Times)}
    figures = Statistics(
        sequences=len({r.sequence for r in rounds}),
        passes=len(rounds),
        rows=sum(len(r.tokens) for r in rounds),
        proposed=sum(r.proposed for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        emitted=sum(len(r.emitted) for r in rounds),
        reached_by_depth=tuple(reached[d] for d in range(1, max(reached, default=0) + 1)),
        accepted_by_depth=tuple(kept[d] for d in range(1, max(reached, default=0) + 1)),
        seconds=seconds,
        whole_passes=sum(1 / r.sequences for r in rounds),
    )
    figures.check()
    return figures


def combine(parts: Iterable[Statistics]) -> Statistics:
    """Figures of several decodings together, as if all their Rounds had been given to `statistics`."""
    parts = list(parts)

    def by_depth(name: str) -> tuple[int, ...]:
        return tuple(map(sum, zip_longest(*(getattr(part, name) for part in parts), fillvalue=0)))

    figures = Statistics(
        **{
            name: sum(getattr(part, name) for part in parts)
            for name in ("sequences", "passes", "rows", "proposed", "accepted", "emitted", "whole_passes")
        },
        reached_by_depth=by_depth("reached_by_depth"),
        accepted_by_depth=by_depth("accepted_by_depth"),
        seconds={f.name: sum(part.seconds[f.name] for part in parts) for f in fields(Times)},
    )
    figures.check()
    return figures


class TraceWriter:
    """Writes a trace file: the header at once, each Round as it comes. A context manager.

    With a round goes the text of each token that its sequence had not seen before, where a tokenizer is given.
    """

    def __init__(self, path: str | Path, header: dict[str, Any]):
        try:
            self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed in __exit__)
        except OSError as error:
            raise LoadError(f"cannot write the trace {path}: {error.strerror}") from error
        self._seen: dict[int, set[int]] = defaultdict(set)
        self._line({"outrider_trace": TRACE_VERSION, **header})

    def write(self, round: Round, tokenizer: Tokenizer | None = None) -> None:
        line = asdict(round)
        if tokenizer is not None:
            seen = self._seen[round.sequence]
            likely = (token for entry in round.logprobs or () for token, _ in entry.top)
            new = sorted({*round.tokens, *round.emitted, *likely} - seen)
            seen.update(new)
            line["texts"] = {token: alone(tokenizer, token) for token in new}
        self._line(line)

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(to_json(value) + "\n")
        self._file.flush()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_trace(path: str | Path) -> tuple[dict[str, Any], list[Round]]:
    """Header and Rounds of a trace file. A last line cut short by an interruption is left out."""
    try:
        lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n")  # not splitlines: texts may hold U+2028 or U+0085
    except OSError as error:
        raise LoadError(f"cannot read the trace {path}: {error.strerror}") from error
    try:
        header = json.loads(lines[0])
        version = header.pop("outrider_trace")
    except (IndexError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise LoadError(f"{path} is not an Outrider trace: its first line is not a trace header") from error
    if version not in READABLE:
        raise LoadError(f"{path} is a trace of version {version}; this Outrider reads versions {READABLE[0]} to {READABLE[-1]}")
    rounds = []
    for number, line in enumerate(lines[1:], 2):
        try:
            rounds.append(_round(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):
                break
            raise LoadError(f"{path}, line {number}: not a Round ({error})") from error
    return header, rounds


def _round(value: dict[str, Any]) -> Round:
    def frozen(x: Any) -> Any:
        return tuple(map(frozen, x)) if isinstance(x, list) else x

    def logprob(x: float | None) -> float:
        return -math.inf if x is None else x

    value = {f.name: frozen(value[f.name]) for f in fields(Round) if f.name in value}
    value["tests"] = tuple(Test(**test) for test in value["tests"])
    value["budget"] = Budget(**value["budget"])
    value["times"] = Times(**value["times"])
    if value["logprobs"] is not None:
        value["logprobs"] = tuple(
            TokenLogprob(entry["token"], logprob(entry["logprob"]), tuple((t, logprob(x)) for t, x in entry["top"]))
            for entry in value["logprobs"]
        )
    return Round(**value)


def drafted_nothing(rounds: Sequence[Round]) -> bool:
    """Whether rounds of a real drafter proposed no token at all: their figures say nothing about it."""
    return bool(rounds) and rounds[0].drafter != "none" and not any(r.proposed for r in rounds)
