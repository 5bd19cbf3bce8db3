"""Pictures of a plan: speed over draft length, and gain over sequences at once. matplotlib is an extra: `pip install outrider[plot]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import LoadError, ParameterError
from .predict import Plan

KINDS = (".png", ".svg", ".pdf")


def check_plot(path: str | Path) -> None:
    """Raise before any work where no picture could be drawn there."""
    if Path(path).suffix not in KINDS:
        raise ParameterError(f"--plot {path}: a picture's name ends in {', '.join(KINDS)}")
    if not Path(path).resolve().parent.is_dir():
        raise LoadError(f"cannot write {path}: there is no folder {Path(path).resolve().parent}")
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ParameterError("--plot needs matplotlib: pip install 'outrider[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(plans: dict[str, Plan], path: str | Path) -> None:
    """Two panels, one line for each plan (by its acceptance): speed of one batch over draft length, best gain over sequences."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for label, plan in plans.items():
        first = min(plan.predictions)
        points = sorted((p.draft.nodes, p.speed) for p in plan.predictions[first] if p.draft.is_chain)
        left.plot(*zip(*points), marker="o", label=label)
        right.plot(list(plan.predictions), [plan.gain(plan.best(n)) for n in plan.predictions], marker="o", label=label)
    some = next(iter(plans.values()))
    left.set(xlabel="draft length (0: plain decoding)", ylabel=f"tokens/s, {min(some.predictions)} at once", ylim=(0, None))
    right.set(xlabel="sequences at once", ylabel="speed of the best draft over plain", xscale="log")
    right.axhline(1, color="grey", linewidth=0.8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(title="acceptance", fontsize="small")
    figure.suptitle(
        f"{some.setting.target.name} with {some.setting.drafter.name} on {some.setting.hardware.name}", fontsize="medium"
    )
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)
