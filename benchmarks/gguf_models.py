"""GGUF models with and without speculation, against llama.cpp's own server; and GGUF drafters for Hugging Face targets.

    python benchmarks/gguf_models.py pair TARGET.gguf DRAFTER.gguf --prompts SPEC_BENCH.jsonl [--temperature 1]
    python benchmarks/gguf_models.py copy TARGET.gguf
    python benchmarks/gguf_models.py mixed TARGET_FOLDER DRAFTER.gguf DRAFTER_FOLDER --prompts SPEC_BENCH.jsonl
    python benchmarks/gguf_models.py acceptance TARGET.gguf DRAFTER.gguf --prompts SPEC_BENCH.jsonl

pair: our plain decoding and our model drafter against the server's modes (plain, its draft model at n_max 1 to 4, its n-gram modes), on the
same files through `xllamacpp`. copy: the drafter `suffix` on prompts whose answer repeats them, against our own plain decoding. mixed: a
Hugging Face target with a GGUF drafter against the same target with the Hugging Face drafter, and plain. acceptance: sampled drafts under
`block` against greedy drafts under matching, at temperature 1.

In each repetition every configuration answers every prompt; configurations take turns. A configuration's speed in a repetition is all tokens
over all seconds, prefill included; the figure is the median over repetitions. A run adds its repetitions to the result file unless
--fresh is given, so that long measurements can be made in slices. Nothing else should use the processor meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Sequence

import torch
from common import RESULTS, median, prompts, save

import outrider
from outrider.demo import PROMPTS
from outrider.drafters import NoDrafter
from outrider.drafters.auto import AutoDrafter
from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.drafters.vocabulary import in_words_of
from outrider.targets.base import Target
from outrider.targets.gguf import GgufTarget
from outrider.targets.llama.placement import Placement
from outrider.targets.transformers import TransformersTarget
from outrider.trace import statistics

NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache")
CONTEXT = 2048
COPIES = ("rewrite", "extract")
"""Categories of the demo's prompts whose answers repeat them."""


@dataclass(frozen=True)
class Answer:
    """seconds: of the whole call, prefill included. More figures where they are known."""

    tokens: int
    seconds: float
    more: dict[str, float]


Run = Callable[[list[int], int], Answer]
"""Token ids and the number of the repetition, as a seed."""


# ---- what runs -------------------------------------------------------------------------------------------------------------


def gguf(path: str) -> GgufTarget:
    return GgufTarget.load(path, placement=Placement(n_ctx=CONTEXT, n_seq_max=8))


def ours(engine: outrider.Engine, options: argparse.Namespace, **values: Any) -> Run:
    def run(ids: list[int], seed: int) -> Answer:
        began = time.perf_counter()
        result = engine.generate(
            ids, max_tokens=options.tokens, temperature=options.temperature, seed=seed, **{"ignore_eos": True, **values}
        )
        seconds = time.perf_counter() - began
        figures = statistics(result.rounds)
        prefill = sum(r.times.prefill for r in result.rounds) / 1e9
        counts = {"passes": figures.passes, "proposed": figures.proposed, "accepted": figures.accepted}
        return Answer(len(result.tokens), seconds, {"prefill_seconds": prefill, **counts})

    return run


def model_drafter(model: Target, target: Target, options: argparse.Namespace, **more: Any) -> ModelDrafter:
    chosen = ModelOptions(min_probability=options.min_probability, **more)
    return ModelDrafter(in_words_of(target, model), chosen, model.n_parameters / target.n_parameters)


