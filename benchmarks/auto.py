"""The calibrator against fixed settings: `auto`, plain decoding and every fixed drafter and draft length, in turns, on the same texts.

    python benchmarks/auto.py TARGET [--drafters NAME=SOURCE,...] [--prompts SPEC_BENCH.jsonl] [--settings ...] [--seconds 270] --name NAME

Greedy. A unit is one prompt decoded once with several settings, in turns of `STRETCH` tokens, so that a machine that slows down slows all of
them down at the same place of the text; a prompt's prefill is computed once and forked (anew for a drafter that reads the target's states),
outside what is timed. The first `--choosing` repetitions decode with every setting; then each category's fastest fixed setting is chosen, and
further repetitions time it, plain decoding and `auto`. Runs are kept in `results/NAME.runs.jsonl`; calling it again goes on where it stopped
(after --seconds, or interrupted), with a calibrator that knows nothing yet. All runs of a prompt are held to one text, which the run that is
the first to get somewhere says: where two tokens are as good as equally likely, a pass of other rows may round to the other. `--report`
computes what there is:

- for each category `auto` against the chosen setting and against plain decoding, over the repetitions after the choice: the mean of the units'
  log ratios with its paired one-sided 95 % bound;
- the same without the noise of the clock, against the setting that is the best by it: every round at the median cost of its kind (rows of the
  pass; drafter and levels). A draft that took far longer than that has caught up with the prompt: it counts as it was;
- that in the repetitions with every setting too, in which `auto` begins knowing nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Iterator

import torch
from common import RESULTS, save
from torch import Tensor

import outrider
from outrider.decode import Sequence, close_sequence, open_sequence
from outrider.drafters import NoDrafter, load_drafter
from outrider.drafters.auto import AutoDrafter
from outrider.engine import Engine
from outrider.sampling import Sampler, SamplingParams
from outrider.trace import Round
from outrider.tree import DraftTree

KINDS = {
    "writing": ("writing", "roleplay", "humanities", "stem"),
    "reasoning": ("reasoning", "math", "coding", "math_reasoning"),
    "source": ("extraction", "summarization", "rag", "translation"),
}
LONGEST = 450
"""Tokens of a prompt; longer ones are left out, for their prefill takes the time of the measurement."""
REWRITE = (
    "Copy this text, but replace every 'ferry' with 'train': The ferry leaves the harbour at seven and reaches the island before eight. Those who "
    "miss the ferry can take the second ferry at noon, which also carries cars. In winter the ferry runs on Mondays and Fridays only.",
    "Return this code unchanged except that the function is named total:\n\ndef add_up(prices, discount=0.0):\n    amount = 0.0\n    for "
    "price in prices:\n        if price < 0:\n            raise ValueError('a price cannot be negative')\n        amount += price\n    return amount "
    "* (1 - discount)\n",
    "Repeat this list, adding the word 'done' to each line:\n- water the tomatoes in the greenhouse\n- repair the fence behind the shed\n- order seeds "
    "for the spring\n- write to the members about the meeting\n- return the ladder to the neighbours\n",
    "Write this sentence three times: The keeper of the lighthouse wrote down the time, the wind and the height of the waves.",
)
STRETCH = 16
"""Tokens of a run before the next run's turn."""
CAUGHT_UP = 4
"""A draft that took so many times the median of its kind was not noise."""
SURE = 1e9
"""The logit of a token that is told."""
T95 = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86, 9: 1.83, 10: 1.81, 12: 1.78, 15: 1.75, 20: 1.72}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--drafters", default="", help="models and heads beside suffix and lookup, for auto and the settings")
    parser.add_argument("--prompts", help="a Spec-Bench file; without it, rewriting alone")
    parser.add_argument("--parts", default="", help="drafters that auto has; all by default")
    parser.add_argument(
        "--settings", default="suffix:4,suffix:8,suffix:16,lookup:4,lookup:8", help="fixed ones, as drafter:length"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--each", type=int, default=1, help="prompts of each Spec-Bench category")
    parser.add_argument("--kinds", default=",".join((*KINDS, "rewrite")), help="of prompts")
    parser.add_argument("--rewrites", type=int, default=len(REWRITE))
    parser.add_argument("--choosing", type=int, default=2, help="repetitions with every setting")
    parser.add_argument("--repeat", type=int, default=4, help="repetitions after these")
    parser.add_argument("--seconds", type=float, default=270)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--skip", type=int, default=0, help="count a run only after so many tokens")
    parser.add_argument("--name", required=True)
    parser.add_argument("--report", action="store_true", help="compute, measure nothing")
    arguments = parser.parse_args()
    path = RESULTS / f"{arguments.name}.runs.jsonl"
    if not arguments.report:
        measure(arguments, path)
    report(arguments, [json.loads(line) for line in path.read_text().splitlines()])


# ---- measuring ---------------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, path: Path) -> None:
    began = time.monotonic()
    made = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(r["setting"], r["prompt"], r["repetition"]) for r in made}
    engines = dict(make_engines(arguments))
    target = next(iter(engines.values())).target
    prompts = [one for one in chosen(arguments, target.tokenizer) if one[0] in arguments.kinds.split(",")]
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    with open(path, "a") as out:
        for repetition in range(arguments.choosing + arguments.repeat):
            for number, (category, ids) in enumerate(prompts):
                names = list(engines)
                if repetition >= arguments.choosing:
                    names = list(dict.fromkeys(["none", "auto", best_fixed(arguments, made, category)]))
                if all((name, number, repetition) in done for name in names):
                    continue
                if time.monotonic() - began > arguments.seconds:
                    print("time is up; call again to go on", flush=True)
                    return
                first = Sequence(target, ids, params, "traversal")
                open_sequence(target, NoDrafter(), first)
                text = next((list(r["text"]) for r in made if r["prompt"] == number), [])
                turn = (repetition + number) % len(names)
                runs = [Run(name, engines[name], first, params, text) for name in names[turn:] + names[:turn]]
                decode_in_turns(runs)
                close_sequence(target, first)
                unit = {"prompt": number, "category": category, "repetition": repetition}
                made += [{**unit, **run.result(arguments.skip)} for run in runs]
                out.writelines(json.dumps(one) + "\n" for one in made[-len(names) :])
                out.flush()


