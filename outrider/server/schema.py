"""What a request may say, as OpenAI's API has it, with extensions named as in vLLM where it has them.

A field that is not here is refused by name. A field of OpenAI's that would change the output in a way that is not supported is
here with the values that change nothing, so that clients that spell out defaults are served. None stands for an absent field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_CHOICES = 64
Bias = dict[str, float]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    """No unknown fields, no strings for numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Speculation(Strict):
    """How this request is drafted for. It changes the speed and never what is said.

    drafter: one that the server has; none for plain decoding. draft: most tokens to draft in a round. report: each chunk, and the
    answer, says what was drafted and what of it was kept.
    """

    drafter: str | None = None
    draft: Annotated[int, Field(ge=0, le=1024)] | None = None
    report: bool | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Prediction(Strict):
    """A text that is expected in the output, to draft from."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]


class Message(BaseModel):
    """One turn. Fields beyond these go to the model's chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    def as_template(self) -> dict[str, Any]:
        """The turn as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        content = text_of(self.content) if self.content is not None else ""
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        return {"role": role, "content": content, **more}


def text_of(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer looks like: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Common(Strict):
    """What completions and chat completions share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    regex: str | None = None
    choices: Annotated[list[str], Field(min_length=1)] | None = None
    lark: str | None = None
    speculation: Speculation | Literal[False] | None = None
    # what changes nothing here
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Common):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None


class Problem(BaseModel):
    """What is wrong. param: the field that it is about."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: Problem
