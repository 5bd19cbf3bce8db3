"""`outrider check`: does a pair fit, what does it cost, will it pay?"""

from __future__ import annotations

from typing import Annotated, Any, Callable

from rich.table import Table
from typer import Argument, Option

from .options import Loading, flags
from .session import check_early, on_stdout, open_drafter, open_target, print_json, waiting


@flags
def check(
    loading: Loading,
    target: Annotated[str, Argument(help="Target: a packaged model's name, a folder, a hub id.")] = "smollm2",
    drafter: Annotated[
        str, Argument(help="Drafter: a name from `outrider drafters`, or the folder or hub id of a model or of heads.")
    ] = "suffix",
    context: Annotated[int, Option(min=2, help="Tokens before the measured ones.")] = 128,
    draft: Annotated[int, Option(min=1, help="Draft length for the memory of logits.")] = 8,
    json: Annotated[bool, Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say whether target and drafter fit, what rows and drafts cost here, and what speed-up to expect, or why none."""
    options = loading.options()
    check_early(drafter, options)
    model = open_target(target, loading, [drafter])
    opened = open_drafter(drafter, model, options, loading)
    from ..check import check as measure

    with waiting("measuring"):
        found = measure(model, opened, context, draft)
    opened.close()
    if json:
        print_json(found)
        return
    console = on_stdout()
    console.print(facts(found))
    for who in ("target", "drafter"):
        if found["kernels"][who]:
            console.print(products(found["kernels"], who))
            console.print(
                f"(kernel {found['kernels']['variant']}; measured once, kept in {found['kernels']['cache']})", style="dim"
            )
    if found["kernels"]["why_not"]:
        console.print(f"no CPU kernels: {found['kernels']['why_not']}", highlight=False)
    console.print(costs(found["costs_ms"]))
    if found["speedup"]:
        console.print(speedups(found))
    console.print(found["verdict"], highlight=False)
    if found["proposal"]:
        console.print(found["proposal"], highlight=False, soft_wrap=True)


def facts(found: dict[str, Any]) -> Table:
    """Target and drafter side by side."""
    models = [found["target"]] + ([found["drafter"]["model"]] if found["drafter"]["model"] else [])
    table = Table("", "target", *(["drafter"] if len(models) > 1 else []))
    names: dict[str, Callable[[Any], str]] = {
        "name": str,
        "parameters": lambda v: f"{v / 1e6:.0f} M",
        "layers": str,
        "hidden": str,
        "vocabulary": str,
        "end_tokens": lambda v: ", ".join(f"{i} {text}" for i, text in v.items()),
        "context": str,
        "device": str,
        "dtype": str,
        "weights_bytes": size,
        "kv_bytes_per_token": size,
        "kv_bytes_full_context": size,
        "logits_bytes": size,
    }
    for name, show in names.items():
        table.add_row(name.replace("_bytes", "").replace("_", " "), *(show(model[name]) for model in models))
    if any("library" in model for model in models):
        table.add_row("library", *(model.get("library", "") for model in models))
        table.add_row("placement", *(placement(model.get("placement", {})) for model in models))
    if found["tokenizers"]:
        same = found["tokenizers"]
        text = "equal" if same["equal"] is not None else "unknown, for want of a tokenizer"
        if same["translated"]:
            text = f"different: {same['shared']} tokens shared, {same['overlap']:.0%} of the smaller vocabulary; others are not drafted"
        elif same["equal"] is False:
            text = f"{same['different']} ids differ, {same['only_target']} only in the target, {same['only_drafter']} only in the drafter"
        table.add_row("tokenizers", text, "same end tokens" if same["same_end"] else "other end tokens")
    elif weights := found["drafter"]["weights"]:
        table.add_row("drafter", found["drafter"]["name"])
        for name, value in weights.items():
            table.add_row(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    elif found["drafter"]["name"] != "none":
        table.add_row("drafter", f"{found['drafter']['name']}: no model, so tokenizer and memory are the target's")
    return table


def placement(values: dict[str, Any]) -> str:
    """Parameters of a GGUF model, one a line; those left to the library are not shown."""
    return "\n".join(f"{name} {value}" for name, value in values.items() if value not in (None, ()))


def size(value: int | None) -> str:
    """Bytes for people."""
    if value is None:
        return "unknown"
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def products(found: dict[str, Any], who: str) -> Table:
    """What computes the linear layers, by shape; the chosen candidate in bold."""
    title = f"Linear layers of the {who}, ms a product"
    table = Table("outputs x inputs, weights in arithmetic", "candidate", title=title, title_justify="left")
    for n in found["rows"]:
        table.add_column(f"{n} row{'s' * (n > 1)}", justify="right")
    table.add_column("chosen")
    for choice in found[who]:
        if not choice["ms"]:
            table.add_row(choice["shape"], choice["chosen"], *("-" for _ in found["rows"]), f"yes ({choice['why']})")
        for number, (name, times) in enumerate(choice["ms"].items()):
            mark = name == choice["chosen"]
            cells = [name, *(f"{ms:.3f}" for ms in times.values()), "yes" * mark]
            table.add_row("" if number else choice["shape"], *cells, style="bold" if mark else None)
    return table


def costs(found: dict[str, Any]) -> Table:
    table = Table(title=f"Measured at {found['context']} tokens of context (medians)", title_justify="left")
    table.add_column("")
    for n in found["rows"]:
        table.add_column(f"{n} row{'s' * (n > 1)}", justify="right")
    table.add_column("first drafted token", justify="right")
    table.add_column("each further one", justify="right")
    table.add_column("proposed", justify="right")
    one = found["rows"][1]
    proposed = ", ".join(f"{n:.2g} of {asked}" for asked, n in found["proposed"].items())
    table.add_row(
        "ms", *(f"{v:.1f}" for v in found["rows"].values()), f"{found['draft']:.2f}", f"{found['step']:.2f}", proposed
    )
    relative = [f"{v:.2f}" for v in found["rows_relative"].values()]
    table.add_row("of 1 row", *relative, f"{found['draft'] / one:.3f}", f"{found['step'] / one:.3f}", "")
    return table


def speedups(found: dict[str, Any]) -> Table:
    """Expected speed-up by acceptance rate and draft length, the best of each rate in bold."""
    table = Table(title="Expected speed over plain decoding, by acceptance rate and draft length", title_justify="left")
    table.add_column("rate")
    for k in next(iter(found["speedup"].values())):
        table.add_column(str(k), justify="right")
    table.add_column("best length", justify="right")
    for rate, by_length in found["speedup"].items():
        best = found["best"][rate][0]
        cells = [f"[bold]{v:.2f}[/bold]" if k == best else f"{v:.2f}" for k, v in by_length.items()]
        table.add_row(f"{rate:.1f}", *cells, str(best))
    return table
