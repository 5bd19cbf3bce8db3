"""How near a target's passes on the CPU come to what the machine allows.

A pass must read its weights once (embeddings: only its rows; experts: only those that its rows chose) and the keys and values of the
context, and it must do two floating-point operations for each weight and row. So it takes at least ``max(bytes / bandwidth, operations
/ rate)``; bandwidth and rate are measured, on the same threads.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Iterator, Sequence

import torch
from rich.table import Table
from torch import Tensor, nn

from .. import kernels
from ..check import measure_rows, text_tokens
from ..errors import ParameterError
from ..kernels import PANEL, Packed, WideEmbedding
from ..kernels.choose import OneDNNLinear, last_cache
from ..kernels.fused import GatedMLP
from ..targets.base import Slot, Target
from ..targets.transformers import TransformersTarget
from ..tree import DraftTree

RESULT_VERSION = 1
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SECONDS = 0.5
"""For each of the machine's two rates and each way of measuring it."""

LEGEND = """\
limit = the longer of bytes / bandwidth and operations / rate; of limit = measured / limit; of 1 row = measured / measured at 1 row
bytes = weights once (embeddings: these rows; experts: those chosen), keys and values of the context; the limit's cause in its column"""


@dataclass(frozen=True)
class Rates:
    """What the machine can do: bytes read and floating-point operations, per second. ways: all that were tried, by name; the best
    of each kind counts.
    """

    bandwidth: float
    flops: float
    ways: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """What a pass must do."""

    bytes: int
    flops: int

    def seconds(self, rates: Rates) -> float:
        """The least time that it can take."""
        return max(self.bytes / rates.bandwidth, self.flops / rates.flops)

    def bound(self, rates: Rates) -> str:
        """What decides that: ``memory`` or ``arithmetic``."""
        return "memory" if self.bytes / rates.bandwidth >= self.flops / rates.flops else "arithmetic"


def roofline(target: Target, context: int = 128, repeats: int = 7, rates: Rates | None = None) -> dict[str, Any]:
    """Everything about one target, for JSON. rates: measured, unless given. Raises ParameterError for other than a CPU."""
    if not isinstance(target, TransformersTarget) or target.device.type != "cpu":
        raise ParameterError(f"{target.name}: a roofline is drawn for transformers targets on the CPU only")
    rates = rates or measure_rates(target.dtype)
    prompt, ahead = text_tokens(target, context, max(ROWS))
    slot = target.open()
    try:
        for _ in target.prefill(slot, prompt):
            pass
        work = {n: count(target, slot, ahead[:n]) for n in ROWS}
        times = measure_rows(target, slot, ahead, ROWS, repeats)
    finally:
        target.close(slot)
    return {
        "target": target.describe(),
        "context": context,
        "repeats": repeats,
        "rates": asdict(rates),
        "rows": [
            {
                "rows": n,
                "ms": times[n],
                "bytes": work[n].bytes,
                "flops": work[n].flops,
                "limit_ms": 1e3 * work[n].seconds(rates),
                "bound": work[n].bound(rates),
                "of_limit": times[n] / (1e3 * work[n].seconds(rates)),
                "of_one_row": times[n] / times[1],
            }
            for n in ROWS
        ],
    }


def heading(found: dict[str, Any]) -> str:
    """Under which conditions, in a line."""
    rates = found["rates"]
    return (
        f"{found['context']} tokens of context, medians of {found['repeats']}; this machine reads "
        f"{rates['bandwidth'] / 1e9:.1f} GB/s and does {rates['flops'] / 1e9:.0f} GFLOP/s"
    )


def table(found: dict[str, Any]) -> Table:
    """One line for each number of rows."""
    made = Table(title=found["target"]["name"], title_justify="left")
    for name in ("rows", "ms", "MB", "GFLOP", "limit ms", "because of", "of limit", "of 1 row"):
        made.add_column(name, justify="right")
    for row in found["rows"]:
        made.add_row(
            str(row["rows"]),
            f"{row['ms']:.2f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['flops'] / 1e9:.2f}",
            f"{row['limit_ms']:.2f}",
            row["bound"],
            f"{row['of_limit']:.2f}",
            f"{row['of_one_row']:.2f}",
        )
    return made


# ---- what a pass must do --------------------------------------------------------------------------------------------


def count(target: TransformersTarget, slot: Slot, tokens: Sequence[int]) -> Work:
    """The work of a pass over these tokens behind the slot's, counted in the modules that really run. The slot stays as it is."""
    counter = _Counter()
    handles = [module.register_forward_pre_hook(counter, with_kwargs=True) for module in target.model.modules()]
    length = slot.length
    try:
        target.forward([(slot, DraftTree.chain(tokens[0], tokens[1:]))])
    finally:
        for handle in handles:
            handle.remove()
    attention = _attention(target, slot, len(tokens))
    target.commit(slot, (0,))
    target.truncate(slot, length)
    return Work(sum(counter.read.values()) + attention.bytes, counter.flops + attention.flops)


