"""Clients that people use, against a real server: every parameter, streamed or not, with each kind of drafter.

What is said must not depend on the drafter: greedy text and text under a seed equal those without speculation, but for ties.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Iterator

import openai
import pytest
from serving import NAME, Running, serving
from ties import Ledger

from outrider.sampling import SamplingParams

SYSTEM = {"role": "system", "content": "You say what you are told."}
PROMPT = "The bridge over the river will be closed for cars"
TEXT = "abcabcabcab"
SEEDED = {"temperature": 1.0, "seed": 11}
GREEDY = {"temperature": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seed": SEEDED,
    "temperature": {"temperature": 1.7, "seed": 5},
    "top_p": {**SEEDED, "top_p": 0.6},
    "top_k": {**SEEDED, "extra_body": {"top_k": 3}},
    "min_p": {**SEEDED, "extra_body": {"min_p": 0.4}},
    "repetition_penalty": {**GREEDY, "extra_body": {"repetition_penalty": 1.6}},
    "presence_penalty": {**GREEDY, "presence_penalty": 2.0},
    "frequency_penalty": {**SEEDED, "frequency_penalty": 1.5},
    "logit_bias": {**GREEDY, "logit_bias": {"70": 100}},
    "max_tokens": {**GREEDY, "max_tokens": 7},
    "max_completion_tokens": {**GREEDY, "max_tokens": openai.omit, "max_completion_tokens": 5},
    "stop": {**GREEDY, "stop": ["a", "q"]},
    "stop with min_tokens": {**GREEDY, "stop": "a", "extra_body": {"min_tokens": 20}},
    "stop_token_ids": {**GREEDY, "extra_body": {"stop_token_ids": [70, 71, 72, 73, 74, 75]}},
    "n": {**SEEDED, "n": 3},
    "logprobs": {**GREEDY, "logprobs": True, "top_logprobs": 3},
    "prediction": {**GREEDY, "prediction": {"type": "content", "content": TEXT}},
    "ignored": {**GREEDY, "user": "somebody", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
}
ALIKE = ("greedy", "seed", "logprobs", "prediction", "ignored", "n", "temperature")
"""Whose text is as without the parameter, or does not say that it was honoured."""
DRAFTERS = ("none", "suffix", "model")


@dataclass
class Got:
    """One choice."""

    text: str
    finish: str
    tokens: list[int]
    logprobs: list[Any]
    proposed: int


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def ask(client: openai.OpenAI, streaming: bool, drafter: str | None, **values: Any) -> list[Got]:
    """The choices of one chat completion."""
    extra = {**values.pop("extra_body", {}), "speculation": {"report": True, **({"drafter": drafter} if drafter else {})}}
    values = {"max_tokens": 32, "messages": [SYSTEM, {"role": "user", "content": PROMPT}], **values}
    got: Any = client.chat.completions.create(model=NAME, stream=streaming, extra_body=extra, **values)
    if not streaming:
        assert got.usage.completion_tokens == sum(len(each["tokens"]) for each in got.speculation)
        return [
            Got(c.message.content, c.finish_reason, r["tokens"], c.logprobs.content if c.logprobs else [], r["proposed"])
            for c, r in zip(got.choices, got.speculation, strict=True)
        ]
    made: dict[int, Got] = {}
    for chunk in got:
        (choice,) = chunk.choices
        one = made.setdefault(choice.index, Got("", "", [], [], 0))
        one.text += choice.delta.content or ""
        one.logprobs += choice.logprobs.content if choice.logprobs else []
        if choice.finish_reason:
            one.finish, one.tokens = choice.finish_reason, chunk.speculation["tokens"]
            one.proposed = chunk.speculation["proposed"]
    return [made[i] for i in sorted(made)]


def ledger_of(server: Running) -> Ledger:
    return Ledger(server.service.served.engine.target)


def params_of(values: dict[str, Any]) -> SamplingParams:
    """The parameters of a case that the next token's law depends on."""
    flat = {**values, **values.get("extra_body", {})}
    known = {name: flat[name] for name in SamplingParams.__dataclass_fields__ if name in flat and name != "logprobs"}
    known["logit_bias"] = {int(token): bias for token, bias in known.get("logit_bias", {}).items()}
    known.pop("prediction", None)
    known.pop("max_tokens", None)
    known["stop"] = (known["stop"],) if isinstance(known.get("stop"), str) else tuple(known.get("stop", ()))
    return SamplingParams.make(**known)


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_with_every_drafter_streamed_or_not(client: openai.OpenAI, server: Running, case: str) -> None:
    values = CASES[case]
    wanted = ask(client, False, None if case == "prediction" else "none", **values)
    plain = ask(client, False, "none", **(GREEDY if values["temperature"] == 0 else SEEDED))
    assert (wanted[0].tokens == plain[0].tokens) == (case in ALIKE and case != "temperature")
    if case == "n":
        assert len({tuple(one.tokens) for one in wanted}) == 3
    if case == "logprobs":
        assert [len(e.top_logprobs) for e in wanted[0].logprobs] == [3] * 32
    ledger = ledger_of(server)
    prompt = server.service.served.engine.encode([SYSTEM, {"role": "user", "content": PROMPT}])
    for streaming in (False, True):
        for drafter in (None, "suffix", "prediction") if case == "prediction" else DRAFTERS:
            got = ask(client, streaming, drafter, **values)
            assert len(got) == len(wanted)
            for choice, (mine, one) in enumerate(zip(got, wanted)):
                where = f"{case}, {drafter}, {'streamed' if streaming else 'whole'}, choice {choice}"
                ledger.compare(where, prompt, mine.tokens, one.tokens, params_of(values), choice)
                if mine.tokens == one.tokens:
                    assert (mine.text, mine.finish) == (one.text, one.finish), where
                if values.get("logprobs"):
                    assert len(mine.logprobs) == len(mine.tokens)
                    pairs = [(a.logprob, b.logprob) for a, b in zip(mine.logprobs, one.logprobs)]
                    assert max(abs(a - b) for a, b in pairs) < 1e-4
            assert drafter != "none" or not any(one.proposed for one in got)
    assert len(ledger.ties) <= 1, str(ledger)


