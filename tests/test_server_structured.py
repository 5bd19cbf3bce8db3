"""Structured output, tools and reasoning through the official client: the grammar holds with every drafter, streamed or not."""

from __future__ import annotations

import json
from typing import Any, Iterator

import jsonschema_rs
import openai
import pytest
from serving import NAME, Running, served, serving
from test_chat import CALLS, TIME, TOOL, WEATHER

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "born": {"type": "integer", "minimum": 1800, "maximum": 1999}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
HELLO: Any = [{"role": "user", "content": "Who wrote it?"}]
DRAFTERS = ("none", "suffix", "model")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(served(template=TOOL.replace("CALL", CALLS["Hermes"]))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def ask(client: openai.OpenAI, drafter: str, **values: Any) -> Any:
    values = {"max_tokens": 200, "temperature": 1.0, "messages": HELLO, **values}
    extra = {**values.pop("extra_body", {}), "speculation": {"drafter": drafter}}
    return client.chat.completions.create(model=NAME, extra_body=extra, **values)


def joined(stream: Any) -> tuple[dict[str, Any], str]:
    """The message that a stream's deltas make, and how it ended."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in stream:
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            assert call.index == len(message["tool_calls"]) and call.id and call.type == "function"
            message["tool_calls"].append((call.function.name, call.function.arguments))
        finish = choice.finish_reason
    return message, finish


@pytest.mark.parametrize("seed", range(3))
def test_json_of_a_schema(client: openai.OpenAI, seed: int) -> None:
    texts = set()
    for drafter in DRAFTERS:
        got = ask(client, drafter, seed=seed, response_format=FORMAT)
        assert got.choices[0].finish_reason == "stop"
        texts.add(got.choices[0].message.content)
        texts.add(joined(ask(client, drafter, seed=seed, response_format=FORMAT, stream=True))[0]["content"])
    (text,) = texts
    jsonschema_rs.validator_for(SCHEMA).validate(json.loads(text))


def test_other_forms(client: openai.OpenAI, server: Running) -> None:
    assert ask(client, "suffix", response_format={"type": "text"}).choices[0].message.content
    one = ask(client, "suffix", extra_body={"choices": ["yes", "no"]}).choices[0]
    assert one.message.content in ("yes", "no") and one.finish_reason == "stop"
    got = client.completions.create(model=NAME, prompt="x", extra_body={"regex": "[0-9]{3}-[0-9]{2}"}).choices[0]
    assert len(got.text) == 6 and got.text[3] == "-"


def test_what_cannot_be_held_to_is_named(client: openai.OpenAI) -> None:
    def refused(**values: Any) -> Any:
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, "none", **values)
        return error.value

    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    assert refused(response_format=broken).param == "response_format"
    assert refused(response_format={"type": "json_schema"}).param == "response_format"
    assert refused(response_format={"type": "xml"}).param == "response_format"
    assert refused(tools=[{"type": "web_search"}]).param == "tools"
    assert refused(tool_choice="required").param == "tool_choice"
    both = refused(response_format=FORMAT, extra_body={"regex": "a"})
    assert "cannot be given together" in both.message


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_are_called(client: openai.OpenAI, choice: Any) -> None:
    made = set()
    values = {"seed": 4, "tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": False}
    for drafter in DRAFTERS:
        got = ask(client, drafter, **values).choices[0]
        assert got.finish_reason == "tool_calls"
        (call,) = got.message.tool_calls
        made.add((call.function.name, call.function.arguments))
        message, finish = joined(ask(client, drafter, stream=True, **values))
        assert finish == "tool_calls"
        made.update(message["tool_calls"])
    ((name, arguments),) = made
    assert name in ("weather", "time")
    if name == "weather":
        jsonschema_rs.validator_for(WEATHER["function"]["parameters"]).validate(json.loads(arguments))


def test_a_conversation_with_a_call_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    got = ask(client, "suffix", messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=10)
    assert got.choices[0].message.content and not got.choices[0].message.tool_calls
    free = ask(client, "suffix", messages=messages, tools=[WEATHER], max_tokens=10)
    assert free.choices[0].finish_reason == "length"


def test_reasoning_is_told_apart() -> None:
    wanted = {"regex": "<think>[a-z]{5}</think>[0-9]{4}"}
    with serving(served(template=TOOL.replace("CALL", CALLS["Hermes"]) + "{# </think> #}")) as server:
        check_reasoning(openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0), wanted)


def check_reasoning(client: openai.OpenAI, wanted: Any) -> None:
    got = ask(client, "suffix", seed=2, extra_body=wanted).choices[0].message
    assert len(got.reasoning_content) == 5 and len(got.content) == 4 and got.content.isdecimal()
    pieces: dict[str, str] = {"content": "", "reasoning_content": ""}
    for chunk in ask(client, "suffix", seed=2, extra_body=wanted, stream=True):
        for name in pieces:
            pieces[name] += getattr(chunk.choices[0].delta, name, None) or ""
    assert pieces == {"content": got.content, "reasoning_content": got.reasoning_content}