def make_engines(arguments: argparse.Namespace) -> Iterator[tuple[str, Engine]]:
    """Plain decoding, auto, and the fixed settings, on one target; each drafter is loaded once."""
    loading = {} if arguments.target.endswith(".gguf") else {"dtype": arguments.dtype}
    plain = outrider.load(arguments.target, drafter=None, draft=0, **loading)
    target = plain.target
    drafters: dict[str, Any] = {"suffix": load_drafter("suffix", target), "lookup": load_drafter("lookup", target)}
    for given in filter(None, arguments.drafters.split(",")):
        name, _, source = given.partition("=")
        drafters[name] = load_drafter(source, target)
    parts = {**drafters, "suffix": load_drafter("suffix", target, {"shape": "tree"})}
    auto = Engine(target, AutoDrafter([parts[name] for name in arguments.parts.split(",") if name] or list(parts.values())))
    auto.warm_up()
    yield "none", plain
    yield "auto", auto
    for setting in filter(None, arguments.settings.split(",")):
        name, _, length = setting.partition(":")
        yield setting, Engine(target, drafters[name], int(length))


def chosen(arguments: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """Category and token ids of each prompt."""
    rows = [json.loads(line) for line in Path(arguments.prompts).read_text().splitlines()] if arguments.prompts else []
    for kind, categories in KINDS.items():
        for category in categories:
            texts = (row["turns"][0] for row in rows if row["category"] == category)
            ids = (tokenizer.chat([{"role": "user", "content": text}]) for text in texts)
            yield from ((kind, one) for _, one in zip(range(arguments.each), (i for i in ids if len(i) <= LONGEST)))
    for text in REWRITE[: arguments.rewrites]:
        yield "rewrite", tokenizer.chat([{"role": "user", "content": text}])


class Told(Sampler):
    """Of a sequence whose text is given, as far as it is: each pass is run, and what it says next is what the text says."""

    def __init__(self, prompt: list[int], text: list[int], params: SamplingParams, vocab_size: int):
        super().__init__(params, prompt, vocab_size)
        self.text = text

    def probabilities(self, logits: Tensor, tree: DraftTree) -> Tensor:
        node = 0
        with torch.inference_mode():
            for token in self.text[self.emitted :]:
                logits[node, token] = SURE
                node = next((child for child in tree.children[node] if tree.tokens[child] == token), 0)
                if not node:  # the text goes another way than the draft
                    break
        return super().probabilities(logits, tree)


class Run:
    """One decoding from a fork of `first`. text: what all runs of the prompt are held to; what it is the first to say is added."""

    def __init__(self, name: str, engine: Engine, first: Sequence, params: SamplingParams, text: list[int]):
        self.name = name
        self.pace = engine.pace
        self.text = text
        self.sequence = Sequence(engine.target, first.tokens, params, engine.rule_for(params))
        self.sequence.sampler = Told(first.tokens, text, params, engine.target.vocab_size)
        if not engine.drafter.layers:
            slot = engine.target.open(first.slot, first.slot.length)
            self.sequence.attach(slot, engine.drafter.open(self.sequence.sampler))
        self.decoding = engine.decode([self.sequence])
        self.rounds: list[tuple[Round, int]] = []
        """With the nanoseconds that each took, what was learned from it included."""
        self.deciding = -self.deciding_ns

    @property
    def deciding_ns(self) -> int:
        return getattr(self.pace, "deciding_ns", 0)

    def advance(self, tokens: int) -> None:
        """Decode until there are so many tokens, or the text ends."""
        while len(self.sequence.output) < tokens and not self.sequence.finish:
            began = time.perf_counter_ns()
            round = next(self.decoding)
            took = time.perf_counter_ns() - began
            self.rounds.append((round, took - round.times.prefill))
            self.text += self.sequence.output[len(self.text) :]

    def result(self, skip: int) -> dict[str, Any]:
        """Its speed after `skip` tokens, and what each round cost."""
        before = self.sequence.prompt_length + skip
        counted = [(r, took) for r, took in self.rounds if r.context >= before]
        return {
            "setting": self.name,
            "tokens": sum(len(r.emitted) for r, _ in counted),
            "seconds": sum(took for _, took in counted) / 1e9,
            "deciding": (self.deciding + self.deciding_ns) / 1e9,
            "text": self.sequence.output,
            "rounds": [
                [
                    r.rows,
                    r.drafter,
                    max_depth(r.parents),
                    r.times.propose // 1000,
                    (took - r.times.propose) // 1000,
                    len(r.emitted),
                ]
                for r, took in counted
            ],
        }


def decode_in_turns(runs: list[Run]) -> None:
    """A stretch of each, then the next stretch of each, another one first."""
    end = 0
    while not all(run.sequence.finish for run in runs):
        end += STRETCH
        for run in runs:
            run.advance(end)
        runs.append(runs.pop(0))


def max_depth(parents: tuple[int, ...]) -> int:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


# ---- reporting ---------------------------------------------------------------------------------------------------------------


Unit = dict[str, dict[str, Any]]
"""The runs of a prompt in one repetition, by setting."""


def units_of(runs: list[dict[str, Any]], category: str) -> dict[tuple[int, int], Unit]:
    """By repetition and prompt."""
    units: dict[tuple[int, int], Unit] = defaultdict(dict)
    for r in runs:
        if r["category"] == category:
            units[r["repetition"], r["prompt"]][r["setting"]] = r
    return units


def best_fixed(arguments: argparse.Namespace, runs: list[dict[str, Any]], category: str, seconds: str = "seconds") -> str:
    """The setting that was the fastest in the repetitions with every setting."""
    choosing = [unit for (repetition, _), unit in units_of(runs, category).items() if repetition < arguments.choosing]
    return max((s for s in choosing[0] if s != "auto"), key=lambda s: speed(choosing, s, seconds))


def report(arguments: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    without_noise(runs)
    found: dict[str, Any] = {}
    for category in dict.fromkeys(r["category"] for r in runs):
        units = units_of(runs, category)
        best = best_fixed(arguments, runs, category)
        choosing = [unit for (repetition, _), unit in units.items() if repetition < arguments.choosing]
        timed = [unit for (repetition, _), unit in units.items() if repetition >= arguments.choosing]
        if not timed:
            continue
        found[category] = {
            "pairs": len(timed),
            "best_fixed": best,
            "against_best": ratio(timed, best),
            "against_plain": ratio(timed, "none"),
            "tokens_per_second": {s: round(speed(choosing, s, "seconds"), 2) for s in choosing[0]},
            "without_noise": exact_ratios(timed, choosing),
            "without_noise_from_nothing": exact_ratios(choosing, choosing),
            "chosen_by_auto": dict(Counter(r[1] for unit in units.values() for r in unit["auto"]["rounds"]).most_common()),
        }
        print(category, json.dumps(found[category], indent=1))
    auto = [r for r in runs if r["setting"] == "auto"]
    share = sum(r["deciding"] for r in auto) / max(sum(r["seconds"] for r in auto), 1e-9)
    print(f"deciding: {share:.2%} of auto's time")
    save(
        arguments.name,
        {
            "target": Path(arguments.target).name,
            "drafters": [Path(given).name for given in filter(None, arguments.drafters.split(","))],
            "parts": arguments.parts or "all",
            "tokens": arguments.tokens,
            "skipped_tokens": arguments.skip,
            "units": len(auto),
            "share_of_deciding": round(share, 5),
            "categories": found,
        },
    )


def exact_ratios(units: list[Unit], choosing: list[Unit]) -> dict[str, Any]:
    """The speed of auto in some units against that of every setting on the same prompts, each round at the usual cost of its kind. What
    a fixed setting does on a text is the same in every repetition.
    """
    settings = {unit["auto"]["prompt"]: unit for unit in choosing}
    prompts = [settings[unit["auto"]["prompt"]] for unit in units]
    auto = speed(units, "auto", "exact")
    exact = {s: speed(prompts, s, "exact") for s in prompts[0] if s != "auto"}
    best = max(exact, key=lambda s: exact[s])
    return {
        "best_fixed": best,
        "against_best": round(auto / exact[best], 4),
        "against_plain": round(auto / exact["none"], 4),
        "relative_to_plain": {s: round(exact[s] / exact["none"], 3) for s in exact},
    }


def without_noise(runs: list[dict[str, Any]]) -> None:
    """Give each run its `exact` seconds: its rounds at the median cost of their kinds, over all runs."""
    passes, drafts = defaultdict(list), defaultdict(list)
    for r in runs:
        for rows, drafter, levels, propose, rest, _ in r["rounds"][1:]:
            passes[rows].append(rest)
            drafts[r["setting"].split(":")[0], drafter, levels].append(propose)
    cost = {rows: statistics.median(times) for rows, times in passes.items()}
    draft = {kind: statistics.median(times) for kind, times in drafts.items()}
    for r in runs:
        own = r["setting"].split(":")[0]
        exact = 0.0
        for rows, drafter, levels, propose, rest, _ in r["rounds"]:
            usual = draft.get((own, drafter, levels), propose)
            exact += cost.get(rows, rest) + (propose if propose > CAUGHT_UP * usual else usual)
        r["exact"] = exact / 1e6


def speed(units: list[Unit], setting: str, seconds: str) -> float:
    return sum(unit[setting]["tokens"] for unit in units) / sum(unit[setting][seconds] for unit in units)


def ratio(units: list[Unit], other: str) -> dict[str, float]:
    """auto's speed over another's: geometric mean over the units, and what it exceeds with 95 % (paired, Student's t)."""
    logs = [
        math.log(unit["auto"]["tokens"] / unit["auto"]["seconds"] * unit[other]["seconds"] / unit[other]["tokens"])
        for unit in units
    ]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return {"mean": round(math.exp(mean), 4)}
    freedom = len(logs) - 1
    t = T95[max(n for n in T95 if n <= freedom)]
    return {
        "mean": round(math.exp(mean), 4),
        "at_least": round(math.exp(mean - t * statistics.stdev(logs) / math.sqrt(len(logs))), 4),
    }


if __name__ == "__main__":
    main()
