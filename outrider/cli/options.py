"""Options that several commands share. Each dataclass is a group; each of its fields is one command-line option."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Callable, Sequence

import typer
from typer import Option

from ..errors import ParameterError

if TYPE_CHECKING:
    from ..sampling import SamplingParams

MODEL, SAMPLING, STRUCTURE, OUTPUT = "The models", "Sampling", "What the text must look like", "Output"
TargetOption = Annotated[
    str,
    Option("-t", "--target", help="Target: a packaged model's name, a folder, a hub id, a GGUF file.", rich_help_panel=MODEL),
]
DrafterOption = Annotated[
    str,
    Option(
        "-d",
        "--drafter",
        help="Drafter: a name from `outrider drafters`, or the folder or hub id of a model or of heads.",
        rich_help_panel=MODEL,
    ),
]


@dataclass(frozen=True)
class Pair:
    """A target with a drafter."""

    target: TargetOption = "smollm2"
    drafter: DrafterOption = "auto"
    draft: Annotated[
        str,
        Option("--draft", metavar="N|auto", help="Tokens to draft in a round; auto: as many as pay.", rich_help_panel=MODEL),
    ] = "auto"

    @property
    def length(self) -> int | str:
        """`draft` as the engine takes it."""
        return draft_length(self.draft)


@dataclass(frozen=True)
class Place:
    """How models are loaded."""

    device: Annotated[str, Option(help="auto, cpu, cuda, cuda:N, mps.", rich_help_panel=MODEL)] = "auto"
    dtype: Annotated[str, Option(help="auto, float32, bfloat16, float16, float64.", rich_help_panel=MODEL)] = "auto"
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run code that comes with a model.", rich_help_panel=MODEL)
    ] = False
    revision: Annotated[str | None, Option(help="Branch, tag or commit of the target on the hub.", rich_help_panel=MODEL)] = (
        None
    )
    gguf_library: Annotated[
        str, Option(help="What runs GGUF files: auto, ik, llama.cpp, or transformers as floats.", rich_help_panel=MODEL)
    ] = "auto"
    gguf: Annotated[
        list[str],
        Option(
            "-g", "--gguf", metavar="NAME=VALUE", help="Where and how GGUF files run (docs/gguf.md).", rich_help_panel=MODEL
        ),
    ] = field(default_factory=list)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `load_target`."""
        plain = {name: getattr(self, name) for name in ("device", "dtype", "trust_remote_code", "revision", "gguf_library")}
        return {**plain, "gguf": named_values(self.gguf, "a parameter of GGUF files", "-g")}


@dataclass(frozen=True)
class Loading(Place):
    """How models are loaded, and how they draft."""

    option: Annotated[
        list[str], Option("-o", "--option", metavar="NAME=VALUE", help="An option of the drafter.", rich_help_panel=MODEL)
    ] = field(default_factory=list)

    def options(self) -> dict[str, str]:
        """The drafter's options by name."""
        return named_values(self.option, "an option of the drafter", "-o")


