"""A request's own faults are its own: a 4xx or an error event that says what to change, never a 5xx."""

from __future__ import annotations

import json
from typing import Any, Iterator

import pytest
from serving import NAME, Running, served, serving
from test_chat import CALLS, TOOL, WEATHER

from outrider.server.gate import is_called

HELLO = [{"role": "user", "content": "Please bring a notebook"}]
ENDLESS = 10**400


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(served(template=TOOL.replace("CALL", CALLS["Hermes"]))) as running:
        yield running
        running.until_idle()
        assert running.slots() == 0


def post(server: Running, **body: Any) -> Any:
    body = {"model": NAME, "max_tokens": 8, "messages": HELLO, **body}
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    if "prompt" in body:
        del body["messages"]
    with server.client() as client:
        return client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def nested(depth: int) -> Any:
    made: Any = {}
    for _ in range(depth):
        made = {"a": made}
    return made


def calls(value: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "tool_calls": value}]}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def of_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"regex": "", "min_tokens": 3}, None),
        ({"choices": ["a"], "min_tokens": 2, "stop_token_ids": [70]}, None),
        ({"regex": "("}, "regex"),
        ({"lark": "start:"}, "lark"),
        ({"lark": "start: start"}, None),
        (of_schema({"type": "string", "pattern": "("}), "response_format"),
        (of_schema({"enum": []}), "response_format"),
        (of_schema({"type": "integer", "minimum": 3, "maximum": 2}), "response_format"),
        (of_schema({"$ref": "#/nowhere"}), "response_format"),
        (of_schema({"$defs": {"a": nested(900)}, "allOf": [{"$ref": "#/$defs/a"}, {"enum": []}]}), "response_format"),
        (calls("abc"), "messages"),
        (calls(5), "messages"),
        (calls([None]), "messages"),
        (calls([{"function": "f"}]), "messages"),
        (calls([{"function": {"name": "f", "arguments": "{"}}]), "messages"),
        (calls([{"function": {"name": "f", "arguments": "[" * 5000}}]), "messages"),
        ({"messages": [{"role": "user", "content": "?", "more": nested(900)}], "tools": [nested(900)]}, None),
        ({"tools": [tool(parameters={"x-guidance": 5})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool(parameters={"type": "nothing"})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool(parameters={"enum": [3], "type": "object"})], "tool_choice": "required"}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": []}}, "tool_choice"),
        ({"temperature": ENDLESS}, "temperature"),
        ({"logit_bias": {"1": ENDLESS}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"seed": ENDLESS}, "seed"),
        ({"stop_token_ids": [ENDLESS]}, "stop_token_ids"),
        ({"n": ENDLESS}, "n"),
        ({"min_tokens": ENDLESS}, "min_tokens"),
        ({"prompt": [ENDLESS]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prediction": {"content": "bring a pen " * 400}}, "prediction"),
    ],
)
def test_it_is_refused(server: Running, body: dict[str, Any], param: str | None) -> None:
    got = post(server, **body)
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert param is None or error["param"] == param, error


@pytest.mark.parametrize(
    "body",
    [
        {"top_k": ENDLESS, "temperature": 1},
        {"max_tokens": ENDLESS, "stop": "a"},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300, "choices": ["bring", "a notebook"]},
        {"temperature": 5e-324},
        {"temperature": 1e308, "top_p": 5e-324, "min_p": 1},
        {"messages": [{"role": "user", "content": "?", "more": nested(400)}]},
        {"tools": [tool(description=nested(50))], "tool_choice": "auto"},
    ],
)
def test_what_is_odd_but_means_something_is_served(server: Running, body: dict[str, Any]) -> None:
    got = post(server, **body)
    assert got.status_code == 200, got.text


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_grammar_that_comes_to_its_end_too_soon(server: Running, drafter: str) -> None:
    """What was not known at the start: a stream has an error event, and others are not troubled."""
    body = {"regex": "[a-z]{2}", "min_tokens": 6, "seed": 1, "speculation": {"drafter": drafter}}
    error = post(server, **body).json()["error"]
    assert error["type"] == "invalid_request_error" and "min_tokens (6)" in error["message"]
    got = post(server, **body, stream=True)
    *said, last = [line for line in got.text.splitlines() if line]
    assert got.status_code == 200 and json.loads(last.removeprefix("data: ")) == {"error": error}
    assert any('"content": "' in line for line in said) and "[DONE]" not in got.text


def test_names_and_addresses_of_a_host_header() -> None:
    for host in (
        "",
        "localhost",
        "LocalHost:8000",
        "my.localhost.",
        "127.0.0.1",
        "127.0.0.1:80",
        "[::1]:8000",
        "10.0.0.7:8000",
        "chat.lan",
    ):
        assert is_called(host, ["chat.lan"]), host
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "evil.example@localhost",
        "[::1",
        "a b",
        "127.0.0.1.evil",
        "lan",
    ):
        assert not is_called(host, ["chat.lan"]), host


def test_a_foreign_name_is_refused_everywhere() -> None:
    with serving(hosts=("Chat.Lan",)) as server, server.client() as client:
        for path in ("/", "/health", "/v1/models", "/openapi.json", "/page/chat.js"):
            assert client.get(path).status_code == 200, path
            assert client.get(path, headers={"host": "chat.lan:8000"}).status_code == 200
            got = client.get(path, headers={"host": "evil.example:8000"})
            assert got.status_code == 403, path
            error = got.json()["error"]
            assert (
                error["code"] == "host_not_allowed"
                and "'evil.example:8000'" in error["message"]
                and "--allow-host" in error["message"]
            )
        got = client.post("/v1/chat/completions", headers={"host": "evil.example"}, json={"model": NAME, "messages": HELLO})
        assert got.status_code == 403
    with serving() as server, server.client() as client:
        assert client.get("/v1/models", headers={"host": "any.example"}).status_code == 200
