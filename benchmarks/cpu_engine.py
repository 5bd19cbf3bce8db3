"""What a pass costs on the CPU engine, against transformers in float32 in the same run.

    python benchmarks/cpu_engine.py TARGET [--contexts 128,4096] [--repeat 7] [--name cpu-engine]

All measurements alternate: in each repetition transformers' pass over one row, then ours over 1, 2, 4, 6, 8 and 16 different tokens, at
each context length. Medians. Also the largest difference of the logits, and whether rows of one pass equal, to the last bit, passes over
single rows.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
import transformers
from common import BUILT_IN, median, save

from outrider.targets.transformers import TransformersTarget
from outrider.tree import DraftTree

ROWS = (1, 2, 4, 6, 8, 16)


class Theirs:
    """A transformers model with a cache of `length` tokens."""

    def __init__(self, path: str):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def prefill(self, tokens: list[int]) -> None:
        self.cache = transformers.DynamicCache(config=self.model.config)
        with torch.inference_mode():
            self.model(torch.tensor([tokens]), past_key_values=self.cache, logits_to_keep=1)

    def run(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens]), past_key_values=self.cache).logits[0]
        self.cache.crop(-len(tokens))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--contexts", default="128")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--name", default="cpu-engine")
    arguments = parser.parse_args()
    ours = TransformersTarget.load(arguments.target)
    theirs = Theirs(arguments.target)
    assert ours.tokenizer is not None
    text = ours.tokenizer.encode("\n".join(BUILT_IN) * 40)
    generator = random.Random(0)
    result: dict[str, Any] = {"target": arguments.target.rstrip("/").split("/")[-1], "contexts": {}}
    for context in map(int, arguments.contexts.split(",")):
        slot = ours.open()
        for _ in ours.prefill(slot, text[:context]):
            pass
        theirs.prefill(text[:context])
        times: dict[str, list[float]] = {"transformers 1": [], **{str(rows): [] for rows in ROWS}}
        difference, equal = 0.0, True
        for repetition in range(arguments.repeat + 1):
            tokens = generator.sample(text, max(ROWS))
            began = time.perf_counter()
            theirs.run(tokens[:1])
            times["transformers 1"].append(time.perf_counter() - began)
            for rows in ROWS:
                began = time.perf_counter()
                (output,) = ours.forward([(slot, DraftTree.chain(tokens[0], tokens[1:rows]))])
                times[str(rows)].append(time.perf_counter() - began)
                assert output.logits is not None
                if repetition == 0 and rows == 6:
                    reference = theirs.run(tokens[:rows])[:, : ours.vocab_size]
                    difference = float((output.logits - reference).abs().max() / reference.abs().max())
                    several = output.logits.clone()
                    for row in range(rows):
                        (one,) = ours.forward([(slot, DraftTree.chain(tokens[row]))])
                        assert one.logits is not None
                        equal &= torch.equal(one.logits[0], several[row])
                        ours.commit(slot, [0])
                    ours.truncate(slot, context)
        ms = {name: round(1e3 * median(values[1:]), 2) for name, values in times.items()}
        figures = {
            "milliseconds": ms,
            "against_transformers_one_row": round(ms["transformers 1"] / ms["1"], 2),
            "six_rows_against_transformers_one_row": round(ms["transformers 1"] / ms["6"], 2),
            "relative_to_one_row": {str(rows): round(ms[str(rows)] / ms["1"], 3) for rows in ROWS},
            "largest_logit_difference_relative": difference,
            "rows_equal_single_rows_bitwise": equal,
        }
        result["contexts"][str(context)] = figures
        print(f"context {context}: {figures}", flush=True)
        ours.close(slot)
    save(arguments.name, result)


if __name__ == "__main__":
    main()
