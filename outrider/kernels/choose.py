"""Which product takes the place of a model's linear layers on this CPU: decided by measurement, kept in a file.

For each distinct shape of a model's linear layers the candidates are timed at a few row counts, with weights that come from memory as
in a real pass: rotating copies, together larger than the last-level cache. All candidates do the arithmetic that was asked for:

- ``packed``: our kernel on weights in their own type, float32 sums;
- ``torch``: torch's own `linear`, on weights in the arithmetic's type;
- ``onednn``: oneDNN with weights that it packed beforehand, in the arithmetic's type.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .. import kernels
from ..files import cache_directory, write_json
from ..machine import machine
from . import PANEL, TYPES, Packed, PackedLinear

KERNEL_VERSION = 2
"""Part of the cache's key: goes up when the compiled kernels change their speed."""
FILE_VERSION = 1
ROWS = (1, 4, 8, 16)
WEIGHTS = (4, 3, 2, 1)
"""How much the time at each of ROWS counts: passes over few rows are the more frequent ones."""
MARGIN = 0.95
"""Another candidate takes the place of the first one only below this share of its time."""
SECONDS = 1.5
"""For measuring all shapes of a model, preparations left out."""
SMALL = 8 << 20
"""Models with fewer bytes in linear layers are not worth measuring: they fit in caches."""
MOST_COPIES = 64 << 20
"""Bytes of rotating copies that a candidate gets at most; three candidates make about 200 MB."""

BUSY = 0.05
"""A measurement is worth nothing when our threads waited for a core longer than this share of its time."""

Times = dict[str, tuple[float, ...]]
"""Milliseconds at each of ROWS by candidate."""


@dataclass(frozen=True)
class Shape:
    """A linear layer as far as its speed goes: `n` outputs, `k` inputs, the type of its weights, the type of the arithmetic.

    tied: the weight is the embeddings' too, so there must be a plain or a packed one of which rows can be read.
    """

    n: int
    k: int
    weights: torch.dtype
    arithmetic: torch.dtype = torch.float32
    tied: bool = False

    def __str__(self) -> str:
        types = [str(t).removeprefix("torch.") for t in (self.weights, self.arithmetic)]
        return f"{self.n}x{self.k} {types[0]} in {types[1]}{' tied' * self.tied}"


@dataclass(frozen=True)
class Choice:
    """What was chosen for a shape. times: empty when nothing was measured, and then `why` says why."""

    shape: Shape
    chosen: str
    times: Times
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        times = {name: dict(zip(ROWS, of)) for name, of in self.times.items()}
        return {"shape": str(self.shape), "chosen": self.chosen, "ms": times, "why": self.why}


def candidates(shape: Shape) -> tuple[str, ...]:
    """What can compute this shape here; the first one stays unless another is clearly faster."""
    ours = ("packed",) if kernels.VARIANT != "off" else ()
    return (*ours, "torch", *(("onednn",) if not shape.tied and has_onednn(shape.arithmetic) else ()))


def has_onednn(arithmetic: torch.dtype) -> bool:
    """Whether this build of torch has the products of oneDNN on packed weights."""
    there = torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    )
    if not there or arithmetic == torch.float32:
        return there
    return arithmetic == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def mean(times: Sequence[float]) -> float:
    """Weighted mean over ROWS."""
    return sum(weight * t for weight, t in zip(WEIGHTS, times)) / sum(WEIGHTS)


def decide(times: Times, allowed: Sequence[str]) -> str:
    """The fastest, if it is clearly faster than the first of `allowed`; else that one."""
    first = allowed[0]
    best = min((name for name in allowed if name in times), key=lambda name: mean(times[name]), default=first)
    if first not in times or mean(times[best]) < MARGIN * mean(times[first]):
        return best
    return first


# ---- for a whole model ----------------------------------------------------------------------------------------------


def linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers that can be exchanged: parent, name there, layer. A layer that stands in several places comes with each."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()  # unlike named_children it has a layer under every name
        if type(child) is nn.Linear and child.weight.dtype in TYPES and child.weight.device.type == "cpu"
    ]


