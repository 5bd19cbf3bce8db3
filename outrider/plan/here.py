"""This machine as hardware: what its memory, its arithmetic and our code between them reach, all measured in some seconds.

Nothing here depends on the models that are planned. Passes of two random models whose weights come from memory, one with small matrices
and one with larger ones, are timed over 1 to 48 rows: what grows with the bytes of a layer is reading and arithmetic, what does not is
calls. So both are measured as they are in a pass, where every product begins with cold weights and the code between two products finds
its own data driven out of the caches. What the loop costs around the passes is measured with models too small to read anything.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Callable, Hashable, Mapping, TypeVar

import torch

from .. import kernels, machine
from ..bench.roofline import measure_rates
from ..drafters import Drafter
from ..drafters.model import ModelDrafter, ModelOptions
from ..drafters.replay import ReplayDrafter, ReplayOptions
from ..engine import Engine
from ..kernels.choose import last_cache, milliseconds
from ..targets.base import Slot
from ..targets.transformers import TransformersTarget
from ..trace import Round
from ..tree import DraftTree
from .hardware import Device, Hardware, Overheads

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24, 32, 36, 48)
FEW = (1, 2, 3, 4)
"""Those of them, bound by reading, that say what calls cost."""
TINY, SMALL, LARGE = 64, 512, 1024
"""Hidden sizes of the random models."""
TINY_LAYERS = (6, 24)
SEQUENCES, EACH = 4, 2
"""Sequences and rows of each that say what a sequence costs, beside as many rows of one."""
TINY_VOCABULARY, VOCABULARY = 32768, 256
CONTEXT = 64
DRAFT = 8
REPEATS = 5

Key = TypeVar("Key", bound=Hashable)


def here(repeats: int = REPEATS) -> Hardware:
    """The host that this process runs on, with the threads that it has."""
    return Gauge().measure(repeats)


@dataclass(frozen=True)
class Sample:
    """A random model. parameters, bytes: of one of its layers."""

    target: TransformersTarget
    parameters: int
    bytes: int

    @property
    def layers(self) -> int:
        return self.target.n_layers

    def work(self, rows: int, sequences: int = 1) -> Callable[[], Any]:
        """A pass over so many rows of each of so many sequences."""
        target = self.target
        slots: list[Slot] = [target.open() for _ in range(sequences)]
        for slot in slots:
            for _ in target.prefill(slot, list(range(1, CONTEXT + 1))):
                pass

        def work() -> None:
            target.forward([(slot, DraftTree.chain(5, tuple(range(6, 5 + rows)))) for slot in slots])
            for slot in slots:
                target.commit(slot, (0,))
                target.truncate(slot, CONTEXT)

        return work


class Gauge:
    """Measures this machine as often as it is asked to: what memory delivers may change from minute to minute."""

    @torch.inference_mode()
    def __init__(self) -> None:
        self.rates = measure_rates()
        few, many = (_sample(TINY, layers, TINY_VOCABULARY) for layers in TINY_LAYERS)
        small, large = (_sample(size, _enough(size), VOCABULARY) for size in (SMALL, LARGE))
        self._few, self._small, self._large = few, small, large
        self._works: dict[Any, Callable[[], Any]] = {"few": few.work(1), "many": many.work(1)}
        self._works |= {(name, n): sample.work(n) for name, sample in (("small", small), ("large", large)) for n in ROWS}
        self._works["sequences"] = small.work(EACH, SEQUENCES)

    @torch.inference_mode()
    def measure(self, repeats: int = REPEATS) -> Hardware:
        """The machine as it is now. repeats: of each timing; medians count."""
        seconds = _in_turns(self._works, repeats)
        tiny = (seconds["many"] - seconds["few"]) / (TINY_LAYERS[1] - TINY_LAYERS[0])
        whole = max(0.0, seconds["few"] - TINY_LAYERS[0] * tiny)
        small, large = (
            {n: (seconds[name, n] - whole) / sample.layers for n in ROWS}
            for name, sample in (("small", self._small), ("large", self._large))
        )
        share = self._small.bytes / (self._large.bytes - self._small.bytes)
        layer = statistics.median(small[n] - share * (large[n] - small[n]) for n in FEW)
        layer = min(max(layer, 0.0), min(large.values()) / 2)  # on a noisy machine
        beside = (seconds["sequences"] - seconds["small", SEQUENCES * EACH]) / self._small.layers
        sequence = min(max(beside / (SEQUENCES - 1), 0.0), layer)
        limits = {
            n: max(self._large.bytes / self.rates.bandwidth, 2 * n * self._large.parameters / self.rates.flops) for n in ROWS
        }
        facts = machine.machine()
        host = Device(
            name=f"this machine ({facts['processor']}, {facts['threads']} threads)",
            memory=float(facts["memory_bytes"] or 1 << 62),
            bandwidth=self.rates.bandwidth,
            flops=self.rates.flops,
            efficiency=1.0,
            flops_efficiency=1.0,
            overheads=Overheads(layer - sequence, sequence, whole, *_loop(self._few.target, seconds["few"])),
            curve=tuple((n, (large[n] - layer) / limits[n]) for n in ROWS),
        )
        return Hardware(host=host)


def _in_turns(works: Mapping[Key, Callable[[], Any]], repeats: int) -> dict[Key, float]:
    """Median seconds of each. They take turns, so that a change of the machine's speed meets all of them."""
    found: dict[Key, list[float]] = {key: [] for key in works}
    for repeat in range(repeats + 1):
        for key, work in works.items():
            taken = milliseconds(work) / 1e3
            if repeat:  # the first turn warms up
                found[key].append(taken)
    return {key: statistics.median(times) for key, times in found.items()}


