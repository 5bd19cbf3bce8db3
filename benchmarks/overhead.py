"""How much of a round is spent outside the models' forward passes.

    python benchmarks/overhead.py TARGET [DRAFTER_MODEL] [--tokens 64]

Plain, `suffix` and (with a drafter) `model` decoding, greedy and sampled. Every pass of the target and of the draft model is
timed where it is called; the rest of the rounds' time is the loop's own.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import BUILT_IN, save

import outrider
from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.targets.transformers import TransformersTarget


class Timed(TransformersTarget):
    """Adds up the time of its passes."""

    seconds = 0.0

    def _run(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = super()._run(*arguments)
        Timed.seconds += time.perf_counter() - began
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter", nargs="?")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--name", default="overhead")
    arguments = parser.parse_args()
    target = Timed.load(arguments.target, dtype=arguments.dtype)
    drafters: dict[str, Any] = {"none": None, "suffix": "suffix"}
    if arguments.drafter:
        drafters["model"] = ModelDrafter(Timed.load(arguments.drafter, dtype=arguments.dtype), ModelOptions())
    shares = {}
    for name, drafter in drafters.items():
        engine = outrider.load(target, drafter)
        for temperature in (0.0, 0.8):
            prompt = [{"role": "user", "content": BUILT_IN[0]}]
            Timed.seconds = 0.0
            result = engine.generate(prompt, max_tokens=arguments.tokens, temperature=temperature)
            prefill = result.stats.seconds["prefill"]
            total = result.stats.total_seconds
            share = (total - (Timed.seconds - prefill)) / total
            shares[f"{name}, temperature {temperature:g}"] = round(share, 4)
            print(
                f"{name:7s} temperature {temperature:g}: {share:6.2%} outside the passes, {result.stats.passes} rounds",
                flush=True,
            )
    save(arguments.name, {"target": arguments.target.rstrip("/").split("/")[-1], "share_outside_passes": shares})


if __name__ == "__main__":
    main()
