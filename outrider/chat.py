"""Tools and reasoning in conversations: what goes into the chat template, and what is read out of the text that comes back.

How a model writes its calls is asked of its chat template: a conversation with a call is rendered, and the call looked for in what
comes out. A template that writes none of the `DIALECTS` is refused by name. Reading does not depend on how the text is
chunked: a text that could still become something else is held back.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from .errors import ParameterError
from .grammar import WHITESPACE
from .text import Message, Tokenizer, held_back

THINK, END_THINK = "<think>", "</think>"
MOST_CALLS = 16
"""Calls in an answer that is held to a grammar."""
BETWEEN = re.compile(r"[\s;,]*")
"""What may stand between calls."""
DECODER = json.JSONDecoder(strict=False)
"""Takes line breaks in strings, as models write them."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made; arguments: JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """A part of an answer: ``content`` or ``reasoning`` with its text, or a ``call``."""

    kind: str
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True)
class Dialect:
    """How a model writes calls, as JSON with ``name`` and `key`.

    opening, closing: what stands around calls; no opening: a call is the whole answer. is_list: all calls stand in one JSON array.
    starts: how an answer that is nothing but calls begins, without its whitespace, where the opening is missing: small models forget
    it, and a special token has no text.
    """

    name: str
    opening: str
    closing: str
    key: str
    starts: tuple[str, ...] = ()
    is_list: bool = False

    def written(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """A call as templates write it, without whitespace, in either order."""
        first, second = f'"name":{_compact(name)}', f'"{self.key}":{_compact(arguments)}'
        opening = self.opening + "[" * self.is_list
        closing = "" if self.is_list else "}" + self.closing
        return f"{opening}{{{first},{second}{closing}", f"{opening}{{{second},{first}{closing}"

    def calls(self, text: str, names: Sequence[str]) -> list[ToolCall] | None:
        """The calls that `text` holds, and nothing else; None where it is anything else, or calls what is not there."""
        calls, at = [], BETWEEN.match(text).end()  # type: ignore[union-attr]
        while at < len(text):
            try:
                value, at = DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            for one in value if self.is_list and isinstance(value, list) else [value]:
                call = self._call(one, names)
                if call is None:
                    return None
                calls.append(call)
            at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        return calls or None

    def _call(self, value: Any, names: Sequence[str]) -> ToolCall | None:
        if not isinstance(value, dict) or value.get("name") not in names:
            return None
        arguments = value.get(self.key, {})
        try:
            if isinstance(arguments, str):
                arguments = DECODER.decode(arguments)
            written = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, RecursionError):
            return None
        return ToolCall(value["name"], written) if isinstance(arguments, dict) else None


DIALECTS = (
    Dialect("Hermes", "<tool_call>", "</tool_call>", "arguments", ('{"name"', '{"arguments"')),
    Dialect("Mistral", "[TOOL_CALLS]", "", "arguments", ('[{"name"', '[{"arguments"'), is_list=True),
    Dialect("Llama 3", "", "", "parameters", ('{"name"', '{"type":"function"', '{"parameters"')),
)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# ---- what a model's template can do --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Abilities:
    """What a chat template makes of tools and reasoning.

    dialect: how calls are written; None: it has no tools that are understood here. arguments_as_text: whether the turns with calls hold
    their arguments as JSON text, not as a mapping. thinks: whether answers may begin with reasoning between `THINK` and `END_THINK`.
    """

    dialect: Dialect | None = None
    arguments_as_text: bool = False
    thinks: bool = False


def abilities(tokenizer: Tokenizer) -> Abilities:
    """Found by rendering a conversation with a call."""
    thinks = END_THINK in (tokenizer.template or "")
    if tokenizer.template:
        for as_text in (False, True):
            shown = _rendered_call(tokenizer, as_text)
            for dialect in DIALECTS:
                if any(call in shown for call in dialect.written("look_up", {"place": "x"})):
                    return Abilities(dialect, as_text, thinks)
    return Abilities(thinks=thinks)


def _rendered_call(tokenizer: Tokenizer, as_text: bool) -> str:
    """A conversation with a tool and a call, without whitespace; empty where the template does not show both."""
    arguments: Any = '{"place": "x"}' if as_text else {"place": "x"}
    function = {"name": "look_up", "description": "d", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "abcdef123", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    turns: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        shown = "".join(tokenizer.render(turns, [{"type": "function", "function": function}]).split())
    except ParameterError:
        return ""
    return shown if shown.count("look_up") > 1 else ""


def _special(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of `text` where it is a special token, which `decode` leaves out."""
    return next((token for token in sorted(tokenizer.special) if tokenizer.token_text(token) == text), None)


