"""The calibrator against fixed settings without a clock: real texts, real guesses, measured costs.

    python benchmarks/auto_replay.py TEXTS.json --rows 1:13.7,2:13.0,4:13.5,6:13.4,8:14.3,16:18.8 [--step 4.5] [--feed 0.3] --name NAME

TEXTS.json is what `auto_texts.py` writes: prompts with the text that the target says, and for each of its tokens whether a draft model
would have said it too and how sure it was. `--rows`: milliseconds of a round by rows of the target's pass; `--step`: of a step of the draft
model; `--feed`: of each token that it reads when it is first asked. Every setting decodes the same texts; a round takes what its rows and
drafts cost (for `auto` with noise, as it would measure it, but the noise does not count), and for `auto` the time to decide, as `auto.py`
measures it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Iterator

import numpy as np
from common import save

from outrider.calibrate import Calibrator
from outrider.decode import Fixed, Pace
from outrider.drafters import Drafter, State
from outrider.drafters.auto import AutoDrafter
from outrider.drafters.base import Ask
from outrider.drafters.lookup import LookupDrafter, LookupOptions
from outrider.drafters.suffix import SuffixDrafter, SuffixOptions
from outrider.sampling import Sampler, SamplingParams
from outrider.trace import Round, Times
from outrider.tree import DraftTree

FREE = {"suffix": 0.1, "lookup": 0.07}
"""Milliseconds of a draft that is looked up."""
NOISE = 0.04
READ = 16
"""So many tokens are read in the first step of a draft."""


@dataclass(eq=False)
class Text:
    """One prompt and what the target says to it, as a sequence that is being decoded."""

    category: str
    prompt: list[int]
    answer: list[int]
    hits: list[bool]
    scores: list[float]
    drafter: Drafter | None = None
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    seen: int = 0
    """Tokens that the draft model has read."""

    def start(self, drafter: Drafter, vocabulary: int) -> Text:
        """A sequence of its own, of which nothing is known yet."""
        new: Any = replace(self, drafter=drafter, tokens=list(self.prompt))
        new.sampler = Sampler(SamplingParams(max_tokens=len(self.answer)), self.prompt, vocabulary)
        new.state = drafter.open(new.sampler)
        return new

    @property
    def room(self) -> int:
        return len(self.prompt) + len(self.answer) - len(self.tokens)

    @property
    def place(self) -> int:
        return len(self.tokens) - len(self.prompt)

    def kept(self, tree: DraftTree) -> tuple[int, ...]:
        """The path of the tree that the text follows."""
        path = [0]
        for token in self.answer[self.place : -1]:
            node = next((child for child in tree.children[path[-1]] if tree.tokens[child] == token), None)
            if node is None:
                break
            path.append(node)
        return tuple(path)


class Known(Drafter):
    """A draft model whose guesses are known: chains that are right where it was, with the scores that it gave."""

    name = "model"

    def __init__(self, least: float, texts: dict[int, Text]):
        super().__init__()
        self.least = least
        self.texts = texts
        self.steps = self.missed = 0
        """Of the last draft: steps that it took, and tokens that had to be read first."""

    def open(self, sampler: Sampler) -> State:
        return State(sampler)

    def propose(self, work: Any) -> list[DraftTree]:
        return [self._draft(self.texts[id(ask.tokens)], ask) for ask in work]

    def _draft(self, text: Text, ask: Ask) -> DraftTree:
        at, budget = text.place, ask.budget
        self.missed = max(len(ask.tokens) - text.seen - READ, 0)
        text.seen = len(ask.tokens)
        drafts: list[int] = []
        scores: list[float] = []
        likely = 1.0
        least = budget.least(None, min(self.least, 0.5))
        for k in range(min(budget.depth, budget.nodes, len(text.answer) - at)):
            likely *= text.scores[at + k]
            if likely < least:
                break
            drafts.append(text.answer[at + k] if text.hits[at + k] else -1)
            scores.append(text.scores[at + k])
            if likely < budget.step:
                break
        self.steps = len(drafts) + (likely < least)
        return DraftTree.chain(ask.tokens[-1], drafts, score=scores)


class Replay:
    """Decodes texts under a pace, with a clock of its own."""

    def __init__(self, texts: list[Text], rows: dict[int, float], step: float, feed: float, vocabulary: int, seed: int = 0):
        self.texts, self.step, self.feed, self.vocabulary = texts, step, feed, vocabulary
        self.rows = rows
        self.random = random.Random(seed)
        self.now = 0.0
        self.by_tokens: dict[int, Text] = {}

    def clock(self) -> int:
        return round(self.now * 1e6)

    def cost(self, rows: int) -> float:
        """Milliseconds."""
        known = sorted(self.rows)
        slope = (self.rows[known[-1]] - self.rows[known[-2]]) / (known[-1] - known[-2])
        beyond = max(rows - known[-1], 0) * slope
        return float(np.interp(rows, known, [self.rows[n] for n in known])) + beyond

    def drafter(self, name: str, tree: bool = False) -> Drafter:
        if name == "suffix":
            made: Any = SuffixDrafter(SuffixOptions(shape="tree" if tree else "chain"))
        elif name == "lookup":
            made = LookupDrafter(LookupOptions())
        else:
            made = Known(self.step / self.cost(1), self.by_tokens)
        original = made.propose

        def propose(work: Any) -> list[DraftTree]:
            trees = original(work)
            self.now += FREE[name] if name in FREE else self.step * max(made.steps, 1) + self.feed * made.missed
            return trees

        made.propose = propose
        return made

    def decode(self, text: Text, drafter: Drafter, pace: Pace, noise: float = NOISE) -> dict[str, Any]:
        """Milliseconds for one text, and its rounds as (drafter, drafted, kept)."""
        s: Any = text.start(drafter, self.vocabulary)
        self.by_tokens.clear()
        self.by_tokens[id(s.tokens)] = s
        began, rounds = self.now, []
        while s.room > 0:
            (budget,) = pace.budgets([s])
            tree, started = DraftTree.chain(s.tokens[-1]), self.now
            depth = min(budget.depth, budget.nodes, s.room - 1)
            if depth > 0:
                (tree,) = pace.propose(drafter, [s], [Ask(s.state, s.tokens, replace(budget, depth=depth))])
            proposed = self.now - started
            seconds = self.cost(len(tree))
            self.now += seconds
            path = s.kept(tree)
            new = s.answer[s.place : s.place + len(path)]
            measured = seconds * max(1 + self.random.gauss(0, noise), 0.5)
            pace.learn(
                [round_of(s, tree, budget, path, new, Times(propose=round(proposed * 1e6), forward=round(measured * 1e6)))]
            )
            s.tokens += new
            s.sampler.commit(new)
            s.rounds += 1
            rounds.append((tree.drafter or drafter.name, len(tree) - 1, len(path) - 1))
        return {"ms": self.now - began, "tokens": len(s.answer), "rounds": rounds}

    def calibrator(self, names: list[str]) -> tuple[Drafter, Calibrator]:
        """`auto`, after the passes that it times at the start."""
        parts = [self.drafter(name, tree=True) for name in names]
        drafter = AutoDrafter(parts)
        made = Calibrator(drafter, clock=self.clock)
        for _ in range(3):
            for n in (1, 2, 3, 4, 6, 8, 12, 16):
                made._band(200).add(n, self.cost(n) / 1000 * max(1 + self.random.gauss(0, NOISE), 0.5))
        return drafter, made


def round_of(s: Any, tree: DraftTree, budget: Any, path: tuple[int, ...], new: list[int], times: Times) -> Round:
    empty: dict[str, Any] = {"tests": (), "pieces": (), "logprobs": None, "finish": None, "error": None}
    same: dict[str, Any] = {"rule": "traversal", "lossy": False, "seed": 0, "drafter": tree.drafter or "", "sequences": 1}
    n = len(tree)
    return Round(
        sequence=0, number=s.rounds + 1, context=len(s.tokens), tokens=tree.tokens, parents=tree.parents, score=tree.score,
        p=(1.0,) * n, q=(None,) * n, path=path, emitted=tuple(new), budget=budget, rows=n, times=times, **empty, **same,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts")
    parser.add_argument("--rows", required=True, help="milliseconds of a round by rows: 1:13.7,2:13.0,...")
    parser.add_argument("--step", type=float, default=0.0, help="milliseconds of a step of the draft model; 0: there is none")
    parser.add_argument("--feed", type=float, default=0.0, help="milliseconds of a token that the draft model reads first")
    parser.add_argument("--fixed", default="suffix:2,suffix:4,suffix:8,suffix:16,lookup:4,lookup:8")
    parser.add_argument("--parts", default="suffix")
    parser.add_argument("--deciding", type=float, default=0.12, help="milliseconds that a round of auto takes to decide")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--times", type=int, default=1, help="how often auto sees the texts; the last time counts")
    parser.add_argument("--name", required=True)
    arguments = parser.parse_args()
    rows = {int(n): float(ms) for n, ms in (part.split(":") for part in arguments.rows.split(","))}
    given = json.loads(Path(arguments.texts).read_text())
    texts = [Text(**one) for one in given["texts"]]
    totals: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for setting, results in decoded(arguments, texts, rows, given["vocabulary"]):
        for text, found in results:
            total = totals[text.category][setting]
            total[0] += found["tokens"]
            total[1] += found["ms"] + arguments.deciding * len(found["rounds"]) * (setting == "auto")
    report(arguments, totals, rows)


def decoded(arguments: argparse.Namespace, texts: list[Text], rows: dict[int, float], vocabulary: int) -> Iterator[Any]:
    """Every setting with its results."""
    for setting in ["none:0", *arguments.fixed.split(",")]:
        name, _, length = setting.partition(":")
        replay = Replay(texts, rows, arguments.step, arguments.feed, vocabulary)
        drafter = replay.drafter("suffix" if name == "none" else name)
        yield setting, [(text, replay.decode(text, drafter, Fixed(int(length)))) for text in texts]
    for seed in range(arguments.seeds):
        replay = Replay(texts, rows, arguments.step, arguments.feed, vocabulary, seed)
        drafter, pace = replay.calibrator(arguments.parts.split(","))
        shuffled = random.Random(seed)
        for _ in range(arguments.times):
            results = [(text, replay.decode(text, drafter, pace)) for text in shuffled.sample(texts, len(texts))]
        yield "auto", results


def report(arguments: argparse.Namespace, totals: Any, rows: dict[int, float]) -> None:
    found = {}
    for category, settings in totals.items():
        speed = {s: 1000 * tokens / ms for s, (tokens, ms) in settings.items()}
        best = max((s for s in speed if s != "auto"), key=lambda s: speed[s])
        found[category] = {
            "best_fixed": best,
            "auto_against_best": round(speed["auto"] / speed[best], 4),
            "auto_against_plain": round(speed["auto"] / speed["none:0"], 4),
            "relative_to_plain": {s: round(v / speed["none:0"], 3) for s, v in speed.items()},
        }
        print(category, json.dumps(found[category]))
    save(
        arguments.name,
        {
            "rows_ms": rows,
            "step_ms": arguments.step,
            "feed_ms": arguments.feed,
            "deciding_ms": arguments.deciding,
            "parts": arguments.parts,
            "categories": found,
        },
    )


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.1f} s")
