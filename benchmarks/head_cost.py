"""What a draft step of an EAGLE head costs, as a share of a step of its target; with random weights, which cost the same.

    python benchmarks/head_cost.py TARGET [TARGET ...] [--vocabulary 32000] [--context 256]

EAGLE-3 has a draft vocabulary of that size and an output matrix of its own, EAGLE-1 uses the target's. A draft step is what each
further token of a chain costs; the first one also runs the pair of the anchor. 16-bit weights, the target's own arithmetic.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save

from outrider import check
from outrider.drafters.eagle import EagleDrafter, EagleOptions
from outrider.targets.transformers import TransformersTarget

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import eagles

ROWS = (1, 4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--context", type=int, default=256)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for source in arguments.targets:
        target = TransformersTarget.load(source)
        name = source.rstrip("/").split("/")[-1]
        for dialect in ("eagle", "safeailab"):
            results[f"{name}, {dialect}"] = one(target, dialect, arguments.vocabulary, arguments.context)
            print(f"{name}, {dialect}: {results[f'{name}, {dialect}']}", flush=True)
    save("head_cost", {"context": arguments.context, "vocabulary": arguments.vocabulary, "heads": results})


def one(target: TransformersTarget, dialect: str, vocabulary: int, context: int) -> dict[str, float]:
    """Median milliseconds, and shares of a pass over one row."""
    config = target.model.config
    changes = {"num_key_value_heads": config.num_key_value_heads, "intermediate_size": config.intermediate_size}
    draft = None if dialect == "eagle" else range(min(vocabulary, target.vocab_size))
    made, tensors = eagles.make(
        dialect, target.hidden_size, config.vocab_size, draft, heads=config.num_attention_heads, scale=0.02, **changes
    )
    half = {key: t.bfloat16() if t.is_floating_point() else t for key, t in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        head = EagleDrafter.load(target, EagleOptions(), eagles.write(Path(folder), dialect, made, half)).head
    costs = check.measure(target, EagleDrafter(head, EagleOptions(min_probability=0.0)), context, ROWS)
    step = costs.rows[1]
    return {
        "target_ms": round(step, 3),
        "target_16_rows_ms": round(costs.rows[16], 3),
        "first_draft_ms": round(costs.draft, 3),
        "draft_step_ms": round(costs.step, 3),
        "first_draft_share": round(costs.draft / step, 3),
        "draft_step_share": round(costs.step / step, 3),
    }


if __name__ == "__main__":
    main()
