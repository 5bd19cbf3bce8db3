"""The real thing: what the engine accepts of a drafter in training, on a few prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Sequence

from ..drafters import load_drafter
from ..engine import Engine
from ..targets.base import Target
from ..trace import combine


@dataclass(frozen=True)
class Measure:
    """prompts: token ids. tokens: to decode for each, greedily. draft: most drafted tokens in a round. options: of the drafter."""

    prompts: Sequence[Sequence[int]]
    tokens: int = 64
    draft: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)


def measured(target: Target, folder: Path, measure: Measure) -> dict[str, Any]:
    """Acceptance length and rate of the drafter in `folder`. Raises LoadError when it cannot be loaded."""
    drafter = load_drafter(str(folder), target, measure.options)
    engine = Engine(target, drafter, measure.draft)
    try:
        results = engine.generate([list(p) for p in measure.prompts], max_tokens=measure.tokens)
    finally:
        engine.close()
    total = combine([result.stats for result in results])
    return {
        "acceptance_length": total.acceptance_length,
        "acceptance_rate": total.acceptance_rate,
        "emitted": total.emitted,
        "passes": total.passes,
        "prompts": len(results),
        "draft": measure.draft,
        **measure.options,
    }
