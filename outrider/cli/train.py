"""`outrider train`: a drafter for a target, from text that the target made."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Iterator

import typer
from rich.table import Table
from typer import Argument, Option

from ..errors import LoadError, ParameterError
from ..files import sole_writer
from .options import Place, flags, named_values
from .session import INTERRUPTED, on_stdout, open_target, print_json, say

if TYPE_CHECKING:
    from ..train.loop import Run
    from ..train.measure import Measure

LENGTH, MEASURING = "How long and how fast", "Judging and measuring"


@dataclass(frozen=True)
class Length:
    epochs: Annotated[float, Option(help="Over the data.", rich_help_panel=LENGTH)] = 3.0
    steps: Annotated[int | None, Option(help="In place of epochs.", rich_help_panel=LENGTH)] = None
    samples: Annotated[int | None, Option(help="Use the first so many alone.", rich_help_panel=LENGTH)] = None
    batch: Annotated[int, Option(help="Samples in a pass of one process.", rich_help_panel=LENGTH)] = 8
    accumulate: Annotated[int, Option(help="Passes in a step.", rich_help_panel=LENGTH)] = 1
    lr: Annotated[float, Option(help="Learning rate at its highest.", rich_help_panel=LENGTH)] = 1e-3
    warmup: Annotated[float, Option(help="Share of the steps.", rich_help_panel=LENGTH)] = 0.05
    clip: Annotated[float, Option(help="Norm that gradients are clipped to.", rich_help_panel=LENGTH)] = 1.0
    weight_decay: Annotated[float, Option(rich_help_panel=LENGTH)] = 0.0
    learn_prompts: Annotated[
        bool, Option("--learn-prompts", help="Take the loss on prompts, too: more from little data.", rich_help_panel=LENGTH)
    ] = False
    precision: Annotated[str, Option(help="bfloat16 or float32.", rich_help_panel=LENGTH)] = "bfloat16"
    seed: Annotated[int, Option(help="Of weights and order.", rich_help_panel=LENGTH)] = 0
    held_out: Annotated[int, Option(help="Samples that only judge.", rich_help_panel=MEASURING)] = 32
    log: Annotated[int, Option(help="Figures every so many steps.", rich_help_panel=MEASURING)] = 10
    evaluate: Annotated[int, Option(help="Held-out figures every so many steps.", rich_help_panel=MEASURING)] = 100
    save: Annotated[int, Option(help="A checkpoint every so many steps.", rich_help_panel=MEASURING)] = 100
    measure: Annotated[
        int, Option(help="Measure in the engine every so many steps; 0: at the end alone.", rich_help_panel=MEASURING)
    ] = 0


@dataclass(frozen=True)
class Measuring:
    measure_prompts: Annotated[
        str | None, Option(metavar="FILE", help="JSONL prompts; by default held-out ones.", rich_help_panel=MEASURING)
    ] = None
    measure_count: Annotated[int, Option(help="Prompts.", rich_help_panel=MEASURING)] = 4
    measure_tokens: Annotated[int, Option(help="Tokens a prompt.", rich_help_panel=MEASURING)] = 64
    measure_draft: Annotated[int, Option(help="Most drafted tokens in a round.", rich_help_panel=MEASURING)] = 4
    measure_option: Annotated[
        list[str], Option(metavar="NAME=VALUE", help="An option of the drafter, e.g. shape=tree.", rich_help_panel=MEASURING)
    ] = field(default_factory=list)


@flags
def train(
    loading: Place,
    length: Length,
    measuring: Measuring,
    kind: Annotated[str, Argument(help="What to train: eagle3, medusa, hydra, mtp, draft-model.")],
    target: Annotated[str, Argument(help="Target: a packaged model's name, a folder, a hub id, a GGUF file.")],
    data: Annotated[str, Option("--data", metavar="DIR", help="What `outrider data` made.")],
    out: Annotated[str, Option("-o", "--out", metavar="DIR", help="Where the drafter goes; a run there is gone on with.")],
    option: Annotated[
        list[str] | None,
        Option("-O", "--option", metavar="NAME=VALUE", help="An option of this kind of drafter (docs/training.md)."),
    ] = None,
    cache: Annotated[bool, Option(help="Keep the target's states in a file beside the data.")] = True,
    start: Annotated[
        str | None,
        Option(metavar="DIR", help="Begin with the weights of the run in this folder, or of a finished eagle3 drafter."),
    ] = None,
    restart: Annotated[bool, Option("--restart", help="Forget the run that is in the folder.")] = False,
    json: Annotated[bool, Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Train a drafter. Ctrl-C loses nothing: the same command goes on. With several processes: accelerate launch -m outrider train ..."""
    from ..options import fill
    from ..train.kinds import KINDS
    from ..train.loop import Plan, Run, Settings
    from ..train.store import Store

    if kind not in KINDS:
        raise ParameterError(f"unknown kind of drafter {kind!r}; known: {', '.join(KINDS)}")
    options = fill(KINDS[kind].load()[1], named_values(option or [], f"an option of {kind}", "-O"), kind, "option")
    plan = Plan(**asdict(length))
    store = Store(data)
    model = open_target(target, on_own_device(loading))
    if store.facts.get("vocab_size") != model.vocab_size:
        raise ParameterError(f"{data} holds text of {store.facts.get('target')}, with another vocabulary than {target}")
    settings = Settings(kind, options, plan, cache, Path(start) if start else None, restart)
    with alone_in(Path(out)):
        run = Run(model, store, settings, Path(out), say)
        measure = what_to_measure(run, measuring)
        if run.step:
            run.say(f"going on from step {run.step}")
        try:
            last = run.go(measure)
        except KeyboardInterrupt:
            say(f"interrupted at step {run.step} of {run.total}; the same command goes on")
            raise typer.Exit(INTERRUPTED) from None
        if run.is_main:
            conclude(run, last, json)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """While no other run writes to the folder; of the processes of one run the first sees to it. Raises LoadError."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    try:
        (folder / "training").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"cannot write to {folder}: {error.strerror}") from error
    lock = sole_writer(folder / "training")
    try:
        yield
    finally:
        lock.release()


def on_own_device(loading: Place) -> Place:
    """Of several processes each takes the GPU of its number."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    if rank is None or loading.device != "auto" or not torch.cuda.is_available():
        return loading
    return replace(loading, device=f"cuda:{int(rank)}")