def _enough(size: int) -> int:
    """Layers of that hidden size that no cache holds."""
    return 2 + 4 * last_cache() // (11 * size**2 * (4 if kernels.VARIANT == "off" else 2))


def _sample(size: int, layers: int, vocabulary: int) -> Sample:
    """A random model, packed as models on this machine are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(8, size // 64)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    parameters = sum(p.numel() for p in model.model.layers[0].parameters())
    if kernels.VARIANT == "off":
        return Sample(TransformersTarget(model), parameters, 4 * parameters)
    kernels.pack(model.to(torch.bfloat16))
    return Sample(TransformersTarget(model), parameters, 2 * parameters)


def _loop(target: TransformersTarget, a_pass: float) -> tuple[float, float, float]:
    """Seconds of a round outside passes, greedy: of each sequence; of each level that a model drafts; of each row and vocabulary entry.

    a_pass: seconds of a pass of the target over one row.
    """
    script = tuple(t for t, _ in zip(cycle(range(9, 99)), range(4096)))
    none, replay = (_rounds(target, ReplayDrafter(ReplayOptions(script=script)), draft) for draft in (0, DRAFT))
    drafted = _rounds(target, ModelDrafter(target, ModelOptions(min_probability=0.0)), DRAFT)
    turn, more = (
        statistics.median((r.times.total - r.times.forward - r.times.propose) / 1e9 for r in rounds)
        for rounds in (none, replay)
    )
    logit = max(0.0, (more - turn) / (DRAFT * TINY_VOCABULARY))
    level = statistics.median(r.times.propose / 1e9 / r.proposed for r in drafted)
    per_row = logit * TINY_VOCABULARY
    return max(0.0, turn - per_row), max(0.0, level - a_pass - per_row), logit


def _rounds(target: TransformersTarget, drafter: Drafter, draft: int) -> list[Round]:
    """Full rounds of a short text, without the first ones."""
    rounds = list(Engine(target, drafter, draft).generate([3] * CONTEXT, max_tokens=12 + 8 * draft, ignore_eos=True).rounds)
    return [r for r in rounds[2:] if r.proposed == draft]