def is_tied(model: Any) -> bool:
    """Whether output projection and embeddings are one matrix; a module that is no language model has neither."""
    if not hasattr(model, "get_output_embeddings"):
        return False
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return head is not None and type(head) is nn.Linear and head.weight.data_ptr() == embedding.weight.data_ptr()


def shapes(model: Any, arithmetic: torch.dtype) -> dict[nn.Linear, Shape]:
    """The shape of each linear layer that can be exchanged."""
    head = model.get_output_embeddings() if is_tied(model) else None
    return {
        layer: Shape(layer.out_features, layer.in_features, layer.weight.dtype, arithmetic, layer is head)
        for _, _, layer in linears(model)
    }


def choose(model: Any, arithmetic: torch.dtype = torch.float32) -> dict[Shape, Choice]:
    """What should compute each shape of a model's linear layers; measured now unless the cache knows it."""
    layers = shapes(model, arithmetic)
    distinct = sorted(set(layers.values()), key=str)
    if os.environ.get("OUTRIDER_KERNEL"):
        return {s: Choice(s, candidates(s)[0], {}, "OUTRIDER_KERNEL is set") for s in distinct}
    if sum(s.n * s.k * s.weights.itemsize for s in layers.values()) < SMALL:
        return {s: Choice(s, candidates(s)[0], {}, "too small to measure") for s in distinct}
    known = recall()
    unknown = [s for s in distinct if not set(candidates(s)) <= known.get(str(s), {}).keys()]
    if unknown:
        measured = {str(s): times for s, times in measure(unknown).items()}
        if not measured:
            return {s: Choice(s, candidates(s)[0], {}, "the machine is busy") for s in distinct}
        remember(measured)
        known |= measured
    return {s: Choice(s, decide(known[str(s)], candidates(s)), known[str(s)]) for s in distinct}


def build(chosen: str, layer: nn.Linear, arithmetic: torch.dtype) -> nn.Module:
    """The module that takes the layer's place; the layer itself, in the arithmetic's type, for ``torch``. Else it loses its weight."""
    if chosen == "torch":
        for tensor in layer.parameters():
            tensor.data = tensor.data.to(arithmetic)
        return layer
    weight = layer.weight
    del layer.weight
    if chosen == "packed":
        return PackedLinear(Packed(weight), layer.bias)
    return OneDNNLinear(weight, layer.bias, arithmetic)