# ---- a request's tools -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tools:
    """A request's tools, checked, over one model's chat template. Without any, it still reads reasoning.

    definitions: as the template gets them. choice: ``auto``, ``none``, ``required``, or the name of the tool to call. parallel: whether
    there may be several calls in an answer.
    """

    tokenizer: Tokenizer
    can: Abilities
    definitions: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    parallel: bool = True
    names: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(tool["function"]["name"] for tool in self.definitions))

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        choice: str | Mapping[str, Any] | None = None,
        parallel: bool = True,
        can: Abilities | None = None,
    ) -> Tools:
        """tools, choice, parallel: ``tools``, ``tool_choice``, ``parallel_tool_calls`` of OpenAI's API. can: `abilities`, if known.

        Raises ParameterError for what is not well formed, and for a model whose chat template has no tools.
        """
        can = can or abilities(tokenizer)
        if not tools:
            if choice not in (None, "none", "auto"):
                raise ParameterError(f"tool_choice is {choice!r}, but there are no tools")
            return cls(tokenizer, can)
        if can.dialect is None:
            known = ", ".join(dialect.name for dialect in DIALECTS)
            raise ParameterError(f"tools: this model's chat template has none in a form that is understood here ({known})")
        made = cls(tokenizer, can, tuple(map(_checked, tools)), _choice(choice), parallel)
        if len(set(made.names)) < len(made.names):
            raise ParameterError(f"tools: two have the same name; got {', '.join(made.names)}")
        if made.choice not in ("auto", "none", "required", *made.names):
            raise ParameterError(f"tool_choice names {made.choice!r}, but the tools are {', '.join(made.names)}")
        if made._held_in_auto and (not can.dialect.closing or _special(tokenizer, can.dialect.opening) is not None):
            what = "tools: strict" if parallel else "parallel_tool_calls: false"
            raise ParameterError(
                f"{what} needs a tool_choice that is required or names a function, with this model's chat template"
            )
        return made if made.choice != "none" else cls(tokenizer, can)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation with the tools, up to where the answer starts."""
        turns = [self._turn(message) for message in messages]
        return self.tokenizer.chat(turns, self.definitions)

    def _turn(self, message: Message) -> Message:
        """Calls of earlier turns hold their arguments as JSON in OpenAI's API, and most templates want a mapping."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        made = []
        for call in calls if isinstance(calls, Sequence) else [calls]:
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                raise ParameterError(f"messages: tool_calls must hold calls of functions; got {_compact(call)[:80]}")
            arguments = function.get("arguments")
            if isinstance(arguments, str) and not self.can.arguments_as_text:
                try:
                    arguments = json.loads(arguments) if arguments else {}
                except (ValueError, RecursionError):
                    raise ParameterError(f"messages: the arguments of a call are not JSON: {arguments[:60]}") from None
            made.append({**call, "function": {**function, "arguments": arguments}})
        return {**message, "tool_calls": made}

    def reader(self, prompt: Sequence[int]) -> Reader:
        """What reads the answer to this prompt."""
        return Reader(self.can.dialect if self.names else None, self.names, self.can.thinks, self._inside(prompt))

    def grammar(self, prompt: Sequence[int]) -> str | None:
        """For `SamplingParams.lark`: what the answer must be so that the wanted calls are in it; None where it is free."""
        wanted = [tool for tool in self.definitions if self.choice in ("auto", "required", tool["function"]["name"])]
        if not wanted or (self.choice == "auto" and not self._held_in_auto):
            return None
        dialect = self.can.dialect
        assert dialect is not None
        opening, closing = dialect.opening, dialect.closing
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(wanted)))}"]
        for i, tool in enumerate(wanted):
            head = f'{{"name": {json.dumps(tool["function"]["name"], ensure_ascii=False)}, "{dialect.key}": '
            rules += [f'call_{i}: {_quoted(head)} arguments_{i} "}}"', f"arguments_{i}: %json {_arguments(tool)}"]
        several = self.parallel and self.choice in ("auto", "required") and bool(opening)
        if self.choice == "auto":
            start = "free* text" if several else "free | text"
            rules += [
                f'free: free_head "\\n" call "\\n" {self._marker(closing)}',
                f"free_head[lazy]: TEXT {_quoted(opening)}",
                "text: TEXT",
                r"TEXT: /(.|\n)*/",
            ]
            return "\n".join([f"start: {start}", *rules])
        if dialect.is_list:
            more = f'(", " call){{0,{MOST_CALLS - 1}}}' if several else ""
            calls = f'{self._marker(opening)} "[" call {more} "]"'
        else:
            rules.append(f'one: {self._marker(opening)} "\\n" call "\\n" {self._marker(closing)}' if opening else "one: call")
            calls = f'one ("\\n" one){{0,{MOST_CALLS - 1}}}' if several else "one"
        return "\n".join([f"start: {self._thinking(prompt, rules)} {calls}", *rules])

    def _thinking(self, prompt: Sequence[int], rules: list[str]) -> str:
        """The reasoning before calls, as a part of the start rule; its own rules are added."""
        if not self.can.thinks:
            return ""
        rules += [
            f"thought[lazy]: /(.|\\n)*/ {_quoted(END_THINK)}",
            r"thoughts: thought /\s{0,4}/",
        ]
        return "thoughts" if self._inside(prompt) else f"({_quoted(THINK)} thoughts)?"

    def _marker(self, text: str) -> str:
        """In a Lark grammar: a text, or the token that it is."""
        special = _special(self.tokenizer, text)
        return _quoted(text) if special is None else f"<[{special}]>"

    @property
    def _held_in_auto(self) -> bool:
        """Whether an answer that need not call is held to a grammar, too."""
        strict = any(tool["function"].get("strict") for tool in self.definitions)
        return self.choice == "auto" and (strict or not self.parallel)

    def _inside(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends within reasoning that the template has begun."""
        if not self.can.thinks:
            return False
        end = "".join(self.tokenizer.token_text(token) for token in prompt[-8:])
        return end.rfind(THINK) > end.rfind(END_THINK)


def _choice(choice: str | Mapping[str, Any] | None) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, Mapping):
        name = (choice.get("function") or {}).get("name") if isinstance(choice.get("function") or {}, Mapping) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise ParameterError(f"tool_choice must name a function; got {_compact(choice)[:80]}")
        return name
    if choice not in ("auto", "none", "required"):
        raise ParameterError(f"tool_choice must be auto, none, required or name a function; got {choice!r}")
    return choice


def _checked(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise ParameterError(f"tools must hold functions; got {_compact(tool)[:80]}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise ParameterError(f"tools: a function has no name; got {_compact(tool)[:80]}")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ParameterError(f"tools: the parameters of {name!r} must be a JSON schema; got {_compact(parameters)[:80]}")
    if not isinstance((parameters or {}).get("x-guidance", {}), Mapping):
        raise ParameterError(f"tools: x-guidance of {name!r} must be a JSON object")
    return tool


def _arguments(tool: Mapping[str, Any]) -> str:
    """The schema of a tool's arguments. Of one that is not strict, keywords that are not supported are left out."""
    function = tool["function"]
    schema = {"type": "object", **(function.get("parameters") or {})}
    guidance = {"whitespace_pattern": WHITESPACE, "lenient": not function.get("strict")}
    return json.dumps({**schema, "x-guidance": {**guidance, **schema.get("x-guidance", {})}}, ensure_ascii=False)


def _quoted(text: str) -> str:
    """As a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


# ---- reading ----------------------------------------------------------------------------------------------------------------


class Reader:
    """Takes an answer as it comes and gives its pieces. All of its pieces together do not depend on the chunks.

    Whitespace around reasoning and calls is left out; a call that is broken, or of a tool that is not there, is content.
    """

    def __init__(self, dialect: Dialect | None, names: Sequence[str] = (), thinks: bool = False, inside: bool = False):
        """inside: the text begins within reasoning."""
        self._dialect = dialect
        self._names = names
        self._thinks = thinks
        self._mode = "reasoning" if inside else "start"  # or content, or call
        self._buffer = ""  # text that no piece was made of yet
        self._space = ""  # whitespace that may turn out to stand before a call
        self._trims = inside  # whether whitespace that comes next stands after reasoning's start or end
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """What is left when no more text comes."""
        pieces: list[Piece] = []
        rest, self._buffer = self._buffer, ""
        if self._mode in ("start", "call"):
            opening = self._dialect.opening if self._dialect and self._mode == "call" else ""
            self._mode = "content"
            self._call_or_say(rest, opening + rest, pieces)
        else:
            self._say(rest, pieces)
        if self._space and self._mode == "content" and not self.calls:
            pieces.append(Piece("content", self._space))
        self._space = ""
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        """One step; whether another may follow without more text."""
        before = (self._mode, len(self._buffer))
        {"start": self._in_start, "reasoning": self._in_reasoning, "content": self._in_content, "call": self._in_call}[
            self._mode
        ](pieces)
        return (self._mode, len(self._buffer)) != before

    def _in_start(self, pieces: list[Piece]) -> None:
        """Nothing was said yet but whitespace."""
        text = self._buffer.lstrip()
        if not text:
            return
        if self._thinks and text.startswith(THINK):
            self._buffer, self._mode, self._trims = text[len(THINK) :], "reasoning", True
        elif not (self._thinks and THINK.startswith(text)) and not self._may_be_calls(text):
            self._mode = "content"

    def _may_be_calls(self, text: str) -> bool:
        """Whether an answer that begins so may be nothing but calls."""
        text = "".join(text[:200].split())
        return (
            any(start.startswith(text) or text.startswith(start) for start in self._dialect.starts) if self._dialect else False
        )

    def _in_reasoning(self, pieces: list[Piece]) -> None:
        thought, end, rest = self._buffer.partition(END_THINK)
        if end:
            self._say(thought, pieces)
            self._buffer, self._mode, self._space, self._trims = rest, "start", "", True
        else:
            self._say_sure(END_THINK, pieces)

    def _in_content(self, pieces: list[Piece]) -> None:
        opening = self._dialect.opening if self._dialect else ""
        said, found, rest = self._buffer.partition(opening) if opening else (self._buffer, "", "")
        if found:
            self._say(said, pieces)
            self._buffer, self._mode = rest, "call"
        else:
            self._say_sure(opening, pieces)

    def _in_call(self, pieces: list[Piece]) -> None:
        dialect = self._dialect
        assert dialect is not None
        end = self._buffer.find(dialect.closing) if dialect.closing else -1
        while end >= 0 and _in_string(self._buffer[:end]):
            end = self._buffer.find(dialect.closing, end + 1)
        if end >= 0:
            inner, self._buffer = self._buffer[:end], self._buffer[end + len(dialect.closing) :]
            self._mode = "content"
            self._call_or_say(inner, dialect.opening + inner + dialect.closing, pieces)

    def _call_or_say(self, inner: str, text: str, pieces: list[Piece]) -> None:
        """The calls in `inner`, or `text` as content where it holds none."""
        calls = self._dialect.calls(inner, self._names) if self._dialect else None
        if calls is None:
            self._say(text, pieces)
            return
        self._space = ""
        self._trims = False
        self.calls += len(calls)
        pieces += [Piece("call", call=call) for call in calls]

    def _say_sure(self, marker: str, pieces: list[Piece]) -> None:
        """Say what is in the buffer, but for an end that may become `marker`."""
        sure = len(self._buffer) - held_back(self._buffer, [marker] if marker else [])
        said, self._buffer = self._buffer[:sure], self._buffer[sure:]
        self._say(said, pieces)

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """Make a piece of `text`; whitespace at its end waits for what comes next."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            pieces.append(Piece("reasoning" if self._mode == "reasoning" else "content", said))


def _in_string(text: str) -> bool:
    """Whether JSON `text` breaks off within a string."""
    try:
        DECODER.decode(text.lstrip())
    except RecursionError:
        return False
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    return False