@dataclass(frozen=True)
class Decoding(Loading):
    """For commands that decode: also how drafts are accepted."""

    accept: Annotated[str | None, Option(help="Accept rule instead of the default.", rich_help_panel=MODEL)] = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when the text ends."""

    temperature: Annotated[float, Option(help="0 takes the most likely token.", rich_help_panel=SAMPLING)] = 0.0
    top_k: Annotated[int, Option(help="Keep the k most likely tokens; 0: all.", rich_help_panel=SAMPLING)] = 0
    top_p: Annotated[float, Option(help="Keep the smallest set this probable.", rich_help_panel=SAMPLING)] = 1.0
    min_p: Annotated[float, Option(help="Least probability relative to the best.", rich_help_panel=SAMPLING)] = 0.0
    repetition_penalty: Annotated[float, Option(rich_help_panel=SAMPLING)] = 1.0
    presence_penalty: Annotated[float, Option(rich_help_panel=SAMPLING)] = 0.0
    frequency_penalty: Annotated[float, Option(rich_help_panel=SAMPLING)] = 0.0
    max_tokens: Annotated[int, Option(help="At most this many new tokens.", rich_help_panel=SAMPLING)] = 256
    stop: Annotated[list[str], Option(help="Text that ends the output; repeatable.", rich_help_panel=SAMPLING)] = field(
        default_factory=list
    )
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on after an end token.", rich_help_panel=SAMPLING)] = False
    seed: Annotated[int | None, Option(help="The same text again, with any drafter.", rich_help_panel=SAMPLING)] = None

    def params(self, **more: Any) -> SamplingParams:
        from ..sampling import SamplingParams

        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return SamplingParams.make(**{**values, "stop": tuple(self.stop), **more})


@dataclass(frozen=True)
class Structure:
    """What the output must look like: one of these, or none."""

    json_object: Annotated[bool, Option("--json-object", help="Any JSON object.", rich_help_panel=STRUCTURE)] = False
    json_schema: Annotated[
        str | None, Option(metavar="FILE", help="JSON that fits the schema in this file.", rich_help_panel=STRUCTURE)
    ] = None
    regex: Annotated[str | None, Option(help="A regular expression for all of the text.", rich_help_panel=STRUCTURE)] = None
    choice: Annotated[list[str], Option(help="One of the texts given so; repeatable.", rich_help_panel=STRUCTURE)] = field(
        default_factory=list
    )
    lark: Annotated[str | None, Option(metavar="FILE", help="The Lark grammar in this file.", rich_help_panel=STRUCTURE)] = None

    def values(self) -> dict[str, Any]:
        """Fields of `SamplingParams`."""
        return {
            "json_object": self.json_object,
            "json_schema": None if self.json_schema is None else read_text(self.json_schema, "--json-schema"),
            "regex": self.regex,
            "choices": tuple(self.choice),
            "lark": None if self.lark is None else read_text(self.lark, "--lark"),
        }


@dataclass(frozen=True)
class Output:
    json: Annotated[bool, Option("--json", help="One JSON object on stdout.", rich_help_panel=OUTPUT)] = False
    trace: Annotated[
        str | None, Option(metavar="FILE", help="Write every round here (docs/trace.md).", rich_help_panel=OUTPUT)
    ] = None
    view: Annotated[
        bool, Option("--view", help="Then step through the rounds on a local page (docs/viewer.md).", rich_help_panel=OUTPUT)
    ] = False


def flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for each field of its parameters that are dataclasses."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if dataclasses.is_dataclass(parameter.annotation):
            groups[parameter.name] = cls = typing.cast(type, parameter.annotation)
            parameters += _parameters(cls)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, cls in groups.items():
            values[name] = cls(**{f.name: values.pop(f.name) for f in dataclasses.fields(cls)})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(cls: type) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(cls, include_extras=True)
    made = []
    for f in dataclasses.fields(cls):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        made.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[f.name]))
    return made


def named_values(texts: Sequence[str], what: str, flag: str) -> dict[str, str]:
    """Names and values from ``name=value``."""
    made = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ParameterError(f"{what} is written {flag} name=value; got {text!r}")
        made[name] = value
    return made


def numbers(text: str, name: str) -> list[int]:
    """Whole numbers, 1 or more, from ``1,2,4``."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ParameterError(f"{name} must be whole numbers, 1 or more, with commas between; got {text!r}")
    return list(dict.fromkeys(values))


def draft_length(text: str) -> int | str:
    """A draft length, or ``auto``."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ParameterError(f"--draft must be a whole number or auto; got {text!r}") from None


def draft_lengths(text: str) -> list[int | str]:
    """Draft lengths from ``auto,2,4``."""
    parts = text.split(",")
    fixed = [part for part in parts if part != "auto"]
    if fixed:
        numbers(",".join(fixed), "--draft")
    return list(dict.fromkeys(draft_length(part) for part in parts))


def text_or_file(value: str, name: str) -> str:
    """A text, or what is in the file when it begins with ``@``."""
    return read_text(value[1:], name) if value.startswith("@") else value


def read_text(path: str, name: str) -> str:
    """A UTF-8 file's text."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ParameterError(f"{name}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"{name}: {path} is not UTF-8 text") from error


def usage(message: str) -> Exception:
    """A mistake in how the command was called."""
    return typer.BadParameter(message)


def refuse_together(given: Sequence[tuple[str, object]]) -> None:
    """Raise when more than one of these options was given."""
    names = [name for name, value in given if value not in (None, False)]
    if len(names) > 1:
        raise ParameterError(f"{' and '.join(names)} cannot be given together")