class OneDNNLinear(nn.Module):
    """Takes the place of an `nn.Linear`: oneDNN's product on weights in the order in which oneDNN likes to read them."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, arithmetic: torch.dtype):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        plain = weight.detach().to(arithmetic).contiguous()
        self.opaque = torch.ops.mkldnn._reorder_linear_weight(plain, ROWS[1])  # no buffer: it has no address
        self.opaque_bytes = plain.nbytes
        self.register_buffer("bias", None if bias is None else bias.detach().to(arithmetic), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        return torch.ops.mkldnn._linear_pointwise(x, self.opaque, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


# ---- measuring ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure(wanted: Sequence[Shape], seconds: float = SECONDS) -> dict[Shape, Times]:
    """Median milliseconds of every candidate for every shape; nothing at all when others used our cores meanwhile."""
    size = min(MOST_COPIES, max(2 * last_cache(), MOST_COPIES // 4))
    # The same bits are small numbers in every type. A pool for each candidate: none finds in the cache what another has read.
    pools = {name: torch.full((size // 2,), 0x3C00, dtype=torch.int16) for name in ("packed", "torch")}
    found: dict[Shape, Times] = {}
    for shape in wanted:
        waited, began = _waited(), time.perf_counter()
        found[shape] = _time(shape, pools, seconds / len(wanted))
        if _waited() - waited > BUSY * (time.perf_counter() - began):
            return {}
    return found


def _waited() -> float:
    """Seconds that our threads were ready to run but other processes had the cores; 0 where the system does not say."""
    try:
        tasks = Path("/proc/self/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def last_cache() -> int:
    """Bytes of the last-level cache, 32 MiB where the system does not say."""
    try:
        levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        return int(levels[-1].read_text().strip().removesuffix("K")) << 10
    except (OSError, IndexError, ValueError):
        return 32 << 20


def _time(shape: Shape, pools: Mapping[str, Tensor], seconds: float) -> Times:
    """Of a shape too large for two copies in a pool, as many outputs are timed as fit, and the time is scaled up."""
    room = pools["torch"].nbytes // 2 // (shape.k * 4)
    n = shape.n if shape.n <= room else max(PANEL, room // PANEL * PANEL)
    copies = {name: list(_copies(name, n, shape, pools)) for name in candidates(shape)}
    inputs = [torch.full((rows, shape.k), 0.5, dtype=shape.arithmetic) for rows in ROWS]
    found: dict[str, list[list[float]]] = {name: [[] for _ in ROWS] for name in copies}
    used = dict.fromkeys(copies, 0)
    began = time.perf_counter()
    for turn in range(16):
        if turn > 3 and time.perf_counter() - began > seconds:
            break
        for i, x in enumerate(inputs):
            for name, modules in copies.items():
                module = modules[used[name] % len(modules)]
                used[name] += 1
                taken = milliseconds(lambda: module(x))  # noqa: B023
                if turn:  # the first round warms up
                    found[name][i].append(taken)
    return {name: tuple(statistics.median(t) * shape.n / n for t in times) for name, times in found.items()}


def _copies(name: str, n: int, shape: Shape, pools: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """A candidate's modules with n outputs, each with a weight of its own."""
    dtype = shape.weights if name == "packed" else shape.arithmetic
    outputs = (n + PANEL - 1) // PANEL * PANEL if name == "packed" else n
    pool = pools["torch" if name == "onednn" else name].view(dtype)
    size = outputs * shape.k
    for start in range(0, max(1, len(pool) // size * size), size):
        weight = pool[start : start + size]
        if name == "packed":
            yield PackedLinear(Packed.of(weight.view(-1, shape.k, PANEL), n))
        elif name == "torch":
            yield _plain(weight.view(n, shape.k))
        else:
            yield OneDNNLinear(weight.view(n, shape.k), None, shape.arithmetic)


def _plain(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def milliseconds(work: Callable[[], Any]) -> float:
    """How long one call of `work` takes."""
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


# ---- the file -------------------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Where measurements are kept: $OUTRIDER_CACHE, else ~/.cache/outrider/kernels.json."""
    given = os.environ.get("OUTRIDER_CACHE")
    return Path(os.path.expanduser(given)) if given else cache_directory() / "kernels.json"


def key() -> str:
    """What a measurement holds for: processor, threads, versions, instruction set."""
    here = machine()
    parts = (here["processor"], f"{here['threads']} threads", f"torch {torch.__version__}", f"kernel {KERNEL_VERSION}")
    return ", ".join((*parts, kernels.VARIANT))


def recall() -> dict[str, Times]:
    """What has been measured on this machine, by shape. A file that is missing or broken knows nothing."""
    found: dict[str, Times] = {}
    try:
        for shape, times in _read()["machines"].get(key(), {}).items():
            made = {str(name): tuple(float(t) for t in of) for name, of in times.items()}
            if all(len(of) == len(ROWS) and min(of) > 0 for of in made.values()):
                found[shape] = made
    except (AttributeError, TypeError, ValueError):
        return {}
    return found


def remember(measured: Mapping[str, Times]) -> None:
    """Add to the file, whole or not at all. Where it cannot be written, the next process measures again."""
    value = _read()
    if not isinstance(value["machines"].get(key()), dict):
        value["machines"][key()] = {}
    value["machines"][key()].update(
        {s: {c: [round(t, 5) for t in of] for c, of in times.items()} for s, times in measured.items()}
    )
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)
    except OSError:
        return


def _read() -> dict[str, Any]:
    try:
        value = json.loads(cache_file().read_text(encoding="utf-8"))
        if value["version"] == FILE_VERSION and isinstance(value["machines"], dict):
            return value
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return {"version": FILE_VERSION, "machines": {}}
