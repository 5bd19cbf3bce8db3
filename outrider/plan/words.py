"""The reason for a plan, in words."""

from __future__ import annotations

from .passes import OVERHEAD
from .predict import Plan, Prediction, break_even


def reason(plan: Plan, sequences: int) -> str:
    """Why the best plan for so many sequences is the best."""
    best, plain = plan.best(sequences), plan.plain(sequences)
    drafted = [p for p in plan.predictions[sequences] if p.draft.widths]
    fastest = max(drafted, key=lambda p: p.speed, default=None)
    if fastest is None:
        return f"no drafter: {plain.speed:.1f} tokens/s, {_bound(plain)}{_placement(plan)}"
    shown = best if best.draft.widths else max(drafted, key=lambda p: p.draft.nodes) if plan.setting.target.sparse else fastest
    text = f"verification of {shown.nodes + 1:.3g} rows {_costs(plan, shown, plain)}"
    if best.draft.widths:
        text += f" and yields {best.tokens:.2f} tokens{_drafting(best)}: draft {best.draft}, expected {plan.gain(best):.2f} times plain"
        even = break_even(plan, best)
        return (
            f"{text}; it pays from an acceptance rate of {even:.2f} on{_placement(plan, True)}"
            if even
            else text + _placement(plan, True)
        )
    text += f" and yields {shown.tokens:.2f} tokens{_drafting(shown)}: do not speculate"
    if plan.gain(fastest) > 1:
        text += f" (the best draft, {fastest.draft}, would gain {plan.gain(fastest) - 1:.0%})"
    return text + _placement(plan)


def _costs(plan: Plan, shown: Prediction, plain: Prediction) -> str:
    times = shown.target.seconds / plain.target.seconds
    target = plan.setting.target
    if target.sparse:
        layer = next(x for x in target.layers if x.experts)
        unions = [plan.setting.unions.of(layer.experts, layer.active, p.nodes + 1, p.sequences) for p in (shown, plain)]
        return (
            f"touches {unions[0] / unions[1]:.1f} times the experts of one ({unions[0]:.0f} of {layer.experts} in a layer), "
            f"costs {times:.2f} passes"
        )
    if shown.target.bound == "arithmetic":
        return f"is bound by arithmetic, costs {times:.2f} passes"
    if shown.target.bound == OVERHEAD:
        return f"costs {times:.2f} passes, most of it calls rather than reading"
    return f"reads the same weights as one, costs {times:.2f} passes"


def _drafting(prediction: Prediction) -> str:
    if prediction.drafting < 0.005 * prediction.target.seconds:
        return ""
    return f", drafting takes {prediction.drafting / prediction.target.seconds:.0%} of it"


def _bound(prediction: Prediction) -> str:
    bound = prediction.target.bound
    return {"memory": "bound by memory", "arithmetic": "bound by arithmetic"}.get(bound, "most of it calls rather than reading")


def _placement(plan: Plan, speculate: bool = False) -> str:
    setting = plan.setting if speculate else plan.without
    n = len(setting.target.layers)
    place = setting.place
    if setting.hardware.gpu is None or setting.hardware.host is None:
        return ""
    text = ""
    if setting.target.sparse and place.cpu_moe and place.gpu_layers == n:
        text = f"; keep the experts of {place.cpu_moe} layers on the host"
    elif place.gpu_layers < n:
        text = f"; {n - place.gpu_layers} of {n} layers stay on the host"
    if speculate and setting.drafter.shape:
        text += f"; the drafter lives on the {'GPU' if setting.drafter_on_gpu else 'host'}"
    return text


def batches(plan: Plan) -> str:
    """Where the gain ends, over the planned numbers of sequences."""
    if len(plan.predictions) < 2 or not any(p.draft.widths for p in next(iter(plan.predictions.values()))):
        return ""
    gains = ", ".join(f"{n}: {plan.gain(plan.best(n)):.2f}" for n in plan.predictions)
    text = f"gain by sequences at once: {gains}"
    if plan.ends is not None:
        bound = _bound(plan.plain(plan.ends))
        return f"{text}; from {plan.ends} on speculation is not worth it ({bound})"
    return f"{text}; it pays at every number planned"