def test_drafts_are_accepted_through_the_client(client: openai.OpenAI) -> None:
    (got,) = ask(client, True, "model", **{**GREEDY, "max_tokens": 100})
    assert got.proposed > 20


def test_completions_of_texts_ids_and_lists(client: openai.OpenAI, server: Running) -> None:
    ids = server.service.served.engine.target.tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    common: dict[str, Any] = {"model": NAME, "max_tokens": 20, "temperature": 0}
    (one,) = client.completions.create(prompt=PROMPT, **common).choices
    assert [c.text for c in client.completions.create(prompt=ids, **common).choices] == [one.text]
    many = client.completions.create(prompt=[PROMPT, TEXT, PROMPT], n=2, **common)
    assert [c.index for c in many.choices] == list(range(6)) and [many.choices[i].text for i in (0, 1, 4, 5)] == [one.text] * 4
    assert many.usage.prompt_tokens == 2 * len(ids) + len(server.service.served.engine.encode(TEXT))
    both = client.completions.create(prompt=[ids, ids], stream=True, stream_options={"include_usage": True}, **common)
    texts = {0: "", 1: ""}
    for chunk in both:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [one.text] * 2 and chunk.usage.completion_tokens == 40
    legacy = client.completions.create(prompt=PROMPT, logprobs=2, **common).choices[0].logprobs
    assert len(legacy.tokens) == 20 and len(legacy.top_logprobs[0]) == 2 and "".join(legacy.tokens) == one.text
    assert [one.text[at : at + len(t)] for at, t in zip(legacy.text_offset, legacy.tokens)] == legacy.tokens


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    hello: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError, match="unknown or unsupported field 'audio'"):
        client.chat.completions.create(model=NAME, messages=hello, extra_body={"audio": {}})
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        client.chat.completions.create(model="gpt-4o", messages=hello)
    assert [m.id for m in client.models.list()] == [NAME] and client.models.retrieve(NAME).owned_by == "outrider"


@pytest.mark.parametrize("drafter", ["suffix", "model"])
def test_sixteen_at_once_equal_each_alone(client: openai.OpenAI, server: Running, drafter: str) -> None:
    """Different prompts, parameters and seeds; the server's batch is full."""
    cases: list[dict[str, Any]] = []
    for i in range(16):
        values = dict(CASES[[*CASES][i % 11]])
        values["messages"] = [{"role": "user", "content": f"{i} {PROMPT[: 3 * i + 4]}"}]
        values["max_tokens"] = 20 + 3 * i
        if values["temperature"] > 0:
            values["seed"] = 100 + i
        cases.append(values)
    alone = [ask(client, False, "none", **values) for values in cases]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda each: ask(client, each[0] % 2 == 0, drafter, **each[1]), enumerate(cases)))
    ledger = ledger_of(server)
    for values, one, other in zip(cases, alone, together):
        prompt = server.service.served.engine.encode(values["messages"])
        ledger.compare(str(values), prompt, one[0].tokens, other[0].tokens, params_of(values))
    assert len(ledger.ties) <= 1, str(ledger)
    assert sum(got[0].proposed for got in together) > 0


def test_simonws_llm(server: Running, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed and not, a system prompt, a conversation, options."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    entry = {"model_id": "outrider", "model_name": NAME, "api_base": f"{server.url}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    import llm

    model: Any = llm.get_model("outrider")
    model.key = "any"
    values = {"temperature": 0, "max_tokens": 24, "seed": 3, "stop": "\u2620"}
    whole = model.prompt(PROMPT, system=SYSTEM["content"], stream=False, **values).text()
    pieces = list(model.prompt(PROMPT, system=SYSTEM["content"], stream=True, **values))
    assert len(pieces) > 3 and "".join(pieces) == whole and len(whole) >= 24
    talk = model.conversation()
    first = talk.prompt("hello", **values).text()
    assert talk.prompt("and now?", **values).text() and first
    messages = [{"role": "user", "content": "hello"}]
    assert first == server.chat(messages=messages, **{**values, "stop": ["\u2620"]})["choices"][0]["message"]["content"]
