"""How many distinct experts a pass reads: the expert-union law, and a counter for real models.

Rows that chose independently and uniformly touch ``U(M) = E (1 - (1 - K/E)^M)`` of E experts on average, K each (one row misses
an expert with probability 1 - K/E). Neighbouring tokens choose alike: measured unions grow like ``K M^beta`` with beta about
0.75 (0.62 to 0.80 in public measurements). Measured unions are preferred to both.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from ..errors import LoadError, ParameterError

if TYPE_CHECKING:
    from ..targets.transformers import TransformersTarget

BETA = 0.75
"""Growth of unions over the rows of one text, until measured."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


def independent(experts: int, active: float, rows: float) -> float:
    """The law for rows that choose independently and uniformly."""
    return experts * (1 - (1 - active / experts) ** rows)


@dataclass(frozen=True)
class Unions:
    """The growth of unions over the rows of a sequence.

    beta: exponent for neighbouring tokens; 1.0: independent rows. measured: mean union as a multiple of K, by rows; between them a
    straight line of logarithms, beyond them the last slope.
    """

    beta: float = BETA
    measured: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ParameterError(f"beta must be from 0 (all rows choose the same experts) to 1 (independent); got {self.beta}")

    def one_sequence(self, experts: int, active: int, rows: float) -> float:
        """Distinct experts of a layer that neighbouring rows touch."""
        growth = self._interpolated(rows) if self.measured else rows**self.beta
        most = float(experts) if self.measured else independent(experts, active, rows)
        return min(active * growth, most)

    def of(self, experts: int, active: int, rows: float, sequences: int = 1) -> float:
        """Distinct experts that `rows` rows of each of `sequences` unrelated sequences touch."""
        return independent(experts, self.one_sequence(experts, active, rows), sequences)

    def _interpolated(self, rows: float) -> float:
        known = sorted({1: 1.0, **dict(self.measured)}.items())
        if len(known) == 1:
            return rows**self.beta
        at = next((i for i, (n, _) in enumerate(known) if n >= rows), len(known) - 1)
        (n0, u0), (n1, u1) = known[max(at, 1) - 1], known[max(at, 1)]
        slope = math.log(u1 / u0) / math.log(n1 / n0)
        return u0 * (rows / n0) ** slope


def read_unions(path: str | Path) -> Unions:
    """Measured unions from the JSON that `outrider plan --measure-unions --json` prints."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        measured = tuple((int(n), float(u) / float(value["active"])) for n, u in value["unions"].items())
    except OSError as error:
        raise LoadError(f"cannot read the unions {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise LoadError(
            f"{path} holds no measured unions; make it with `outrider plan MODEL --measure-unions --json`"
        ) from error
    if not measured or any(n < 1 or not u > 0 for n, u in measured):
        raise LoadError(f"{path}: unions must be positive, by numbers of rows from 1 on")
    return Unions(measured=measured)


# ---- counting on a real model ------------------------------------------------------------------------------------------


@dataclass
class Count:
    """Distinct experts of each pass, by layer in the order in which layers are first called."""

    experts: dict[str, int] = field(default_factory=dict)
    """How many experts each layer has."""
    chosen: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By layer: the union of each pass."""
    active: int | None = None
    """Experts that a row takes."""

    @property
    def mean(self) -> float:
        """Mean union over layers and passes."""
        all_of_them = [n for passes in self.chosen.values() for n in passes]
        return sum(all_of_them) / len(all_of_them) if all_of_them else math.nan


@contextmanager
def count_experts(model: Any) -> Iterator[Count]:
    """Count the distinct experts of every layer and pass of a transformers model within the context, by hooks.

    Where a layer's experts are one module, that module is told which experts each row chose (transformers 5; our packed experts as
    well). Where they are a list of modules, each that is called with a row counts.
    """
    import torch

    count = Count()
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and name.endswith("experts") and len(module) > 1:
            count.experts[name] = len(module)
            handles += _watch_list(model, module, name, count)
        elif name.endswith("experts") and not isinstance(module, torch.nn.ModuleList):
            count.experts[name] = getattr(module, "num_experts", 0)
            handles.append(module.register_forward_pre_hook(_told(name, count), with_kwargs=True))
    if not handles:
        raise ParameterError(f"{type(model).__name__} has no layers with experts")
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


def _told(name: str, count: Count) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = [*args, *kwargs.values()]
        index = next((v for v in values if getattr(v, "dim", int)() == 2 and not v.is_floating_point()), None)
        if index is None:
            raise ParameterError(f"{name} is not told which experts its rows chose; its unions cannot be counted")
        count.active = index.shape[-1]
        count.chosen[name].append(len(index.unique()))

    return hook


def _watch_list(model: Any, experts: Any, name: str, count: Count) -> list[Any]:
    touched: set[int] = set()

    def touch(number: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            if args and args[0].numel():
                touched.add(number)

        return hook

    def end(module: Any, args: Any, output: Any) -> None:
        count.chosen[name].append(len(touched))
        touched.clear()

    owner = model.get_submodule(name.rpartition(".")[0])
    return [e.register_forward_pre_hook(touch(i)) for i, e in enumerate(experts)] + [owner.register_forward_hook(end)]


def measure_unions(
    target: TransformersTarget, rows: Sequence[int] = ROWS, passes: int = 24, context: int = 32
) -> dict[str, Any]:
    """Mean unions of a target's layers by number of rows, on neighbouring tokens of a real text, for JSON."""
    from ..check import text_tokens
    from ..tree import DraftTree

    prompt, ahead = text_tokens(target, context, passes * max(rows))
    slot = target.open()
    found: dict[int, float] = {}
    active: int | None = None
    try:
        for _ in target.prefill(slot, prompt):
            pass
        for n in rows:
            with count_experts(target.model) as count:
                for at in range(0, passes * max(rows), max(rows)):
                    target.forward([(slot, DraftTree.chain(ahead[at], ahead[at + 1 : at + n]))])
                    target.commit(slot, (0,))
                    target.truncate(slot, len(prompt))
            found[n], active = count.mean, count.active or active
    finally:
        target.close(slot)
    experts = max(count.experts.values())
    active = active or round(found[1]) if 1 in found else active
    return {"target": target.name, "experts": experts, "active": active, "unions": found, "passes": passes}
