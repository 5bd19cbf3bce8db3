"""Hardware as small data: what a device holds, reads and computes, and what software reaches of it.

Bandwidths and memory are datasheet values; arithmetic is that of dense 16-bit products with 32-bit sums where the datasheet says so,
else estimated. `efficiency` is the share of the bandwidth that software reaches. `here` measures this machine instead.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import LoadError, ParameterError

GB = 1e9
GIB = 2.0**30
GPU_EFFICIENCY, HOST_EFFICIENCY = 0.8, 0.5
FLOPS_EFFICIENCY = 0.6


@dataclass(frozen=True)
class Overheads:
    """Seconds that are neither reading nor arithmetic. They are never hidden in an efficiency.

    layer, layer_sequence: of each layer in each pass, and for each sequence in it. whole: of each pass. turn: of each sequence and
    round, in the loop around the passes. step: of each sequence and level that a model drafts, around its passes. logit: of each row
    and vocabulary entry, from logits to probabilities.
    """

    layer: float = 0.0
    layer_sequence: float = 0.0
    whole: float = 0.0
    turn: float = 0.0
    step: float = 0.0
    logit: float = 0.0


GPU_OVERHEADS = Overheads(layer=40e-6, whole=500e-6)
HOST_OVERHEADS = Overheads(layer=30e-6, whole=200e-6)


@dataclass(frozen=True)
class Device:
    """Something with a memory and arithmetic units.

    memory: bytes; bandwidth: bytes per second; flops: operations per second. efficiency, flops_efficiency: shares of these that
    software reaches. curve: measured ``(rows, time over the limit of bytes and operations)`` of products, where it was measured.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    efficiency: float = GPU_EFFICIENCY
    flops_efficiency: float = FLOPS_EFFICIENCY
    overheads: Overheads = GPU_OVERHEADS
    curve: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "flops", "efficiency", "flops_efficiency"):
            if not getattr(self, name) > 0:
                raise ParameterError(f"{self.name}: {name} must be more than 0; got {getattr(self, name)}")

    def reading(self, size: float) -> float:
        """Seconds to read so many bytes."""
        return size / (self.bandwidth * self.efficiency)

    def computing(self, flops: float) -> float:
        """Seconds of so many operations."""
        return flops / (self.flops * self.flops_efficiency)

    def slack(self, rows: float) -> float:
        """Measured time over the limit of a product of so many rows, between measured numbers of rows by a straight line."""
        if not self.curve:
            return 1.0
        below = max((p for p in self.curve if p[0] <= rows), default=self.curve[0])
        above = min((p for p in self.curve if p[0] >= rows), default=self.curve[-1])
        if above[0] == below[0]:
            return below[1]
        return below[1] + (above[1] - below[1]) * (rows - below[0]) / (above[0] - below[0])


@dataclass(frozen=True)
class Hardware:
    """A machine: a GPU, a host, or both with a link between them.

    link: bytes per second one way. crossing: seconds of each change of device within a pass. reserve: bytes of the GPU's memory for
    its context and work buffers. overlap: share of the shorter device's time that runs beside the longer's.
    """

    gpu: Device | None = None
    host: Device | None = None
    link: float = 25 * GB
    crossing: float = 50e-6
    reserve: float = 0.8 * GB
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if self.gpu is None and self.host is None:
            raise ParameterError("hardware needs a GPU, a host or both: --gpu NAME, --host NAME, --here or --hardware FILE")
        if not 0 <= self.overlap <= 1:
            raise ParameterError(f"overlap must be from 0 to 1; got {self.overlap}")
        if not self.link > 0 or self.crossing < 0 or self.reserve < 0:
            raise ParameterError("the link must be more than 0; crossing and reserve cannot be negative")

    @property
    def name(self) -> str:
        return " with ".join(d.name for d in (self.gpu, self.host) if d)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, as `read_hardware` reads it."""
        return asdict(self)


def _gpu(name: str, memory: float, bandwidth: float, tflops: float, **more: Any) -> Device:
    return Device(name, memory * GIB, bandwidth * GB, tflops * 1e12, **more)


def _host(name: str, bandwidth: float, gflops: float, memory: float = 64) -> Device:
    return Device(name, memory * GB, bandwidth * GB, gflops * GB, HOST_EFFICIENCY, overheads=HOST_OVERHEADS)


GPUS: dict[str, Device] = {
    d.name: d
    for d in (
        _gpu("RTX 3060", 12, 360, 25),
        _gpu("RTX 3090", 24, 936, 71),
        _gpu("RTX 4060", 8, 272, 30),
        _gpu("RTX 4070", 12, 504, 58),
        _gpu("RTX 4090", 24, 1008, 165),
        _gpu("RTX 5060", 8, 448, 38),
        _gpu("RTX 5060 Ti", 16, 448, 47),
        _gpu("RTX 5090", 32, 1792, 210),
        _gpu("Tesla P40", 24, 346, 11.8),
        _gpu("T4", 16, 320, 65),
        _gpu("L4", 24, 300, 121),
        _gpu("A100", 80, 2039, 312),
        _gpu("H100", 80, 3350, 990),
        _gpu("H200", 141, 4800, 990),
        _gpu("M2 Pro", 32, 200, 6.8),
        _gpu("M2 Ultra", 192, 800, 27),
        _gpu("M3 Max", 128, 400, 14),
    )
}
HOSTS: dict[str, Device] = {
    d.name: d
    for d in (
        _host("DDR4-3200", 51.2, 700),
        _host("DDR5-5600", 89.6, 1000),
        _host("DDR5-6400", 102.4, 1200),
        _host("8 channels DDR4-3200", 204.8, 2000, 256),
        _host("12 channels DDR5-4800", 460.8, 5000, 384),
    )
}


def find(name: str, table: dict[str, Device], option: str) -> Device:
    """The device called so, whatever the case and blanks. Raises ParameterError."""
    plain = {"".join(key.lower().split()): device for key, device in table.items()}
    wanted = "".join(name.lower().split())
    if device := plain.get(wanted):
        return device
    near = [plain[key].name for key in difflib.get_close_matches(wanted, plain, 3)]
    raise ParameterError(
        f"{option}: no device {name!r} in the table; {'near: ' + ', '.join(near) if near else 'it has ' + ', '.join(table)}; "
        "or describe it in a file for --hardware"
    )


def read_hardware(path: str | Path) -> Hardware:
    """Hardware from a JSON file: `gpu` and `host` with the fields of Device (bytes, bytes/s, operations/s), and Hardware's own."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"cannot read the hardware {path}: {error.strerror}") from error
    except ValueError as error:
        raise LoadError(f"{path} is not JSON: {error}") from error
    try:
        devices: dict[str, Any] = {name: _device(value.pop(name)) for name in ("gpu", "host") if value.get(name)}
        value = {k: v for k, v in value.items() if k not in ("gpu", "host")}
        return Hardware(**devices, **value)
    except (TypeError, AttributeError) as error:
        known = ", ".join(f.name for f in fields(Device))
        raise LoadError(f"{path}: {error}; a device has {known}") from error


def _device(value: dict[str, Any]) -> Device:
    overheads = value.get("overheads")
    if overheads is not None:
        value = {**value, "overheads": Overheads(**overheads)}
    return Device(**{**value, "curve": tuple(map(tuple, value.get("curve", ())))})


def with_efficiency(device: Device, efficiency: float) -> Device:
    """The device whose software reaches that share of its bandwidth."""
    if not 0 < efficiency <= 1:
        raise ParameterError(f"an efficiency is above 0 and at most 1; got {efficiency}")
    return replace(device, efficiency=efficiency)
