"""`outrider plan`: predicted speed with and without speculation, from a model's shape and a machine's rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from ..errors import ParameterError
from .check import size
from .options import Loading, flags, numbers
from .session import check_writable, on_stdout, open_target, print_json, quiet, say, waiting

if TYPE_CHECKING:
    from rich.console import Console

    from ..plan.acceptance import Draft
    from ..plan.hardware import Hardware
    from ..plan.predict import Plan, Setting

MODELS, MACHINE, DRAFTS = "The models", "The machine", "Drafts"
DRAFT_LENGTHS, BATCHES = "1,2,3,4,6,8,12,16", "1,2,4,8,16,32,64"


@dataclass(frozen=True)
class Pairing:
    """What is planned."""

    drafter: Annotated[
        str,
        Option(
            "-d", "--drafter", help="none, lookup, suffix, or a smaller model as the target is given.", rich_help_panel=MODELS
        ),
    ] = "suffix"
    quant: Annotated[
        str | None, Option(help="Of the target: Q4_K_M, Q8_0, BF16, ..., or bits per weight.", rich_help_panel=MODELS)
    ] = None
    drafter_quant: Annotated[str | None, Option(help="Of the drafter; by default as the target.", rich_help_panel=MODELS)] = (
        None
    )
    kv_bits: Annotated[int, Option(min=2, max=32, help="Bits of a cached element.", rich_help_panel=MODELS)] = 16
    context: Annotated[int, Option(min=1, help="Tokens in the cache.", rich_help_panel=MODELS)] = 2048
    unions: Annotated[
        str | None, Option(metavar="FILE", help="Measured expert unions (--measure-unions).", rich_help_panel=MODELS)
    ] = None
    beta: Annotated[
        float | None,
        Option(help="Growth of expert unions, rows^beta; 1: independent rows; default 0.75.", rich_help_panel=MODELS),
    ] = None


@dataclass(frozen=True)
class Machine:
    """Where it is to run."""

    gpu: Annotated[str | None, Option(help="Of the table, such as 'RTX 3090'.", rich_help_panel=MACHINE)] = None
    host: Annotated[str | None, Option(help="Of the table, such as 'DDR5-5600'.", rich_help_panel=MACHINE)] = None
    here: Annotated[bool, Option("--here", help="Measure this machine's CPU.", rich_help_panel=MACHINE)] = False
    hardware: Annotated[
        str | None, Option(metavar="FILE", help="JSON as --json prints it under `hardware`.", rich_help_panel=MACHINE)
    ] = None
    gpu_efficiency: Annotated[float | None, Option(help="Share of its bandwidth reached.", rich_help_panel=MACHINE)] = None
    host_efficiency: Annotated[float | None, Option(help="Share of its bandwidth reached.", rich_help_panel=MACHINE)] = None
    link: Annotated[float | None, Option(help="GB/s between GPU and host.", rich_help_panel=MACHINE)] = None
    overlap: Annotated[
        float | None, Option(help="Share of GPU or host time that is hidden, 0 to 1.", rich_help_panel=MACHINE)
    ] = None
    ngl: Annotated[int | None, Option(min=0, help="Layers on the GPU; by default as many as fit.", rich_help_panel=MACHINE)] = (
        None
    )
    n_cpu_moe: Annotated[
        int | None,
        Option(min=0, help="Layers whose experts stay on the host; by default as few as fit.", rich_help_panel=MACHINE),
    ] = None


@dataclass(frozen=True)
class Choices:
    """What may be drafted, and what is expected of it."""

    draft: Annotated[
        str, Option(help="Lengths of chains, or trees (4x2x1: children at each depth).", rich_help_panel=DRAFTS)
    ] = DRAFT_LENGTHS
    batch: Annotated[str, Option(help="Numbers of sequences at once.", rich_help_panel=DRAFTS)] = BATCHES
    acceptance: Annotated[
        str | None, Option(help="Acceptance rates, each planned; default 0.5,0.6,0.7,0.8,0.9.", rich_help_panel=DRAFTS)
    ] = None
    trace: Annotated[
        str | None, Option(metavar="FILE", help="Acceptance from a trace; without TARGET, replay it.", rich_help_panel=DRAFTS)
    ] = None


@flags
def plan(
    pairing: Pairing,
    machine: Machine,
    choices: Choices,
    target: Annotated[
        str | None, Argument(help="Target: a folder, hub id, GGUF file or known model; no weights needed.")
    ] = None,
    measure_unions: Annotated[bool, Option("--measure-unions", help="Load the target and count its experts.")] = False,
    plot: Annotated[str | None, Option(metavar="FILE", help="Draw speed over draft length and batch (png, svg, pdf).")] = None,
    json: Annotated[bool, Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Predict tokens/s with and without speculation from shapes and rates; or replay a trace's rounds under other drafts."""
    from ..plan.acceptance import Draft

    drafts = [Draft.parse(text.strip()) for text in choices.draft.split(",")]
    if measure_unions:
        _unions(target, json)
    elif target is None:
        if choices.trace is None:
            raise ParameterError("give a TARGET to plan for, or --trace FILE to replay")
        if (pairing, machine) != (Pairing(), Machine()) or plot or choices.acceptance or choices.batch != BATCHES:
            raise ParameterError("a replay of --trace takes --draft and --json only; give a TARGET to plan for it")
        _replay(choices.trace, drafts, json)
    else:
        _plan(target, pairing, machine, choices, drafts, plot, json)


