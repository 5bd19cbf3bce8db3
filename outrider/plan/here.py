"""This machine as hardware: what its memory, its arithmetic and our code between them reach, all measured in some seconds.

Nothing here depends on the models that are planned: the rates are those of the roofline, the overheads those of random models too small to
read anything, the curve that of one matrix shape streamed from memory. So a prediction from it is a prediction.
"""

from __future__ import annotations

import statistics
from itertools import cycle
from typing import Any, Callable

import torch
from torch import nn

from .. import kernels, machine
from ..bench.roofline import Rates, measure_rates
from ..drafters.replay import ReplayDrafter, ReplayOptions
from ..engine import Engine
from ..kernels import Packed, pack
from ..kernels.choose import last_cache, milliseconds
from ..targets.transformers import TransformersTarget
from ..trace import Round
from ..tree import DraftTree
from .hardware import Device, Hardware, Overheads

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24, 32, 36, 48)
OUTPUTS, INPUTS = 2048, 2048
LAYERS = (6, 24)
VOCABULARY = 32768
CONTEXT = 64
REPEATS = 7


@torch.inference_mode()
def here(repeats: int = REPEATS) -> Hardware:
    """The host that this process runs on, with the threads that it has."""
    rates, overheads = measure_rates(), _overheads(repeats)
    facts = machine.machine()
    host = Device(
        name=f"this machine ({facts['processor']}, {facts['threads']} threads)",
        memory=float(facts["memory_bytes"] or 1 << 62),
        bandwidth=rates.bandwidth,
        flops=rates.flops,
        efficiency=1.0,
        flops_efficiency=1.0,
        overheads=overheads,
        curve=_curve(rates, repeats),
    )
    return Hardware(host=host)


def _curve(rates: Rates, repeats: int) -> tuple[tuple[int, float], ...]:
    """By rows: time over the limit of products whose weights come from memory. The numbers of rows take turns."""
    packed = kernels.VARIANT != "off"
    size = OUTPUTS * INPUTS * (2 if packed else 4)
    copies = max(8, 4 * last_cache() // size)
    products: list[Callable[[Any], Any]] = []
    for _ in range(copies):
        if packed:
            products.append(Packed(torch.full((OUTPUTS, INPUTS), 0.5, dtype=torch.bfloat16)))
        else:
            products.append(nn.Linear(INPUTS, OUTPUTS, bias=False))
    found: dict[int, list[float]] = {n: [] for n in ROWS}
    inputs = {n: torch.full((n, INPUTS), 0.5) for n in ROWS}

    def run(x: torch.Tensor) -> None:
        for product in products:
            product(x)

    for repeat in range(repeats + 1):
        for n in ROWS:
            taken = milliseconds(lambda n=n: run(inputs[n])) / 1e3  # type: ignore[misc]
            if repeat:
                found[n].append(taken)
    limits = {n: max(size / rates.bandwidth, 2 * n * OUTPUTS * INPUTS / rates.flops) for n in ROWS}
    return tuple((n, statistics.median(times) / copies / limits[n]) for n, times in found.items())


def _tiny(layers: int) -> TransformersTarget:
    """A random model whose weights stay in the caches: what its passes cost is calls."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    if kernels.VARIANT != "off":
        pack(model)
    return TransformersTarget(model)


def _overheads(repeats: int) -> Overheads:
    few, many = (_tiny(layers) for layers in LAYERS)
    one = [_pass_seconds(target, 1, repeats) for target in (few, many)]
    four = [_pass_seconds(target, 4, repeats) for target in (few, many)]
    span = LAYERS[1] - LAYERS[0]
    per_layer = {n: (times[1] - times[0]) / span for n, times in ((1, one), (4, four))}
    layer_sequence = max(0.0, (per_layer[4] - per_layer[1]) / 3)
    whole = max(0.0, one[0] - LAYERS[0] * per_layer[1])
    turn, logit = _loop(few)
    return Overheads(max(0.0, per_layer[1] - layer_sequence), layer_sequence, whole, turn, logit)


def _pass_seconds(target: TransformersTarget, sequences: int, repeats: int) -> float:
    """Median seconds of a pass over two rows of each of so many sequences."""
    slots = [target.open() for _ in range(sequences)]
    for slot in slots:
        for _ in target.prefill(slot, list(range(1, CONTEXT + 1))):
            pass

    def one() -> None:
        target.forward([(slot, DraftTree.chain(5, (7,))) for slot in slots])
        for slot in slots:
            target.commit(slot, (0,))
            target.truncate(slot, CONTEXT)

    times = [milliseconds(one) / 1e3 for _ in range(3 * repeats + 2)]
    for slot in slots:
        target.close(slot)
    return statistics.median(times[2:])


def _loop(target: TransformersTarget) -> tuple[float, float]:
    """Seconds of a round outside passes and drafting, greedy: for each sequence, and for each row and vocabulary entry."""
    seconds = {}
    for draft in (0, 8):
        drafter = ReplayDrafter(ReplayOptions(script=tuple(t for t, _ in zip(cycle(range(9, 99)), range(4096)))))
        engine = Engine(target, drafter, draft)
        rounds: list[Round] = list(engine.generate([3] * CONTEXT, max_tokens=40, ignore_eos=True).rounds)[2:-9]
        seconds[draft] = statistics.median((r.times.total - r.times.forward - r.times.propose) / 1e9 for r in rounds)
    logit = max(0.0, (seconds[8] - seconds[0]) / (8 * VOCABULARY))
    return max(0.0, seconds[0] - logit * VOCABULARY), logit