class _Counter:
    """A hook that adds up, for every module that owns tensors, what it reads (each tensor once) and computes."""

    def __init__(self) -> None:
        self.read: dict[Any, int] = {}
        self.flops = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if isinstance(module, Packed):
            self._matrix(module.panels.data_ptr(), module.n * module.k, module.panels.itemsize, first)
        elif isinstance(module, GatedMLP):
            for half in (module.gate, module.up):
                self._matrix(half.panels.data_ptr(), half.n * half.k, half.panels.itemsize, first)
        elif isinstance(module, OneDNNLinear):
            self._matrix(id(module), module.in_features * module.out_features, module.opaque_bytes, first, module)
        elif isinstance(module, (nn.Embedding, WideEmbedding)):
            self._embedding(module, first)
        elif stacks := [p for p in module.parameters(recurse=False) if p.dim() == 3]:
            self._experts(stacks, [*args, *kwargs.values()])
        else:
            self._others(module, first)

    def _matrix(self, key: Any, elements: int, size: int, x: Tensor | None, whole: OneDNNLinear | None = None) -> None:
        """size: bytes of an element, or of everything when there is a `whole`."""
        assert x is not None
        inputs = whole.in_features if whole else x.shape[-1]
        self.read[key] = size if whole else elements * size
        self.flops += 2 * elements * (x.numel() // inputs)

    def _embedding(self, module: nn.Embedding | WideEmbedding, index: Tensor | None) -> None:
        assert index is not None
        held = module.weight if isinstance(module, nn.Embedding) else module.table
        width, size = (held.k, held.panels.itemsize) if isinstance(held, Packed) else (held.shape[-1], held.itemsize)
        self.read["rows of", id(module)] = index.numel() * width * size

    def _experts(self, stacks: Sequence[Tensor], values: Sequence[Any]) -> None:
        """Stacked matrices ``[experts, ., .]`` that were not packed: the module is told which of them each row chose."""
        chosen = next((v for v in values if isinstance(v, Tensor) and not v.is_floating_point() and v.dim() == 2), None)
        for stack in stacks:
            each = stack[0].numel()
            experts = stack.shape[0] if chosen is None else len(chosen.unique())
            self.read[stack.data_ptr()] = experts * each * stack.itemsize
            self.flops += 2 * each * (experts if chosen is None else chosen.numel())

    def _others(self, module: nn.Module, x: Tensor | None) -> None:
        """A plain linear layer (or GPT-2's transposed one); norms, biases and the like."""
        for name, tensor in module.named_parameters(recurse=False):
            self.read[tensor.data_ptr()] = tensor.nbytes
            if name == "weight" and tensor.dim() == 2 and x is not None:
                self.flops += 2 * tensor.numel() * (x.numel() // x.shape[-1])
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            self.read[bias.data_ptr()] = bias.nbytes


def _attention(target: TransformersTarget, slot: Any, rows: int) -> Work:
    """Reading the context's keys and values as far as a layer's window reaches, and the products with them and the pass's own."""
    heads = target.model.config.get_text_config().num_attention_heads
    read = flops = 0
    for layer, keys in slot.keys.items():
        values = slot.values[layer]
        window = target._last_pass.windows.get(layer)
        reach = slot.length if window is None else min(slot.length, window - 1)
        read += sum(t.shape[0] * reach * t.shape[2] * t.itemsize for t in (keys, values))
        seen = sum(min(slot.length + i + 1, window or slot.length + i + 1) for i in range(rows))
        flops += 2 * heads * (keys.shape[2] + values.shape[2]) * seen
    return Work(read, flops)


# ---- what the machine can do ----------------------------------------------------------------------------------------


@torch.inference_mode()
def measure_rates(dtype: torch.dtype = torch.float32, seconds: float = SECONDS) -> Rates:
    """The best rates that torch and our kernel reach on torch's threads; dtype: in which the model computes."""
    streams = {name: size / _best(work, seconds) for name, work, size in _streams()}
    products = {name: flops / _best(work, seconds) for name, work, flops in _products(dtype)}
    return Rates(max(streams.values()), max(products.values()), streams | products)


def _streams() -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Ways to read a buffer much larger than the caches: name, work, bytes."""
    size = max(256 << 20, 4 * last_cache())
    buffer = torch.full((size // 2,), 0x3C00, dtype=torch.int16)
    yield "torch sum", buffer.view(torch.float32).sum, size
    if kernels.VARIANT != "off":
        inputs = 4096
        panels = buffer[: size // 2 // (inputs * PANEL) * inputs * PANEL].view(torch.bfloat16).view(-1, inputs, PANEL)
        packed, x = Packed.of(panels, len(panels) * PANEL), torch.ones(1, inputs)
        yield "packed 1 row", lambda: packed(x), panels.nbytes


def _products(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Products of many rows with a matrix that stays in the caches: name, work, operations."""
    for kind in dict.fromkeys((torch.float32, dtype)):
        a, b = torch.full((2, 1024, 1024), 0.5, dtype=kind)
        yield f"torch {str(kind).removeprefix('torch.')} product", lambda a=a, b=b: a @ b, 2 * 1024**3  # type: ignore[misc]
    if kernels.VARIANT != "off":
        packed, x = Packed(torch.full((1024, 512), 0.5, dtype=torch.bfloat16)), torch.full((96, 512), 0.5)
        yield "packed 96 rows", lambda: packed(x), 2 * 96 * 1024 * 512


def _best(work: Callable[[], Any], seconds: float) -> float:
    """Least seconds of one call; at least three are made after one to warm up."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
