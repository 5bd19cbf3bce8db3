"""`outrider bench`: configurations beside plain decoding, in one run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Iterator

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

from ..errors import ParameterError, PromptError
from .options import MODEL, Decoding, Output, Sampling, draft_lengths, flags, numbers, refuse_together
from .reporter import Reporter, Tracer
from .session import (
    INTERRUPTED,
    as_prompt,
    check_early,
    check_writable,
    nothing_drafted,
    on_stderr,
    on_stdout,
    open_drafter,
    open_target,
    open_trace,
    print_json,
    say,
    waiting,
)
from .view import viewable

if TYPE_CHECKING:
    from ..bench.prompts import Prompt as BenchPrompt
    from ..bench.runner import Configuration, Group, Run
    from ..engine import Engine
    from ..sampling import SamplingParams


@dataclass(frozen=True)
class Sweep:
    """What is compared."""

    target: Annotated[list[str], Option("-t", "--target", help="Target; repeatable.", rich_help_panel=MODEL)] = field(
        default_factory=lambda: ["smollm2"]
    )
    drafter: Annotated[list[str], Option("-d", "--drafter", help="Drafter; repeatable.", rich_help_panel=MODEL)] = field(
        default_factory=lambda: ["auto"]
    )
    draft: Annotated[str, Option(metavar="N,N,...", help="Draft lengths; auto: as many as pay.", rich_help_panel=MODEL)] = (
        "auto"
    )
    batch: Annotated[str, Option(metavar="N,N,...", help="How many prompts at once.", rich_help_panel=MODEL)] = "1"


@dataclass
class Done:
    """What has been measured so far."""

    manifest: dict[str, Any]
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manifest |= {"interrupted": False, "models": {}}


@flags
@viewable
def bench(
    sweep: Sweep,
    loading: Decoding,
    sampling: Sampling,
    output: Output,
    prompts: Annotated[str | None, Option(metavar="FILE", help=".jsonl with prompt or turns, or a text, one a line.")] = None,
    limit: Annotated[int | None, Option(min=1, help="At most this many prompts.")] = None,
    repeat: Annotated[
        int | None, Option(min=1, help="Repetitions; the figures are medians over them. [default: 1; --roofline: 7]")
    ] = None,
    raw: Annotated[bool, Option("--raw", help="Continue prompts as they are, without the chat template.")] = False,
    out: Annotated[str | None, Option(metavar="FILE", help="Write the result here, once and for all.")] = None,
    report_to: Annotated[
        str | None,
        Option("--report", metavar="DIR", help="A report with plots, its traces beside it; the same command again goes on."),
    ] = None,
    roofline: Annotated[
        bool, Option("--roofline", help="Measure passes over 1 to 32 rows, and what the machine would allow.")
    ] = False,
    context: Annotated[int | None, Option(min=2, help="Tokens before the rows of --roofline. [default: 128]")] = None,
) -> None:
    """Measure drafters beside our own plain decoding, in turns. -o DRAFTER.NAME=VALUE gives an option to one drafter only."""
    if roofline:
        given = {
            "--prompts": prompts,
            "--limit": limit,
            "--raw": raw,
            "--view": output.view,
            "--trace": output.trace,
            "--report": report_to,
        }
        refuse_with_roofline(sweep, loading, sampling, given)
        rooflines(sweep.target, loading, context or 128, repeat or 7, output.json, out)
        return
    if context is not None:
        raise ParameterError("--context belongs to --roofline")
    refuse_together([("--report", report_to), ("--view", output.view)])
    refuse_together([("--report", report_to), ("--trace", output.trace)])  # a report has traces of its own
    repeat = repeat or 1
    from ..bench import report, runner
    from ..bench.prompts import read_prompts
    from ..demo import PROMPTS
    from ..machine import manifest

    params = sampling.params()
    drafts, batches = draft_lengths(sweep.draft), numbers(sweep.batch, "--batch")
    options = {drafter: own_options(drafter, sweep.drafter, loading.options()) for drafter in sweep.drafter}
    if runner.PLAIN in options:
        raise ParameterError("plain decoding is measured in every run; leave -d none out")
    for drafter, own in options.items():
        check_early(drafter, own, loading.accept)
    report.refuse_overwriting(out)
    check_writable(out)
    check_writable(output.trace)
    asked = (read_prompts(prompts) if prompts is not None else list(PROMPTS))[:limit]
    plans = {t: [runner.configurations(t, options, drafts, batch) for batch in batches] for t in sweep.target}
    categories = [prompt.category for prompt in asked]
    schedule = [step for sizes in plans.values() for plan in sizes for step in runner.schedule(plan, categories, repeat)]

    done = Done({**manifest(), "sampling": asdict(params), "command_options": asdict(sweep)})
    keeper: Tracer | None = None
    if report_to is not None:
        keeper = reporter(report_to, plans, asked, params, accept=loading.accept, raw=raw, loading=loading.arguments())
    head = open_trace(output.trace, params, numbered(schedule), bench=asdict(sweep), prompts=texts_of(asked))
    with head as trace, progress() as bar:
        task = bar.add_task("loading", total=len(schedule))
        keeper = keeper or Tracer(trace)
        try:
            for target, sizes in plans.items():
                for engines, ready in opened(target, sizes, loading, asked, raw, done):
                    keeper.begin(target, engines)
                    for run in runner.measure(engines, ready, params, repeat, keeper.keep, keeper.find):
                        done.runs.append(run)
                        bar.update(task, advance=1, description=str(run.configuration))
                keeper.end()
        except KeyboardInterrupt:
            done.manifest["interrupted"] = True
    keeper.finish(done.manifest["interrupted"])
    finish(done, output.json, out)


def reporter(
    path: str, plans: dict[str, list[list[Configuration]]], asked: list[BenchPrompt], params: SamplingParams, **more: Any
) -> Reporter:
    """What fills the folder of --report, a new one or one to go on in. more: what else decides the figures."""
    from ..bench.folder import Folder, question

    every = [configuration for sizes in plans.values() for plan in sizes for configuration in plan]
    return Reporter(Folder.make(path, question(every, asked, params, **more)), texts_of(asked))


def texts_of(asked: list[BenchPrompt]) -> dict[str, str]:
    """The prompts by their numbers, as a trace has them."""
    return {str(number): prompt.text for number, prompt in enumerate(asked)}


def refuse_with_roofline(sweep: Sweep, loading: Decoding, sampling: Sampling, given: dict[str, Any]) -> None:
    """Raise for options that would say nothing to a pass of the target alone."""
    if (sweep.drafter, sweep.draft, sweep.batch) != (Sweep().drafter, Sweep().draft, Sweep().batch):
        raise ParameterError("--roofline measures the target alone: no --drafter, --draft, --batch")
    if loading.option or loading.accept or sampling != Sampling():
        raise ParameterError("--roofline draws no tokens: no --option, --accept, and nothing about sampling")
    if wrong := [name for name, value in given.items() if value]:
        raise ParameterError(f"{wrong[0]} does not go with --roofline")


def rooflines(targets: list[str], loading: Decoding, context: int, repeats: int, as_json: bool, out: str | None) -> None:
    """Measure and print a roofline for each target."""
    from ..bench import report, roofline
    from ..machine import manifest

    report.refuse_overwriting(out)
    check_writable(out)
    value: dict[str, Any] = {"outrider_roofline": roofline.RESULT_VERSION, **manifest(), "targets": []}
    for target in targets:
        model = open_target(target, loading)
        with waiting(f"measuring {target}"):
            value["targets"].append(roofline.roofline(model, context, repeats))
        del model
    if out is not None:
        report.write(out, value)
    if as_json:
        print_json(value)
        return
    console = on_stdout()
    for found in value["targets"]:
        console.print(roofline.table(found))
        console.print(roofline.heading(found), highlight=False)
    console.print(roofline.LEGEND, style="dim", highlight=False)


def own_options(drafter: str, drafters: list[str], given: dict[str, str]) -> dict[str, str]:
    """The options that are for `drafter`: those with its name before a point, and those without any drafter's name."""
    own = {}
    for name, value in given.items():
        whose = next((d for d in drafters if name.startswith(f"{d}.")), None)
        if whose in (None, drafter):
            own[name.removeprefix(f"{drafter}.")] = value
    return own