def server(options: argparse.Namespace, mode: str) -> Run:
    """llama.cpp's server in one mode: plain, draft N, or an n-gram mode."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.target
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = CONTEXT, 1, 0, -1
    speculative = params.speculative
    threads = [params.cpuparams, params.cpuparams_batch, speculative.draft.cpuparams, speculative.draft.cpuparams_batch]
    for each in threads:
        each.n_threads = torch.get_num_threads()
    kinds = xllamacpp.common_speculative_type
    if mode.startswith("draft"):
        speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        speculative.draft.mparams.path = options.drafter
        speculative.draft.n_max = int(mode.split()[1])
    elif mode != "plain":
        speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{mode.upper().replace('-', '_')}")]
    engine = xllamacpp.Server(params)

    def run(ids: list[int], seed: int) -> Answer:
        asked = {
            "prompt": ids,
            "n_predict": options.tokens,
            "temperature": options.temperature,
            "ignore_eos": True,
            "seed": seed,
        }
        began = time.perf_counter()
        found = engine.handle_completions({**asked, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False})
        seconds = time.perf_counter() - began
        figures = found["timings"]
        counts = {"proposed": figures.get("draft_n", 0), "accepted": figures.get("draft_n_accepted", 0)}
        return Answer(figures["predicted_n"], seconds, {"prefill_seconds": figures["prompt_ms"] / 1e3, **counts})

    return run


def transformers_plain(path: str, options: argparse.Namespace) -> Run:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def run(ids: list[int], seed: int) -> Answer:
        x = torch.tensor([ids])
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                x,
                attention_mask=torch.ones_like(x),
                max_new_tokens=options.tokens,
                min_new_tokens=options.tokens,
                do_sample=False,
            )
        return Answer(out.shape[1] - len(ids), time.perf_counter() - began, {})

    return run


# ---- measuring -------------------------------------------------------------------------------------------------------------


Configurations = dict[str, Callable[[], Run]]
"""What makes each ready to run; made anew in every repetition, so that not all need be in memory at once."""


def measure(configurations: Configurations, asked: Sequence[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Run every configuration in each repetition, in turns; returns all repetitions known so far, by configuration."""
    known = load(options)
    done = max((len(runs) for runs in known.values()), default=0)
    names = list(configurations)
    for repetition in range(done, done + options.repeat):
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            run = configurations[name]()
            if repetition == done:
                run(asked[0][:8], 0)  # whatever is made on first use
            answers = [run(ids, repetition) for ids in asked]
            del run
            gc.collect()
            row: dict[str, float] = defaultdict(float)
            for answer in answers:
                for key, value in {"tokens": answer.tokens, "seconds": answer.seconds, **answer.more}.items():
                    row[key] += value
            known.setdefault(name, []).append({key: round(value, 4) for key, value in row.items()})
            print(f"repetition {repetition + 1}: {name:28s} {row['tokens'] / row['seconds']:7.2f} tokens/s", flush=True)
    return known


