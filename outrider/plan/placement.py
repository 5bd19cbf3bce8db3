"""Where a model's layers and experts go, and whether everything fits."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ParameterError
from .hardware import Hardware
from .passes import Placement, memory
from .shapes import Shape


@dataclass(frozen=True)
class Fit:
    """Bytes used and there, by ``gpu`` and ``host``. parts: what uses them."""

    used: dict[str, float]
    there: dict[str, float]
    parts: dict[str, dict[str, float]]

    @property
    def fits(self) -> bool:
        return all(self.used[where] <= self.there.get(where, 0.0) for where in self.used if self.used[where])

    @property
    def problem(self) -> str:
        """What does not fit, in words; empty where all does."""
        over = [
            f"{where}: {self.used[where] / 1e9:.1f} GB needed, {self.there.get(where, 0) / 1e9:.1f} GB there"
            for where in self.used
            if self.used[where] > self.there.get(where, 0.0)
        ]
        return "; ".join(over)


@dataclass(frozen=True)
class Tenant:
    """A model in memory, with its placement."""

    shape: Shape
    place: Placement


def everything(shape: Shape) -> Placement:
    """All of a model on the GPU."""
    return Placement(len(shape.layers))


def fit(hardware: Hardware, tenants: list[Tenant], context: int, sequences: int, rows: int) -> Fit:
    """Whether these models with their caches, and the logits of `rows` rows of the first one, fit."""
    parts: dict[str, dict[str, float]] = {"gpu": {}, "host": {}}
    for tenant in tenants:
        for where, size in memory(tenant.shape, tenant.place, context, sequences).items():
            where = where if getattr(hardware, where) else ("host" if where == "gpu" else "gpu")
            parts[where][tenant.shape.name] = parts[where].get(tenant.shape.name, 0.0) + size
    main = "gpu" if hardware.gpu and tenants[0].place.gpu_layers else "host" if hardware.host else "gpu"
    parts[main]["logits"] = 4.0 * rows * sequences * tenants[0].shape.vocabulary
    if hardware.gpu:
        parts["gpu"]["reserve"] = hardware.reserve
    there = {where: device.memory for where in ("gpu", "host") if (device := getattr(hardware, where))}
    return Fit({where: sum(sizes.values()) for where, sizes in parts.items()}, there, parts)


def place(shape: Shape, hardware: Hardware, others: list[Tenant], context: int, sequences: int, rows: int) -> Placement:
    """As much on the GPU as fits beside the others: whole layers; of sparse models the experts leave it first."""
    n = len(shape.layers)
    if hardware.gpu is None:
        return Placement(0)
    if hardware.host is None:
        return Placement(n)

    def fits(candidate: Placement) -> bool:
        found = fit(hardware, [Tenant(shape, candidate), *others], context, sequences, rows)
        return found.used["gpu"] <= found.there["gpu"]

    candidates = [Placement(n, k) for k in range(n + 1)] if shape.sparse else []
    candidates += [Placement(k, n if shape.sparse else 0) for k in range(n, -1, -1)]
    return next((candidate for candidate in candidates if fits(candidate)), Placement(0))


def check_given(shape: Shape, hardware: Hardware, given: Placement) -> Placement:
    """A placement that the user asked for. Raises ParameterError where the hardware or the model has no such thing."""
    n = len(shape.layers)
    if given.gpu_layers and hardware.gpu is None:
        raise ParameterError(f"--ngl {given.gpu_layers}: this hardware has no GPU")
    if given.cpu_moe and not shape.sparse:
        raise ParameterError(f"--n-cpu-moe {given.cpu_moe}: {shape.name} has no experts")
    if hardware.host is None and (given.gpu_layers < n or given.cpu_moe):
        raise ParameterError(f"{shape.name} cannot leave layers to a host: this hardware has one memory")
    return Placement(min(given.gpu_layers, n), min(given.cpu_moe, n))