# ---- planning ----------------------------------------------------------------------------------------------------------


def _plan(
    target: str, pairing: Pairing, machine: Machine, choices: Choices, drafts: list[Draft], plot: str | None, json: bool
) -> None:
    if plot is not None:
        from ..plan.plot import check_plot

        check_plot(plot)
        check_writable(plot)
    expected = _expected(choices)
    batches = sorted(numbers(choices.batch, "--batch"))
    hardware = _hardware(machine)
    plans = _plans(target, pairing, machine, hardware, expected, drafts, batches)
    if plot is not None:
        from ..plan.plot import plot as draw

        draw(plans, plot)
        say(f"wrote {plot}")
    from ..plan.flags import flags as engine_flags
    from ..plan.words import batches as batches_in_words
    from ..plan.words import reason

    middle = list(plans)[len(plans) // 2]
    chosen = plans[middle]
    words = {name: reason(p, batches[0]) for name, p in plans.items()}
    lines = engine_flags(chosen, batches[0], target, pairing.drafter)
    if json:
        print_json(_as_dict(plans, words, middle, lines))
        return
    console = on_stdout()
    console.print(_facts(chosen, batches[0]))
    console.print(_speeds(plans, batches[0]))
    if len(batches) > 1:
        console.print(_over_batches(plans, batches))
    console.print(_terms(chosen, batches[0]))
    for name, text in words.items():
        console.print(f"acceptance {name}: {text}", highlight=False)
    console.print(batches_in_words(chosen), highlight=False)
    console.print(f"\nflags at acceptance {middle}:", highlight=False)
    for engine, line in lines.items():
        console.print(f"  {engine:10s} {line}", highlight=False, soft_wrap=True)


def _expected(choices: Choices) -> dict[str, Any]:
    """What drafts yield, by the name that tables give it."""
    from ..plan.acceptance import Acceptance
    from ..plan.replay import Replay
    from ..trace import read_trace

    if choices.trace is not None:
        if choices.acceptance is not None:
            raise ParameterError("give --acceptance or --trace, not both")
        _, rounds = read_trace(choices.trace)
        drafters = dict.fromkeys(r.drafter for r in rounds if r.proposed)
        if len(drafters) > 1:
            raise ParameterError(f"{choices.trace} holds rounds of several drafters ({', '.join(drafters)}); trace one alone")
        return {Path(choices.trace).name: Replay(r for r in rounds if r.drafter in drafters)}
    text = choices.acceptance or "0.5,0.6,0.7,0.8,0.9"
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ParameterError(f"--acceptance must be numbers from 0 to 1 with commas between; got {text!r}") from None
    return {f"{rate:g}": Acceptance((rate,)) for rate in rates}


def _hardware(machine: Machine) -> Hardware:
    from ..plan import hardware as table

    given = [name for name in ("here", "hardware") if getattr(machine, name)]
    if len(given) > 1 or (given and (machine.gpu or machine.host)):
        raise ParameterError("give one of --here, --hardware FILE, or --gpu and --host")
    if machine.here:
        quiet()
        from ..plan.here import here

        with waiting("measuring this machine"):
            found = here()
    elif machine.hardware:
        found = table.read_hardware(machine.hardware)
    else:
        found = table.Hardware(
            gpu=table.find(machine.gpu, table.GPUS, "--gpu") if machine.gpu else None,
            host=table.find(machine.host, table.HOSTS, "--host") if machine.host else None,
        )
    for name in ("gpu", "host"):
        efficiency = getattr(machine, f"{name}_efficiency")
        if efficiency is not None:
            device = getattr(found, name)
            if device is None:
                raise ParameterError(f"--{name}-efficiency: this hardware has no {name}")
            better = table.with_efficiency(device, efficiency)
            found = replace(found, gpu=better) if name == "gpu" else replace(found, host=better)
    if (machine.link is not None or machine.overlap is not None) and not (found.gpu and found.host):
        raise ParameterError("--link and --overlap are for hardware with a GPU and a host")
    link = found.link if machine.link is None else machine.link * table.GB
    return replace(found, link=link, overlap=found.overlap if machine.overlap is None else machine.overlap)


def _plans(
    target: str,
    pairing: Pairing,
    machine: Machine,
    hardware: Hardware,
    expected: dict[str, Any],
    drafts: list[Draft],
    batches: list[int],
) -> dict[str, Plan]:
    from ..plan import predict
    from ..plan.passes import Placement
    from ..plan.shapes import read_shape

    quiet()
    with waiting("reading the models"):
        shape = read_shape(target, pairing.quant, pairing.kv_bits)
        drafter = _drafter(pairing, shape.quantisation)
    if pairing.context > shape.context:
        raise ParameterError(f"--context {pairing.context}: the context of {shape.name} ends at {shape.context}")
    given = None
    if machine.ngl is not None or machine.n_cpu_moe is not None:
        all_of_them = len(shape.layers) if hardware.gpu else 0
        given = Placement(all_of_them if machine.ngl is None else machine.ngl, machine.n_cpu_moe or 0)
    unions = _read_unions(pairing, shape.sparse)
    made = {}
    for name, what in expected.items():
        common = (hardware, pairing.context, unions, what, batches[0])
        plain = predict.settle(shape, predict.Drafter("none"), *common, given=given)
        setting = predict.settle(shape, drafter, *common, drafts, given)
        made[name] = predict.make_plan(setting, what, drafts, batches, plain)
    return made


def _read_unions(pairing: Pairing, sparse: bool) -> Any:
    from ..plan.unions import Unions, read_unions

    if (pairing.unions or pairing.beta is not None) and not sparse:
        raise ParameterError("--unions and --beta are for targets with experts, and this one has none")
    if pairing.unions and pairing.beta is not None:
        raise ParameterError("give --unions or --beta, not both")
    if pairing.unions:
        return read_unions(pairing.unions)
    return Unions() if pairing.beta is None else Unions(pairing.beta)


def _drafter(pairing: Pairing, quantisation: str) -> Any:
    from ..drafters import TABLE
    from ..plan.predict import Drafter
    from ..plan.shapes import read_shape

    name = pairing.drafter
    if name in ("none", "lookup", "suffix", "prediction"):
        if pairing.drafter_quant:
            raise ParameterError(f"--drafter-quant: the drafter {name} has no weights")
        return Drafter(name)
    if name in TABLE:
        raise ParameterError(
            f"the drafter {name} is planned by the model it drafts with: -d MODEL, or its folder with config.json"
        )
    own = pairing.drafter_quant or (None if name.endswith(".gguf") or quantisation.startswith("GGUF") else quantisation)
    return Drafter("model", read_shape(name, own, pairing.kv_bits))


def _as_dict(plans: dict[str, Plan], words: dict[str, str], middle: str, lines: dict[str, str]) -> dict[str, Any]:
    setting = plans[middle].setting
    return {
        "target": setting.target.describe(),
        "drafter": {"name": setting.drafter.name, "model": setting.drafter.shape.describe() if setting.drafter.shape else None},
        "hardware": setting.hardware.as_dict(),
        "context": setting.context,
        "acceptance": {
            name: {
                "placement": vars(p.setting.place),
                "drafter_on_gpu": p.setting.drafter_on_gpu,
                "memory": _memory(p.setting, min(p.predictions)),
                "predictions": [{**x.as_dict(), "gain": p.gain(x)} for of_one in p.predictions.values() for x in of_one],
                "best": {n: str(p.best(n).draft) for n in p.predictions},
                "not_worth_it_from": p.ends,
                "reason": words[name],
            }
            for name, p in plans.items()
        },
        "flags": {"acceptance": middle, **lines},
    }


def _memory(setting: Setting, sequences: int) -> dict[str, Any]:
    fit = setting.fit(sequences, 1)
    return {"fits": fit.fits, "problem": fit.problem, "used": fit.used, "there": fit.there, "parts": fit.parts}


# ---- tables ------------------------------------------------------------------------------------------------------------


def _facts(plan: Plan, sequences: int) -> Table:
    setting = plan.setting
    table = Table("", "target", *(["drafter"] if setting.drafter.shape else []))
    shapes = [setting.target] + ([setting.drafter.shape] if setting.drafter.shape else [])
    described = [shape.describe() for shape in shapes]
    for name in described[0]:
        if any(d[name] not in (None, "") for d in described):
            table.add_row(name.replace("_bytes", "").replace("_", " "), *(_fact(name, d[name]) for d in described))
    fit = setting.fit(sequences, 1)
    where = {"gpu": setting.hardware.gpu, "host": setting.hardware.host}
    for name, device in where.items():
        if device:
            table.add_row(f"{name}: {device.name}", f"{size(round(fit.used[name]))} of {size(round(fit.there[name]))} used")
    table.add_row("memory", "fits" if fit.fits else f"DOES NOT FIT: {fit.problem}")
    return table


def _fact(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith(("bytes", "per_token")):
        return size(value)
    return f"{value / 1e9:.2f} G" if name.endswith("parameters") else str(value)


def _speeds(plans: dict[str, Plan], sequences: int) -> Table:
    """Tokens per second by draft, for each acceptance."""
    table = Table(title=f"Predicted tokens/s and gain over plain, {sequences} at once, by acceptance", title_justify="left")
    table.add_column("draft")
    for name in plans:
        table.add_column(name, justify="right")
    first = next(iter(plans.values()))
    for i, prediction in enumerate(first.predictions[sequences]):
        cells = []
        for plan in plans.values():
            p = plan.predictions[sequences][i]
            text = f"{p.speed:.2f} ({plan.gain(p):.2f})"
            cells.append(f"[bold]{text}[/bold]" if p is plan.best(sequences) else text)
        table.add_row(str(prediction.draft) if prediction.draft.widths else "plain", *cells)
    return table


def _over_batches(plans: dict[str, Plan], batches: list[int]) -> Table:
    table = Table(title="Best draft, tokens/s and gain by sequences at once", title_justify="left")
    table.add_column("acceptance")
    for n in batches:
        table.add_column(str(n), justify="right")
    for name, plan in plans.items():
        best = {n: plan.best(n) for n in batches}
        cells = [f"{b.draft if b.draft.widths else 'plain'}: {b.speed:.1f} ({plan.gain(b):.2f})" for b in best.values()]
        table.add_row(name, *cells)
    return table


def _terms(plan: Plan, sequences: int) -> Table:
    """Where the time of a pass goes, plain and with the best draft."""
    best, plain = plan.best(sequences), plan.plain(sequences)
    shown = [plain] if best is plain else [plain, best]
    table = Table(title="Where a round's time goes, ms (what it is bound by)", title_justify="left")
    table.add_column("part")
    for p in shown:
        table.add_column(f"draft {p.draft}" if p.draft.widths else "plain", justify="right")
    keys = dict.fromkeys((t.what, t.where) for p in shown for t in p.target.terms)
    for what, where in keys:
        found = [next((t for t in p.target.terms if (t.what, t.where) == (what, where)), None) for p in shown]
        table.add_row(f"{what} ({where})", *(f"{1e3 * t.seconds:.2f} ({t.bound})" if t else "-" for t in found))
    for name in ("drafting", "loop"):
        table.add_row(name, *(f"{1e3 * getattr(p, name):.2f}" for p in shown))
    if any(p.target.saved for p in shown):
        table.add_row("hidden by overlap", *(f"-{1e3 * p.target.saved:.2f}" for p in shown))
    table.add_row("all", *(f"{1e3 * p.seconds:.2f}" for p in shown), style="bold")
    return table


# ---- replay and unions ---------------------------------------------------------------------------------------------------


def _replay(path: str, drafts: list[Draft], json: bool) -> None:
    from ..plan.replay import replay_table
    from ..trace import read_trace

    _, rounds = read_trace(path)
    found = replay_table(rounds, drafts)
    if json:
        print_json({"trace": path, "drafters": found})
        return
    console = on_stdout()
    for drafter, result in found.items():
        _show_replay(console, drafter, result)


def _show_replay(console: Console, drafter: str, result: dict[str, Any]) -> None:
    recorded = result["recorded"]
    console.print(
        f"{drafter}: {result['tokens']} tokens in {recorded['rounds']} recorded rounds, {recorded['tokens_per_pass']:.2f} tokens and "
        f"{recorded['nodes_per_pass']:.2f} drafted a pass",
        highlight=False,
    )
    table = Table("draft", "tokens/pass", "at least", "at most", "drafted/pass", "no verdict", "tokens/s", "of plain")
    for row in result["drafts"]:
        cells = [f"{row[name]:.2f}" for name in ("tokens_per_pass", "at_least", "at_most", "nodes_per_pass")]
        times = [f"{row[name]:.2f}" if row[name] is not None else "-" for name in ("tokens_per_second", "gain")]
        table.add_row(row["draft"], *cells, f"{row['without_verdict']:.0%}", *times)
    console.print(table)
    console.print(
        "no verdict: rounds that meet a token which was never drafted; it counts with the trace's own rate (at least, at most: refused, "
        "accepted).",
        style="dim",
    )
    if result["plain_tokens_per_second"] is None:
        console.print(
            "tokens/s: the trace has single sequences' passes of one length only, so other lengths have no price.", style="dim"
        )


def _unions(target: str | None, json: bool) -> None:
    from ..plan.unions import independent, measure_unions

    if target is None:
        raise ParameterError("--measure-unions needs a TARGET to load")
    model = open_target(target, Loading())
    with waiting("counting experts"):
        found = measure_unions(model)  # type: ignore[arg-type]
    if json:
        print_json(found)
        return
    table = Table(title=f"Distinct experts of {found['experts']} in a layer, {found['active']} a row", title_justify="left")
    for name in ("rows", "measured", "independent rows", "of independent"):
        table.add_column(name, justify="right")
    for n, union in found["unions"].items():
        law = independent(found["experts"], found["active"], n)
        table.add_row(str(n), f"{union:.2f}", f"{law:.2f}", f"{union / law:.2f}")
    on_stdout().print(table)
