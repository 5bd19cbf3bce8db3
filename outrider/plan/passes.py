"""The time of one pass: bytes and operations of its parts, where they are done, and what else it costs.

A part takes ``max(bytes / bandwidth, operations / rate)``; the parts of a pass run one after the other, so their times add up. Overheads
are terms of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from .hardware import Device, Hardware
from .shapes import Layer, Shape
from .unions import Unions

STREAM_FROM = 32
"""Rows from which llama.cpp sends weights of the host over the link rather than compute there."""
OVERHEAD = "overhead"


@dataclass(frozen=True)
class Placement:
    """gpu_layers: so many layers from the END are on the GPU, the output matrix with them when all are (as `-ngl` counts).
    cpu_moe: of the model's first so many layers the experts stay on the host (as `--n-cpu-moe` counts).
    """

    gpu_layers: int = 0
    cpu_moe: int = 0

    def dense_on_gpu(self, layer: int, layers: int) -> bool:
        return layer >= layers - self.gpu_layers

    def experts_on_gpu(self, layer: int, layers: int) -> bool:
        return self.dense_on_gpu(layer, layers) and layer >= self.cpu_moe

    def head_on_gpu(self, layers: int) -> bool:
        return self.gpu_layers >= layers and layers > 0


@dataclass(frozen=True)
class Load:
    """What a pass computes: `rows` rows of each of `sequences` sequences behind `context` tokens."""

    rows: float = 1
    sequences: int = 1
    context: int = 0

    @property
    def all_rows(self) -> float:
        return self.rows * self.sequences


@dataclass(frozen=True)
class Term:
    """One part of a pass. where: gpu, host, or link; bound: memory, arithmetic or overhead."""

    what: str
    where: str
    bytes: float
    flops: float
    seconds: float
    bound: str


@dataclass(frozen=True)
class Pass:
    """The terms of a pass, and the time that overlap saves."""

    terms: tuple[Term, ...]
    saved: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(t.seconds for t in self.terms) - self.saved

    def part(self, *, bound: str | None = None, where: str | None = None) -> float:
        """Seconds of the terms with this bound or place."""
        return sum(t.seconds for t in self.terms if bound in (None, t.bound) and where in (None, t.where))

    @property
    def bound(self) -> str:
        """What most of the time goes to."""
        return max(("memory", "arithmetic", OVERHEAD), key=lambda bound: self.part(bound=bound))


def layer_kv(layer: Layer, shape: Shape, context: int) -> float:
    """Bytes of a layer's cache of one sequence."""
    return layer.kv * layer.reach(context) * shape.kv_bits / 8


def memory(shape: Shape, place: Placement, context: int, sequences: int) -> dict[str, float]:
    """Bytes on the `gpu` and on the `host`: weights and cache. The embeddings' table stays on the host where there is a choice."""
    n = len(shape.layers)
    used = {"gpu": 0.0, "host": 0.0}
    for i, layer in enumerate(shape.layers):
        dense = "gpu" if place.dense_on_gpu(i, n) else "host"
        used[dense] += layer.dense.bytes + sequences * layer_kv(layer, shape, context)
        used["gpu" if place.experts_on_gpu(i, n) else "host"] += layer.experts * layer.expert.bytes
    head = "gpu" if place.head_on_gpu(n) else "host"
    used[head] += shape.head.bytes
    if not (shape.tied and head == "host"):
        used["host"] += shape.embedding.bytes
    return used


def one_pass(shape: Shape, hardware: Hardware, place: Placement, load: Load, unions: Unions) -> Pass:
    """The predicted pass of a model over the load."""
    n = len(shape.layers)
    groups: dict[tuple[str, str], tuple[float, float]] = {}

    def add(what: str, where: str, size: float, flops: float) -> None:
        before = groups.get((what, where), (0.0, 0.0))
        groups[what, where] = (before[0] + size, before[1] + flops)

    for i, layer in enumerate(shape.layers):
        where = "gpu" if place.dense_on_gpu(i, n) else "host"
        add("dense layers", where, layer.dense.bytes, 2 * layer.dense.parameters * load.all_rows)
        seen = layer.reach(load.context + round(load.rows))
        add("attention", where, load.sequences * layer_kv(layer, shape, load.context), 2 * layer.scores * seen * load.all_rows)
        if layer.experts:
            touched = unions.of(layer.experts, layer.active, load.rows, load.sequences)
            flops = 2 * layer.active * layer.expert.parameters * load.all_rows
            add("experts", "gpu" if place.experts_on_gpu(i, n) else "host", touched * layer.expert.bytes, flops)
    head = "gpu" if place.head_on_gpu(n) else "host"
    add("output", head, shape.head.bytes, 2 * shape.head.parameters * load.all_rows)
    add("embeddings", head, load.all_rows * shape.embedding.bytes / shape.vocabulary, 0.0)
    terms = [_term(what, where, size, flops, hardware, load) for (what, where), (size, flops) in groups.items()]
    terms += _overheads(shape, hardware, place, load)
    on_host, on_gpu = (sum(t.seconds for t in terms if t.where == where) for where in ("host", "gpu"))
    return Pass(tuple(terms), hardware.overlap * min(on_host, on_gpu))


def _device(hardware: Hardware, where: str) -> Device:
    device = hardware.gpu if where == "gpu" else hardware.host or hardware.gpu
    assert device is not None
    return device


def _term(what: str, where: str, size: float, flops: float, hardware: Hardware, load: Load) -> Term:
    device = _device(hardware, where)
    reading, computing = device.reading(size), device.computing(flops)
    slack = device.slack(load.all_rows) if what in ("dense layers", "experts", "output") else 1.0
    seconds = max(reading, computing) * slack
    movable = what in ("dense layers", "experts", "output")
    if where == "host" and hardware.gpu and movable and load.all_rows >= STREAM_FROM:
        streamed = max(size / hardware.link, hardware.gpu.computing(flops))
        if streamed < seconds:
            return Term(f"{what}, sent to the GPU", "link", size, flops, streamed, "memory")
    return Term(what, where, size, flops, seconds, "memory" if reading >= computing else "arithmetic")


def _overheads(shape: Shape, hardware: Hardware, place: Placement, load: Load) -> list[Term]:
    n = len(shape.layers)
    on_gpu = min(place.gpu_layers, n)
    terms = []
    for where, layers in (("gpu", on_gpu), ("host", n - on_gpu)):
        if layers:
            device = _device(hardware, where)
            each = device.overheads.layer + load.sequences * device.overheads.layer_sequence
            terms.append(Term("calls of layers", where, 0, 0, layers * each, OVERHEAD))
    main = _device(hardware, "gpu" if on_gpu else "host").overheads
    terms.append(Term("calls of the pass", "gpu" if on_gpu else "host", 0, 0, main.whole, OVERHEAD))
    if crossings := _crossings(shape, place):
        size = crossings * load.all_rows * shape.hidden * 2
        terms.append(Term("crossings", "link", size, 0, crossings * hardware.crossing + size / hardware.link, OVERHEAD))
    return terms


def _crossings(shape: Shape, place: Placement) -> int:
    """How often a pass goes from one device to the other."""
    n = len(shape.layers)
    on_gpu: list[bool] = []
    for i, layer in enumerate(shape.layers):
        on_gpu.append(place.dense_on_gpu(i, n))
        if layer.experts:
            on_gpu.append(place.experts_on_gpu(i, n))
    on_gpu.append(place.head_on_gpu(n))
    return sum(a != b for a, b in pairwise(on_gpu))