def what_to_measure(run: Run, measuring: Measuring) -> Measure | None:
    """A few prompts that are not trained on, or those of a file."""
    from ..train.measure import Measure
    from ..train.prompts import read_conversations

    if measuring.measure_prompts:
        tokenizer = run.target.tokenizer
        if tokenizer is None:
            raise ParameterError("--measure-prompts needs a target with a tokenizer")
        prompts = [tokenizer.chat(c) for c in read_conversations(measuring.measure_prompts)][: measuring.measure_count]
    else:
        chosen = [run.samples[i] for i in run.judge_by[: measuring.measure_count]]
        prompts = [list(map(int, sample.tokens[: sample.prompt])) for sample in chosen]
    options = named_values(list(measuring.measure_option), "an option of the drafter", "--measure-option")
    return Measure(prompts, measuring.measure_tokens, measuring.measure_draft, options)


def conclude(run: Run, last: dict[str, Any], as_json: bool) -> None:
    """Card, plot and table."""
    from ..train.data import report
    from ..train.record import draw, read_log, write_card

    lines = read_log(run.place)
    write_card(run.folder, run.facts(), last, report(run.store))
    picture = run.place / "training.png"
    if not draw(lines, picture):
        say("no plot: it needs matplotlib (pip install 'outrider[plot]')")
    if as_json:
        print_json({"folder": str(run.folder), **run.facts(), **last, "log": lines})
    else:
        on_stdout().print(table(lines))


def table(lines: list[dict[str, Any]]) -> Table:
    """Every judgement, and what was measured beside it."""
    result = Table("step", "held-out loss", "right by step", "implied tokens per pass", "measured")
    measured = {line["step"]: line["measured"] for line in lines if "measured" in line}
    for line in lines:
        if "held_out" in line:
            part = line["held_out"]
            real = measured.get(line["step"])
            result.add_row(
                str(line["step"]),
                f"{part['loss']:.3f}",
                " ".join(f"{rate:.1%}" for rate in part["acceptance"]),
                f"{part['implied_length']:.3f}",
                f"{real['acceptance_length']:.3f}" if real else "",
            )
    return result
