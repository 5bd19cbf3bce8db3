"""`outrider run`: one answer, or a conversation, on the terminal or through pipes."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from .options import Decoding, Output, Pair, Sampling, Structure, flags, read_text, refuse_together, text_or_file, usage
from .screen import end_text, legend, show
from .session import (
    INTERRUPTED,
    as_prompt,
    check_writable,
    figures,
    nothing_drafted,
    open_engine,
    open_trace,
    print_json,
    say,
)
from .view import viewable

if TYPE_CHECKING:
    from ..engine import Engine, Result
    from ..sampling import SamplingParams
    from ..trace import Round


@flags
@viewable
def run(
    pair: Pair,
    loading: Decoding,
    sampling: Sampling,
    structure: Structure,
    output: Output,
    prompt: Annotated[str | None, Argument(help="The prompt; without it, --file or stdin.")] = None,
    file: Annotated[str | None, Option(metavar="FILE", help="Read the prompt from a file.")] = None,
    system: Annotated[str | None, Option(metavar="TEXT", help="A system message.")] = None,
    raw: Annotated[bool, Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    chat: Annotated[bool, Option("--chat", help="A conversation: Ctrl-C stops an answer, Ctrl-D ends.")] = False,
    prediction: Annotated[str | None, Option(metavar="TEXT|@FILE", help="A text expected in the output.")] = None,
    logprobs: Annotated[int | None, Option(metavar="N", help="Log-probabilities with N alternatives.")] = None,
) -> None:
    """Answer a prompt. The text goes to stdout, the figures to stderr; drafted tokens are coloured on a terminal."""
    refuse_together([("PROMPT", prompt), ("--file", file)])
    refuse_together([("--system", system), ("--raw", raw)])
    refuse_together([("--chat", chat), ("--json", output.json)])
    refuse_together([("--chat", chat), ("--raw", raw)])
    if logprobs is not None and not (output.json or output.trace):
        raise usage("--logprobs are written with --json or --trace; give one of them")
    if prediction is not None:
        prediction = text_or_file(prediction, "--prediction")
    params = sampling.params(logprobs=logprobs, prediction=prediction, **structure.values())
    check_writable(output.trace)
    if file is not None:
        prompt = read_text(file, "--file")
    if chat:
        converse(open_engine(pair, loading), params, prompt, system, pair, output.trace)
        return
    if prompt is None:
        prompt = read_stdin()
    as_checked(prompt)
    engine = open_engine(pair, loading)
    with closing(engine):
        answer(engine, as_prompt(engine.target, prompt, raw, system), params, pair, output)


def read_stdin() -> str:
    if sys.stdin.isatty():
        raise usage("no prompt: give one as an argument, with --file, or on stdin")
    return sys.stdin.read()


def as_checked(prompt: str) -> None:
    """Say that a prompt is empty before a model is loaded."""
    from ..errors import PromptError

    if not prompt.strip():
        raise PromptError("the prompt is empty")


def header(engine: Engine, pair: Pair) -> dict[str, Any]:
    """What a trace says about the pair."""
    return {
        "target": engine.target.describe(),
        "drafter": {"name": pair.drafter, "options": asdict(engine.drafter.options)},
        "draft": pair.length,
    }


def answer(engine: Engine, prompt: Any, params: SamplingParams, pair: Pair, output: Output) -> None:
    """Decode one prompt, showing it as it comes; an interruption ends it where it is."""
    (sequence,) = engine.sequences([prompt], params)
    about = {**header(engine, pair), "rule": sequence.rule, "lossy": sequence.lossy, "seed": sequence.sampler.seed}
    rounds: list[Round] = []
    interrupted = False
    about["prompts"] = {"0": prompt if isinstance(prompt, str) else prompt[-1]["content"]}
    named = [{"prompt": 0, "prompt_tokens": sequence.prompt_length}]
    with open_trace(output.trace, params, named, **about) as trace:
        try:
            with closing(engine.decode([sequence])) as decoding:  # type: ignore[type-var]
                for round in decoding:
                    rounds.append(round)
                    if trace:
                        trace.write(round, engine.target.tokenizer)
                    if not output.json:
                        show(round)
        except KeyboardInterrupt:
            interrupted = True
    result = engine.result(sequence, rounds)
    if output.json:
        print_json(as_json(result, engine, pair))
    elif rounds and (result.tokens or not result.error):
        end_text()
        legend(rounds)
        report(result, pair)
    finish(result, interrupted)


def finish(result: Result, interrupted: bool) -> None:
    """Raise what ended a decoding too early."""
    from ..errors import LogitsError

    if result.error:
        raise LogitsError(result.error)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def report(result: Result, pair: Pair) -> None:
    """The last line, on stderr."""
    from ..trace import drafted_nothing

    say(f"[{result.finish_reason}] {figures(result.stats, result.rule, result.lossy, pair.drafter)}")
    if drafted_nothing(result.rounds):
        say(nothing_drafted(pair.drafter))


def as_json(result: Result, engine: Engine, pair: Pair) -> dict[str, Any]:
    from ..trace import drafted_nothing

    tokenizer = engine.target.tokenizer
    logprobs = None
    if result.logprobs is not None:
        logprobs = [
            asdict(entry) | {"text": tokenizer.decode([entry.token]) if tokenizer else None} for entry in result.logprobs
        ]
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "error": result.error,
        "logprobs": logprobs,
        "prompt_tokens": result.prompt_tokens,
        "seed": result.seed,
        "rule": result.rule,
        "lossy": result.lossy,
        **header(engine, pair),
        "drafted_nothing": drafted_nothing(result.rounds),
        "stats": result.stats.as_dict(),
    }


# ---- conversations --------------------------------------------------------------------------------------------------


def converse(
    engine: Engine, params: SamplingParams, first: str | None, system: str | None, pair: Pair, trace_path: str | None
) -> None:
    """Turns until the input ends. Each reuses the cache of the turns before."""
    from ..decode import find_rule

    messages = [{"role": "system", "content": system}] if system is not None else []
    with closing(engine), closing(engine.chat(messages)) as chat:
        rule = engine.rule_for(params)
        about = {**header(engine, pair), "rule": rule, "lossy": find_rule(rule)[1], "seed": params.seed}
        with open_trace(trace_path, params, [], **about) as trace:
            turn = 0
            while (text := first if first is not None else read_turn()) is not None:
                first = None
                if text.strip():
                    rounds = say_turn(chat.send(text, params))
                    for round in rounds if trace else ():
                        trace.write(replace(round, sequence=turn), engine.target.tokenizer)  # type: ignore[union-attr]
                    turn += 1


def read_turn() -> str | None:
    """What the user says next; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def say_turn(answer: Any) -> list[Round]:
    """Show one answer, which Ctrl-C ends, and its figures."""
    from ..trace import statistics

    rounds = []
    with closing(answer) as chunks:
        try:
            for chunk in chunks:
                if chunk.round is not None:
                    show(chunk.round)
                    rounds.append(chunk.round)
        except KeyboardInterrupt:
            say(" [stopped]")
    sys.stdout.write("\n")
    sys.stdout.flush()
    if rounds:
        legend(rounds)
        last = rounds[-1]
        say(f"[{last.finish or 'stopped'}] {figures(statistics(rounds), last.rule, last.lossy, last.drafter)}")
    return rounds