def opened(
    target: str, sizes: list[list[Configuration]], loading: Decoding, asked: list[BenchPrompt], raw: bool, done: Done
) -> Iterator[tuple[dict[Configuration, Engine], list[tuple[Any, str]]]]:
    """For each batch size the engines of one target, and the prompts as it takes them. Models are loaded once."""
    from ..engine import Engine

    model = open_target(target, loading, [c.drafter for c in unique_drafters(sizes[0])])
    done.manifest["models"][target] = model.describe()
    ready = [(as_prompt(model, prompt.text, raw), prompt.category) for prompt in asked]
    drafters = {c.drafter: open_drafter(c.drafter, model, dict(c.options), loading) for c in unique_drafters(sizes[0])}
    for plan in sizes:
        engines = {c: Engine(model, drafters[c.drafter], c.draft, loading.accept) for c in plan}
        check_lengths(engines[plan[0]], ready)
        for engine in engines.values():
            engine.warm_up()
        yield engines, ready
    for drafter in drafters.values():
        drafter.close()


def unique_drafters(plan: list[Configuration]) -> list[Configuration]:
    """One configuration for each drafter."""
    return list({configuration.drafter: configuration for configuration in plan}.values())


def check_lengths(engine: Engine, ready: list[tuple[Any, str]]) -> None:
    """Raise for a prompt that does not fit, before anything is measured."""
    for number, (prompt, _) in enumerate(ready):
        length = len(engine.encode(prompt))
        if length >= engine.target.context_length:
            raise PromptError(
                f"prompt {number + 1} has {length} tokens, but the context of {engine.target.name} ends at {engine.target.context_length}"
            )


def numbered(schedule: list[tuple[Configuration, Group, int]]) -> list[dict[str, Any]]:
    """For a trace's header: which configuration, prompt and repetition each sequence number means."""
    return [
        {**configuration.as_dict(), "prompt": prompt, "repetition": repetition}
        for configuration, group, repetition in schedule
        for prompt in group.numbers
    ]


def progress() -> Progress:
    console = on_stderr()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def finish(done: Done, as_json: bool, out: str | None) -> None:
    """Write and print what was measured; exit with 130 after an interruption, with 1 when a drafter drafted nothing."""
    from ..bench import report
    from ..bench.runner import summarise

    rows = summarise(done.runs)
    value = report.result(done.manifest, done.runs)
    if out is not None and rows:
        report.write(out, value)
    if as_json:
        print_json(value)
    elif rows:
        console = on_stdout()
        console.print(report.table(rows))
        categories = summarise(done.runs, by_category=True)
        if len({row.category for row in categories}) > 1:
            console.print(report.table(categories, "By category"))
        console.print(report.LEGEND, style="dim", highlight=False)
    silent = [row for row in rows if row.drafted_nothing]
    for row in silent:
        say(nothing_drafted(str(row.configuration)))
    if done.manifest["interrupted"]:
        say("interrupted: these are the figures of what was finished")
        raise typer.Exit(INTERRUPTED)
    if silent:
        raise typer.Exit(1)
