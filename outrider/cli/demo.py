"""`outrider demo`: the embedded model answers four prompts, plainly and with a drafter."""

from __future__ import annotations

import textwrap
import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Callable

import typer
from rich.table import Table
from typer import Option

from .options import Decoding, Output, Pair, Sampling, flags
from .run import header
from .screen import end_text, legend, show
from .session import (
    INTERRUPTED,
    as_prompt,
    check_writable,
    nothing_drafted,
    on_stdout,
    open_engine,
    open_trace,
    print_json,
    say,
)
from .view import viewable

if TYPE_CHECKING:
    from ..demo import Outcome
    from ..engine import Engine
    from ..trace import Round


@flags
@viewable
def demo(
    pair: Pair,
    loading: Decoding,
    sampling: Sampling,
    output: Output,
    only: Annotated[int | None, Option(min=1, max=4, help="Only this prompt.")] = None,
) -> None:
    """Four prompts, each answered by plain decoding and with the drafter: the same text, sooner. No hub, account or GPU."""
    from ..demo import PROMPTS, play, warm_up
    from ..drafters import NoDrafter
    from ..engine import Engine
    from ..models import PACKAGED

    params = sampling.params()
    check_writable(output.trace)
    began = time.perf_counter()
    if loading.dtype == "auto" and pair.target in PACKAGED:
        loading = replace(loading, dtype="float32")  # in bfloat16 two logits are often equal, and the texts part at such ties
    drafted = open_engine(pair, loading)
    plain = Engine(drafted.target, NoDrafter(), 0, loading.accept)
    chosen = [PROMPTS[only - 1]] if only else list(PROMPTS)
    ready = [as_prompt(plain.target, prompt.text) for prompt in chosen]
    warm_up([plain, drafted], ready[0])
    if not output.json:
        typer.echo(introduction(plain, pair))
    outcomes: list[Outcome] = []
    interrupted = False
    asked = [(plain.sequences([messages], params)[0], drafted.sequences([messages], params)[0]) for messages in ready]
    names = [
        {"prompt": prompt.category, "drafter": name, "rule": s.rule, "lossy": s.lossy, "seed": s.sampler.seed}
        for prompt, pair_of in zip(chosen, asked)
        for name, s in zip(("none", pair.drafter), pair_of)
    ]
    texts = {prompt.category: prompt.text for prompt in chosen}
    with open_trace(output.trace, params, names, prompts=texts, **header(drafted, pair)) as trace:
        try:
            for number, (prompt, sequences) in enumerate(zip(chosen, asked)):
                write = partial(trace.write, tokenizer=drafted.target.tokenizer) if trace else None
                stage = Stage(pair.drafter, write, number, output.json)
                stage.announce(f"{number + 1}. {prompt.category}", prompt.text)
                outcomes.append(play(plain, drafted, prompt, sequences, stage))
                stage.conclude(outcomes[-1])
        except KeyboardInterrupt:
            interrupted = True
    drafted.close()
    finish(outcomes, drafted, pair, output.json, time.perf_counter() - began)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def introduction(engine: Engine, pair: Pair) -> str:
    """What is going to be seen."""
    target = engine.target
    text = (
        f"{pair.target}: {target.n_parameters / 1e6:.0f} million parameters, {target.describe()['dtype']} on {target.device}."
    )
    return f"{text} Judge the speed, not the wisdom, of so small a model." if target.n_parameters < 1e9 else text


class Stage:
    """Shows one prompt's two answers as they come."""

    def __init__(self, drafter: str, write: Callable[[Round], None] | None, number: int, silent: bool):
        self._titles = {"plain": "plain decoding", "drafted": f"with the drafter {drafter}"}
        self._write = write
        self._number = number
        self._silent = silent

    def announce(self, title: str, text: str) -> None:
        if not self._silent:
            typer.secho(f"\n== {title} ==", bold=True)
            typer.secho(textwrap.indent(text, "  | "), dim=True)

    def __call__(self, name: str, round: Round | None) -> None:
        if round is None:
            if not self._silent:
                typer.secho(f"\n-- {self._titles[name]}", bold=True)
            return
        if self._write is not None:
            self._write(replace(round, sequence=2 * self._number + (name == "drafted")))
        if not self._silent:
            show(round)
            if round.finish:
                typer.echo()

    def conclude(self, outcome: Outcome) -> None:
        if not self._silent:
            legend(outcome.drafted.rounds)
            typer.secho(f"\n{verdict(outcome)}", bold=True)


def verdict(outcome: Outcome) -> str:
    """Whether the two texts are the same, in one line."""
    if not outcome.comparable:
        return "Sampled without a seed: the two texts are two draws from one law, and differ."
    if outcome.difference is None:
        return f"The same text, token for token ({len(outcome.drafted.tokens)} tokens)."
    return f"The texts part at {outcome.difference}."


def finish(outcomes: list[Outcome], engine: Engine, pair: Pair, as_json: bool, seconds: float) -> None:
    if as_json:
        print_json({**header(engine, pair), "seconds": seconds, "prompts": [as_dict(outcome) for outcome in outcomes]})
    elif outcomes:
        end_text()
        on_stdout().print(table(outcomes, pair.drafter))
        typer.echo(
            "tokens/s and ratio: after the prefill, ours against our own plain decoding; tokens per pass = emitted / passes"
        )
        typer.echo(in_all(outcomes, pair.drafter))
    for outcome in outcomes:
        if pair.drafter != "none" and outcome.drafted.stats.proposed == 0:
            say(f"{outcome.prompt.category}: {nothing_drafted(pair.drafter)}")


def in_all(outcomes: list[Outcome], drafter: str) -> str:
    """The last line: all prompts together."""
    from ..trace import combine

    plain, drafted = (combine(getattr(o, name).stats for o in outcomes) for name in ("plain", "drafted"))
    ratio = (drafted.tokens_per_second or 0) / plain.tokens_per_second if plain.tokens_per_second else 0
    return (
        f"In all: {ratio:.2f} times plain decoding with {drafter} ({drafted.tokens_per_second or 0:.1f} / "
        f"{plain.tokens_per_second or 0:.1f} tokens/s), {drafted.acceptance_length or 0:.2f} tokens per pass, "
        f"{drafted.accepted} accepted / {drafted.proposed} proposed"
    )


def as_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "category": outcome.prompt.category,
        "text": outcome.drafted.text,
        "same_text": outcome.difference is None if outcome.comparable else None,
        "difference": asdict(outcome.difference) if outcome.difference else None,
        "ratio": outcome.ratio,
        "rule": outcome.drafted.rule,
        "lossy": outcome.drafted.lossy,
        "plain": outcome.plain.stats.as_dict(),
        "drafted": outcome.drafted.stats.as_dict(),
    }


def table(outcomes: list[Outcome], drafter: str) -> Table:
    result = Table(
        "prompt", "tokens", "plain tokens/s", f"{drafter} tokens/s", "ratio", "tokens per pass", "accepted / proposed", "text"
    )
    for outcome in outcomes:
        plain, drafted = outcome.plain.stats, outcome.drafted.stats
        result.add_row(
            outcome.prompt.category,
            str(drafted.emitted),
            f"{plain.tokens_per_second or 0:.1f}",
            f"{drafted.tokens_per_second or 0:.1f}",
            f"{outcome.ratio or 0:.2f}",
            f"{drafted.acceptance_length or 0:.2f}",
            f"{drafted.accepted} / {drafted.proposed}",
            "(sampled)"
            if not outcome.comparable
            else "same"
            if outcome.difference is None
            else "near-tie"
            if outcome.difference.near_tie
            else "DIFFERS",
        )
    return result