def load(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    path = RESULTS / f"{options.name}.json"
    if options.fresh or not path.exists():
        return {}
    found = json.loads(path.read_text())
    if found["settings"] != settings(options):
        raise SystemExit(f"{path} was measured with other settings: {found['settings']}; give --fresh or another --name")
    return found["repetitions"]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for repetitions to belong together."""
    left_out = ("prompts", "repeat", "fresh", "name", "modes", "make")
    values = {key: value for key, value in vars(options).items() if key not in left_out}
    return {key: value.rstrip("/").split("/")[-1] if isinstance(value, str) else value for key, value in values.items()}


def summary(known: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over the repetitions: tokens a second with and without prefill, and what is known about drafts."""
    made: dict[str, dict[str, float]] = {}
    for name, rows in known.items():
        figures = {
            "tokens_per_second": median(row["tokens"] / row["seconds"] for row in rows),
            "without_prefill": median(row["tokens"] / (row["seconds"] - row.get("prefill_seconds", 0)) for row in rows),
            "repetitions": len(rows),
        }
        if any(row.get("proposed") for row in rows):
            figures["acceptance_rate"] = sum(row["accepted"] for row in rows) / sum(row["proposed"] for row in rows)
        if all(row.get("passes") for row in rows):
            figures["tokens_per_pass"] = sum(row["tokens"] for row in rows) / sum(row["passes"] for row in rows)
        made[name] = {key: round(value, 4) for key, value in figures.items()}
    return made


def finish(known: dict[str, Any], options: argparse.Namespace, ratios: Callable[[dict[str, float]], dict[str, float]]) -> None:
    """Print and save."""
    figures = summary(known)
    for name, row in figures.items():
        print(f"{name:28s} " + "  ".join(f"{key} {value:g}" for key, value in row.items()))
    found = {
        name: round(value, 3) for name, value in ratios({n: row["tokens_per_second"] for n, row in figures.items()}).items()
    }
    for name, value in found.items():
        print(f"{name}: {value}")
    save(options.name, {"settings": settings(options), "summary": figures, "ratios": found, "repetitions": known})


def questions(tokenizer: Any, options: argparse.Namespace) -> list[list[int]]:
    chosen = [p for category in ("coding", "math") for p in prompts(options.prompts, (category,), options.prompts_number // 2)]
    return [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in chosen]


# ---- the subcommands -------------------------------------------------------------------------------------------------------


def best(speeds: dict[str, float], prefix: str) -> float:
    return max((value for name, value in speeds.items() if name.startswith(prefix)), default=float("nan"))


def pair(options: argparse.Namespace) -> None:
    target, model = gguf(options.target), gguf(options.drafter)
    drafter = model_drafter(model, target, options)
    engines = {
        "outrider plain": outrider.Engine(target, NoDrafter(), draft=0, accept="block"),
        **{f"outrider draft {n}": outrider.Engine(target, drafter, draft=n, accept="block") for n in options.drafts},
    }
    if options.auto:
        engines["outrider draft auto"] = outrider.Engine(target, AutoDrafter([drafter]), accept="block")
        engines["outrider draft auto"].warm_up()
    configurations: Configurations = {name: partial(ours, engine, options) for name, engine in engines.items()}
    for mode in options.modes:
        configurations[f"llama.cpp {mode}"] = partial(server, options, mode)
    known = measure(configurations, questions(target.tokenizer, options), options)
    finish(
        known,
        options,
        lambda speeds: {
            "best draft against our plain decoding": best(speeds, "outrider draft") / speeds["outrider plain"],
            "best draft against the server's best mode": best(speeds, "outrider draft") / best(speeds, "llama.cpp"),
        },
    )


def copy(options: argparse.Namespace) -> None:
    target = gguf(options.target)
    engines = {
        "outrider plain": outrider.Engine(target, NoDrafter(), draft=0, accept="block"),
        **{f"outrider suffix {n}": outrider.load(target, "suffix", draft=n, accept="block") for n in options.drafts},
    }
    configurations: Configurations = {
        name: partial(ours, engine, options, ignore_eos=False) for name, engine in engines.items()
    }
    assert target.tokenizer is not None
    asked = [target.tokenizer.chat([{"role": "user", "content": p.text}]) for p in PROMPTS if p.category in COPIES]
    known = measure(configurations, asked, options)
    finish(known, options, lambda speeds: {"suffix against plain": best(speeds, "outrider suffix") / speeds["outrider plain"]})


def mixed(options: argparse.Namespace) -> None:
    target = TransformersTarget.load(options.target)
    small, other = gguf(options.drafter), TransformersTarget.load(options.other)
    engines = {"outrider plain": outrider.Engine(target, NoDrafter(), draft=0, accept="block")}
    for kind, model in (("gguf", small), ("transformers", other)):
        drafter = model_drafter(model, target, options)
        engines |= {
            f"outrider {kind} draft {n}": outrider.Engine(target, drafter, draft=n, accept="block") for n in options.drafts
        }
    configurations: Configurations = {name: partial(ours, engine, options) for name, engine in engines.items()}
    if options.modes:
        configurations["transformers plain"] = lambda: transformers_plain(options.target, options)
    known = measure(configurations, questions(target.tokenizer, options), options)

    def ratios(speeds: dict[str, float]) -> dict[str, float]:
        mine = best(speeds, "outrider gguf")
        return {
            "against the Hugging Face drafter": mine / best(speeds, "outrider transformers"),
            "against our plain decoding": mine / speeds["outrider plain"],
            "against transformers plain": mine / best(speeds, "transformers plain"),
        }

    finish(known, options, ratios)


def acceptance(options: argparse.Namespace) -> None:
    target, model = gguf(options.target), gguf(options.drafter)
    engines = {}
    for n in options.drafts:
        sampled, greedy = (model_drafter(model, target, options, greedy=greedy) for greedy in (False, True))
        engines[f"sampled block {n}"] = outrider.Engine(target, sampled, draft=n, accept="block")
        engines[f"greedy matching {n}"] = outrider.Engine(target, greedy, draft=n, accept="coupled")
    configurations: Configurations = {name: partial(ours, engine, options) for name, engine in engines.items()}
    known = measure(configurations, questions(target.tokenizer, options), options)
    figures = summary(known)

    def ratios(speeds: dict[str, float]) -> dict[str, float]:
        return {
            f"tokens per pass at {n}": figures[f"sampled block {n}"]["tokens_per_pass"]
            / figures[f"greedy matching {n}"]["tokens_per_pass"]
            for n in options.drafts
        }

    finish(known, options, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for make, places, temperature, drafts in (
        (pair, ("target", "drafter"), 0.0, "4"),
        (copy, ("target",), 0.0, "8"),
        (mixed, ("target", "drafter", "other"), 0.0, "4"),
        (acceptance, ("target", "drafter"), 1.0, "4,8"),
    ):
        command = commands.add_parser(make.__name__)
        for place in places:
            command.add_argument(place)
        command.add_argument("--prompts", help="a file of Spec-Bench questions")
        command.add_argument("--prompts-number", type=int, default=8, help="half of them coding, half mathematics")
        command.add_argument("--tokens", type=int, default=96)
        command.add_argument("--temperature", type=float, default=temperature)
        command.add_argument("--repeat", type=int, default=5)
        command.add_argument("--drafts", default=drafts, help="draft lengths, with commas")
        command.add_argument("--min-probability", type=float)
        modes = ["plain", *(f"draft {n}" for n in range(1, 5)), *NGRAMS] if make is pair else ["transformers"]
        command.add_argument("--modes", default=",".join(modes), help="of the peer, with commas; may be empty")
        command.add_argument("--name", default=f"gguf-{make.__name__}")
        command.add_argument("--fresh", action="store_true", help="forget earlier repetitions of this name")
        if make is pair:
            command.add_argument("--auto", action="store_true", help="our draft length chosen by the calibrator, too")
        command.set_defaults(make=make)
    options = parser.parse_args()
    options.drafts = [int(n) for n in options.drafts.split(",")]
    options.modes = [mode for mode in options.modes.split(",") if mode]
    options.make(options)


if __name__ == "__main__":
    main()
