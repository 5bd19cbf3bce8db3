"""A draft model on both sides: Outrider against transformers' assistant_model, the same pair, prompts and draft lengths.

    python benchmarks/pair.py TARGET DRAFTER [--prompts SPEC_BENCH.jsonl] [--number 6] [--tokens 64] [--ours 4,8,16] [--theirs 4,8,16]

Greedy, float32. Every configuration runs once per prompt, alternating; a configuration's speed is all tokens over all seconds
(prefill included on both sides), and each side is represented by its best draft length.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
import transformers
from common import prompts, save

import outrider
from outrider import kernels
from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.targets.transformers import TransformersTarget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--prompts")
    parser.add_argument("--number", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--categories", default="coding", help="of Spec-Bench, with commas; --number prompts of each")
    parser.add_argument("--ours", default="4,8,16", help="draft lengths")
    parser.add_argument("--theirs", default="4,8,16")
    parser.add_argument("--name", default="pair")
    arguments = parser.parse_args()
    mine, other_lengths = ([int(n) for n in text.split(",")] for text in (arguments.ours, arguments.theirs))

    target = TransformersTarget.load(arguments.target, dtype="float32")
    small = TransformersTarget.load(arguments.drafter, dtype="float32")
    drafter = ModelDrafter(small, ModelOptions(), small.n_parameters / target.n_parameters)
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(arguments.target, dtype=torch.float32)
    assistant = load(arguments.drafter, dtype=torch.float32)
    engines = {length: outrider.Engine(target, drafter, draft=length) for length in mine}
    plain = outrider.load(target, drafter=None)

    def ours(engine: outrider.Engine, ids: list[int]) -> list[int]:
        return list(engine.generate(ids, max_tokens=arguments.tokens).tokens)

    def other(ids: list[int], length: int | None) -> list[int]:
        extra = {}
        if length is not None:
            assistant.generation_config.num_assistant_tokens = length
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            extra = {"assistant_model": assistant}
        x = torch.tensor([ids])
        with torch.inference_mode():
            out = theirs.generate(
                x, attention_mask=torch.ones_like(x), max_new_tokens=arguments.tokens, do_sample=False, **extra
            )
        return out[0, len(ids) :].tolist()

    runs = {"outrider plain": partial(ours, plain), "transformers plain": partial(other, length=None)}
    for length in mine:
        runs[f"outrider draft {length}"] = partial(ours, engines[length])
    for length in other_lengths:
        runs[f"transformers draft {length}"] = partial(other, length=length)
    seconds = dict.fromkeys(runs, 0.0)
    tokens = dict.fromkeys(runs, 0)
    differing = dict.fromkeys(runs, 0)
    assert target.tokenizer is not None
    chosen = [p for c in arguments.categories.split(",") for p in prompts(arguments.prompts, (c,), arguments.number)]
    for number, prompt in enumerate(chosen):
        ids = target.tokenizer.chat([{"role": "user", "content": prompt}])
        reference = None
        order = list(runs)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            began = time.perf_counter()
            out = runs[name](ids)
            seconds[name] += time.perf_counter() - began
            tokens[name] += len(out)
            reference = reference or out
            differing[name] += out != reference
        print(f"prompt {number + 1} of {len(chosen)}", flush=True)

    speed = {name: tokens[name] / seconds[name] for name in runs}
    best = {
        side: max(s for name, s in speed.items() if name.startswith(f"{side} draft")) for side in ("outrider", "transformers")
    }
    for name in runs:
        print(f"{name:24s} {speed[name]:7.2f} tokens/s   differing texts: {differing[name]}")
    ratio = best["outrider"] / best["transformers"]
    print(f"best against best: {ratio:.2f}; against our plain decoding: {best['outrider'] / speed['outrider plain']:.2f}")
    save(
        arguments.name,
        {
            "target": arguments.target.rstrip("/").split("/")[-1],
            "drafter": arguments.drafter.rstrip("/").split("/")[-1],
            "prompts": len(chosen),
            "categories": arguments.categories,
            "tokens": arguments.tokens,
            "kernel": kernels.VARIANT,
            "tokens_per_second": {name: round(value, 3) for name, value in speed.items()},
            "best_against_transformers_assistant": round(ratio, 3),
            "best_against_transformers_plain": round(best["outrider"] / speed["transformers plain"], 3),
            "best_against_own_plain": round(best["outrider"] / speed["outrider plain"], 3),
            "differing_texts": differing,
        },
    )


if __name__ == "__main__":
    main()
