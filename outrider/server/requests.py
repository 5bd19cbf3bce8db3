"""From a checked request to sequences, and from the server's options to what it can do for a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..chat import Abilities, Reader, Tools, abilities
from ..decode import Sequence as Decoding
from ..drafters import TABLE, load_drafter
from ..engine import Engine
from ..errors import OutriderError, ParameterError, PromptError
from ..sampling import SamplingParams
from .errors import Refusal, invalid
from .schema import ChatRequest, Common, CompletionRequest, ResponseFormat, Speculation, text_of

LIGHT = ("none", "suffix", "lookup", "prediction")
"""Drafters without weights: every request may choose them."""
MOST_SEQUENCES = 256
"""Prompts times choices of one request."""
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "seed",
    "regex",
    "lark",
)
"""Fields that are parameters of the same name."""


@dataclass(frozen=True)
class Prepared:
    """A request's sequences, and what reads the text of each; None where it is text and nothing else."""

    sequences: list[Decoding]
    readers: list[Reader | None]


@dataclass
class Served:
    """The target under its public name, with the drafters that requests may choose: `engine` has the default one."""

    name: str
    engine: Engine
    drafters: dict[str, Engine] = field(default_factory=dict)
    """Engines over the same target, by the drafter's public name."""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.drafters.setdefault(self.engine.drafter.name, self.engine)
        for name in LIGHT:
            if name not in self.drafters:
                light = load_drafter(name, self.engine.target)
                self.drafters[name] = Engine(self.engine.target, light, self.engine.pace, self._rule(name))

    def _rule(self, name: str) -> str | None:
        rule = self.engine.accept
        return rule if rule != "block" or "chain" in TABLE[name].shapes else None

    def prepare(self, request: ChatRequest | CompletionRequest) -> Prepared:
        """A sequence for each prompt and choice, prompt by prompt. Raises Refusal for what cannot be decoded."""
        if request.model != self.name:
            raise Refusal(
                404,
                f"the model {request.model!r} is not here; this server has {self.name!r}",
                "invalid_request_error",
                "model",
                "model_not_found",
            )
        speculation = request.speculation
        if speculation is False:
            speculation = Speculation(drafter="none")
        engine = self._engine(request, speculation)
        grammar = None
        try:
            params = self._params(request)
            prompts, tools = self._prompts(request)
            if tools and (grammar := tools.grammar(prompts[0])):
                params = replace(params, lark=grammar)
            if len(prompts) * (request.n or 1) > MOST_SEQUENCES:
                raise PromptError(
                    f"{len(prompts)} prompts with n = {request.n or 1} choices are more than {MOST_SEQUENCES} sequences"
                )
            sequences = engine.sequences(prompts, params, request.n or 1)
        except PromptError as error:
            code = "context_length_exceeded" if "context" in str(error) else None
            raise invalid(str(error), "messages" if isinstance(request, ChatRequest) else "prompt", code) from error
        except (OutriderError, UnicodeEncodeError) as error:
            why = str(error).replace("lark", "tools", 1) if grammar else str(error)
            raise invalid(why, field_of(why, request)) from error
        for sequence in sequences:
            sequence.drafter = engine.drafter if engine is not self.engine else None
            sequence.most_drafted = speculation.draft if speculation else None
        return Prepared(sequences, [tools.reader(s.tokens) if tools else None for s in sequences])

    def _engine(self, request: Common, speculation: Speculation | None) -> Engine:
        """The engine with the drafter of this request."""
        name = speculation.drafter if speculation else None
        if name is None:
            wanted = request.prediction is not None and not self.engine.drafter.takes_prediction
            return self.drafters["prediction"] if wanted else self.engine
        if name not in self.drafters:
            raise invalid(
                f"speculation.drafter: this server has no {name!r}; it has {', '.join(self.drafters)}",
                "speculation.drafter",
                "invalid_value",
            )
        if request.prediction is not None and not self.drafters[name].drafter.takes_prediction:
            raise invalid(f"prediction: the drafter {name!r} does not use it; leave one of them out", "prediction")
        if name == "prediction" and request.prediction is None:
            raise invalid("speculation.drafter: 'prediction' needs the field prediction", "prediction", "missing_parameter")
        return self.drafters[name]

    def _params(self, request: ChatRequest | CompletionRequest) -> SamplingParams:
        values: dict[str, Any] = {"temperature": 1.0}  # as OpenAI's API has it
        values |= {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
        values["max_tokens"] = self._max_tokens(request)
        if request.stop is not None:
            values["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        if request.stop_token_ids is not None:
            values["stop_token_ids"] = tuple(request.stop_token_ids)
        if request.logit_bias is not None:
            values["logit_bias"] = {self._token(name): bias for name, bias in request.logit_bias.items()}
        if request.prediction is not None:
            values["prediction"] = self._prediction(text_of(request.prediction.content))
        if request.choices is not None:
            values["choices"] = tuple(request.choices)
        if isinstance(request, ChatRequest) and request.response_format is not None:
            values |= self._format(request.response_format)
        if isinstance(request, CompletionRequest):
            values["logprobs"] = request.logprobs
        elif request.logprobs:
            values["logprobs"] = request.top_logprobs or 0
        elif request.top_logprobs is not None:
            raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
        return SamplingParams.make(**values)

    def _max_tokens(self, request: ChatRequest | CompletionRequest) -> int:
        """As asked for; up to the end of the context where nothing is said."""
        given = {"max_tokens": request.max_tokens}
        if isinstance(request, ChatRequest):
            given["max_completion_tokens"] = request.max_completion_tokens
        named = {name: value for name, value in given.items() if value is not None}
        if len(set(named.values())) > 1:
            raise ParameterError("max_tokens and max_completion_tokens differ; give one of them")
        for name, value in named.items():
            if value < 1:
                raise ParameterError(f"{name} must be a whole number, 1 or more; got {value}")
            return value
        return max(self.engine.target.context_length, request.min_tokens or 1)

    def _prediction(self, text: str) -> str:
        """The text, if an answer can be as long as that. One that is much longer would cost all requests time."""
        most, tokenizer = self.engine.target.context_length, self.engine.target.tokenizer
        if len(text) > most and tokenizer and (number := len(tokenizer.encode_plain(text))) > most:
            raise ParameterError(f"prediction has {number} tokens, but the context ends at {most}; give the part that matters")
        return text

    @staticmethod
    def _token(name: str) -> int:
        if not name.isdecimal() or len(name) > 9:
            raise ParameterError(f"logit_bias must map token ids to numbers from -100 to 100; got {name!r}")
        return int(name)

    def _prompts(self, request: ChatRequest | CompletionRequest) -> tuple[list[Any], Tools | None]:
        """The prompts; of a conversation also what reads its answers, where these may hold more than text."""
        if isinstance(request, ChatRequest):
            messages = [message.as_template() for message in request.messages]
            tokenizer = self.engine.target.tokenizer
            if tokenizer is None:
                raise ParameterError("messages: this model has no tokenizer")
            parallel = request.parallel_tool_calls is not False
            tools = Tools.of(tokenizer, request.tools, request.tool_choice, parallel, self._abilities)
            return [tools.prompt(messages)], tools if tools.definitions or self._abilities.thinks else None
        prompt = request.prompt
        if isinstance(prompt, str):
            return [prompt], None
        if not prompt:
            raise PromptError("the prompt is empty")
        return ([prompt] if isinstance(prompt[0], int) else list(prompt)), None

    @cached_property
    def _abilities(self) -> Abilities:
        assert self.engine.target.tokenizer is not None
        return abilities(self.engine.target.tokenizer)

    @staticmethod
    def _format(form: ResponseFormat) -> dict[str, Any]:
        """The parameters of a `response_format`."""
        if (form.type == "json_schema") != (form.json_schema is not None):
            raise ParameterError("response_format: the type json_schema and the field json_schema belong together")
        if form.json_schema is not None:
            return {"json_schema": {} if form.json_schema.schema_ is None else form.json_schema.schema_}
        return {"json_object": True} if form.type == "json_object" else {}


def field_of(message: str, request: ChatRequest | CompletionRequest) -> str | None:
    """The request's field that an error's message begins with, if it does."""
    first = message.split(maxsplit=1)[0].rstrip(":") if message else ""
    if first in ("json_schema", "json_object"):
        first = "response_format"
    return first if first in type(request).model_fields else None
