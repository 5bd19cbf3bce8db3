"""The server over HTTP: answers, streams, cancelling, limits, keys, the end."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Iterator

import httpx2
import pytest
from serving import NAME, Running, served, serving

MESSAGES = [{"role": "user", "content": "Please bring a notebook"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running
        running.until_idle()
        assert running.slots() == 0


def events(lines: Iterator[str]) -> list[Any]:
    """The events of a stream, the last of which must be [DONE]."""
    datas = [line.removeprefix("data: ") for line in lines if line and not line.startswith(":")]
    assert datas[-1] == "[DONE]"
    return [json.loads(data) for data in datas[:-1]]


def stream(server: Running, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
    body = {"model": NAME, "max_tokens": 24, "stream": True, **body}
    if "prompt" not in body:
        body.setdefault("messages", MESSAGES)
    with server.client() as client, client.stream("POST", path, json=body) as got:
        assert got.status_code == 200 and got.headers["content-type"].startswith("text/event-stream")
        return events(got.iter_lines())


def refused(server: Running, status: int = 400, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    body = {"model": NAME, "messages": MESSAGES, **body}
    with server.client() as client:
        content = json.dumps({name: value for name, value in body.items() if value is not ...})
        got = client.post(path, content=content, headers={"content-type": "application/json"})
    assert got.status_code == status, got.text
    return got.json()["error"]


def test_a_stream_is_the_answer_in_pieces(server: Running) -> None:
    whole = server.chat(prompt="Please bring a notebook", temperature=0)
    chunks = stream(server, temperature=0)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and len({c["id"] for c in chunks}) == 1
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert whole["usage"]["completion_tokens"] == 24 and "usage" not in chunks[-1]


def test_usage_at_the_end_of_a_stream(server: Running) -> None:
    chunks = stream(server, stream_options={"include_usage": True}, n=2)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 48
    assert refused(server, stream_options={"include_usage": True})["param"] == "stream_options"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("blah", 1),
        ("audio", {}),
        ("echo", True),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("n", 0),
        ("n", 1000),
        ("max_tokens", 0),
        ("max_completion_tokens", -3),
        ("stop", [""]),
        ("stop", [1]),
        ("seed", -1),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", {"1": 500}),
        ("logit_bias", {"x": 5}),
        ("top_logprobs", 3),
        ("presence_penalty", 3),
        ("messages", []),
        ("messages", [{"role": "nobody", "content": "?"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", ...),
        ("model", ...),
        ("stop_token_ids", [-1]),
        ("prompt", "x"),
        ("stream_options", {"blah": 1}),
        ("store", True),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(server: Running, field: str, value: Any) -> None:
    error = refused(server, **{field: value})
    assert (error["param"] or "").split(".")[0] == field and field in error["message"]
    assert error["type"] == "invalid_request_error"


def test_more_refusals(server: Running) -> None:
    assert "another" in refused(server, 404, model="another")["message"]
    assert refused(server, speculation={"drafter": "nobody"})["param"] == "speculation.drafter"
    assert refused(server, speculation={"drafter": "prediction"})["param"] == "prediction"
    assert "differ" in refused(server, max_tokens=3, max_completion_tokens=4)["message"]
    assert refused(server, messages=[{"role": "user", "content": "x" * 4000}])["code"] == "context_length_exceeded"
    assert refused(server, path="/v1/completions", prompt=["a"] * 200, n=2, messages=...)["param"] == "prompt"
    with server.client() as client:
        for content in (b"", b"{", b"[1]", b'"\xff"', b"\xff\xfe{}", b"[" * 100_000, b"null", b'{"model": "\\ud800"}', b"NaN"):
            got = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
            assert got.status_code == 400 and got.json()["error"]["message"], content[:20]
        for text in ("\ud800", [{"type": "text", "text": "\udc00"}]):
            message = {"role": "user", "content": text}
            assert "surrogate" in refused(server, messages=[message])["message"]
        assert server.chat(prompt="\U0001f600", max_tokens=2), "a whole pair is a character"
        got = client.post("/v1/chat/completions", content=json.dumps({"model": NAME, "messages": MESSAGES}))
        assert got.status_code == 400, "a page of another origin could send this without asking"
        assert client.get("/v1/nothing").status_code == 404 and client.put("/v1/models").status_code == 405


def test_null_is_absent(server: Running) -> None:
    plain = server.chat(temperature=0)
    spelled = server.chat(temperature=0, **dict.fromkeys(["stop", "seed", "top_p", "n", "stream", "logprobs", "prediction"]))
    assert spelled["choices"] == plain["choices"]


def test_bodies_that_are_too_large_are_not_read() -> None:
    with serving(max_body=20_000) as server, server.client() as client:
        got = client.post("/v1/chat/completions", json={"model": NAME, "user": "x" * 30_000})
        assert got.status_code == 413 and "error" in got.json()

        def endless() -> Iterator[bytes]:
            for _ in range(100):
                yield b"x" * 1000

        got = client.post("/v1/chat/completions", content=endless(), headers={"content-type": "application/json"})
        assert got.status_code == 413 and "error" in got.json()


# ---- leaving early ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_dropped_connection_frees_its_slots(streaming: bool, n: int) -> None:
    with serving(prefixes=0) as server:
        body = {"model": NAME, "messages": MESSAGES, "max_tokens": 400, "stream": streaming, "n": n}
        with server.client(timeout=0.2 if not streaming else 60) as client:
            if streaming:
                with client.stream("POST", "/v1/chat/completions", json=body) as got:
                    next(got.iter_lines())
            else:
                with pytest.raises(httpx2.TimeoutException):
                    client.post("/v1/chat/completions", json={**body, "max_tokens": None, "min_tokens": 400})
        server.until_idle(5)
        assert server.slots() == 0
        ended = server.service.metrics.exposition().decode()
        assert 'finished_reason="cancelled"' in ended
        assert server.chat(temperature=0)["usage"]["completion_tokens"] == 24


def test_who_waits_can_leave(server: Running) -> None:
    with serving(batch=1, prefixes=0) as server:
        first = threading.Thread(target=server.chat, kwargs={"max_tokens": 300})
        first.start()
        body = {"model": NAME, "messages": MESSAGES}
        with server.client(timeout=0.15) as client, pytest.raises(httpx2.TimeoutException):
            client.post("/v1/chat/completions", json=body)
        time.sleep(0.1)
        assert server.scheduler.waiting == 0
        first.join()
        server.until_idle()
        assert server.slots() == 0


# ---- limits ----------------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    with serving(batch=1, queue=1) as server:
        threads = [threading.Thread(target=server.chat, kwargs={"max_tokens": 300}) for _ in range(2)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 10
        while server.scheduler.running + server.scheduler.waiting < 2 and time.monotonic() < end:
            time.sleep(0.005)
        with server.client() as client:
            got = client.post("/v1/chat/completions", json={"model": NAME, "messages": MESSAGES})
            assert got.status_code == 429 and int(got.headers["retry-after"]) > 0
            assert client.get("/health").json()["running"] == 1
        for thread in threads:
            thread.join()
        server.chat()


def test_the_end_lets_requests_finish_and_takes_no_more() -> None:
    with serving() as server:
        answers: list[Any] = []
        body = {"model": NAME, "messages": MESSAGES, "max_tokens": 200}
        with server.client() as client:
            client.get("/health")  # a connection that is kept open
            thread = threading.Thread(target=lambda: answers.append(server.chat(max_tokens=200)))
            thread.start()
            while not server.scheduler.running:
                time.sleep(0.002)
            server.scheduler.drain(30)
            got = client.post("/v1/chat/completions", json=body)
            assert got.status_code == 503 and int(got.headers["retry-after"]) > 0
            assert client.get("/health").status_code == 503
        thread.join()
        assert answers[0]["usage"]["completion_tokens"] == 200


@pytest.mark.parametrize("streaming", [True, False])
def test_what_does_not_finish_in_time_is_told_so(streaming: bool) -> None:
    with serving() as server, server.client() as client:

        def end_soon() -> None:
            while not server.scheduler.running:
                time.sleep(0.002)
            server.scheduler.drain(0.1)

        thread = threading.Thread(target=end_soon)
        thread.start()
        body = {"model": NAME, "messages": MESSAGES, "max_tokens": 450, "n": 8, "stream": streaming, "speculation": False}
        if streaming:
            with client.stream("POST", "/v1/chat/completions", json=body) as got:
                last = [line for line in got.iter_lines() if line][-1]
            assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        else:
            got = client.post("/v1/chat/completions", json=body)
            assert got.status_code == 503 and "shutting down" in got.json()["error"]["message"]
        thread.join()


# ---- who may come in -------------------------------------------------------------------------------------------------------


def test_the_key() -> None:
    with serving(api_key="secret") as server, server.client() as client:
        for headers, status in (({}, 401), ({"authorization": "Bearer no"}, 401), ({"authorization": "Bearer secret"}, 200)):
            for path in ("/v1/models", "/metrics"):
                assert client.get(path, headers=headers).status_code == status
        assert client.get("/health").status_code == client.get("/").status_code == 200
        assert client.get("/v1/models", headers={"authorization": "Basic secret"}).status_code == 401


def test_other_origins_only_when_they_are_named(server: Running) -> None:
    asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with server.client() as client:
        assert "access-control-allow-origin" not in client.get("/v1/models", headers=asks).headers
    with serving(cors=("https://a.example",), api_key="secret") as named, named.client() as client:
        allowed = client.options("/v1/chat/completions", headers=asks)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = client.options("/v1/chat/completions", headers={**asks, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


# ---- what it tells ---------------------------------------------------------------------------------------------------------


def test_metrics_have_vllms_names(server: Running) -> None:
    server.chat(prompt="abcabcabcabcabcabc", temperature=0, max_tokens=100)
    with server.client() as client:
        text = client.get("/metrics").text
    values = {line.split(" ")[0]: float(line.split(" ")[-1]) for line in text.splitlines() if not line.startswith("#")}

    def total(name: str) -> float:
        return sum(value for key, value in values.items() if key.startswith(f"outrider:{name}{{"))

    drafts, proposed = total("spec_decode_num_drafts_total"), total("spec_decode_num_draft_tokens_total")
    accepted = total("spec_decode_num_accepted_tokens_total")
    assert 0 < drafts <= proposed and 0 < accepted <= proposed
    assert accepted == total("spec_decode_num_accepted_tokens_per_pos_total")
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert total(f"{name}_count") > 0
    assert total("generation_tokens_total") > 100 and total("num_requests_running") == 0


def test_a_trace_of_a_chosen_request(server: Running, tmp_path: Any) -> None:
    from outrider.trace import read_trace, statistics

    with server.client() as client:
        body = {"model": NAME, "messages": MESSAGES, "max_tokens": 20, "n": 2}
        got = client.post("/v1/chat/completions", json=body, headers={"X-Outrider-Trace": "1"})
        kept = client.get(got.headers["x-outrider-trace"])
        assert "x-outrider-trace" not in client.post("/v1/chat/completions", json=body).headers
        assert client.post("/v1/chat/completions", json=body, headers={"X-Outrider-Trace": "yes"}).status_code == 400
        assert client.get("/v1/traces/chatcmpl-0").status_code == client.get("/v1/traces/..%2Fx").status_code == 404
    (tmp_path / "trace.jsonl").write_bytes(kept.content)
    header, rounds = read_trace(tmp_path / "trace.jsonl")
    assert {r.sequence for r in rounds} == {0, 1} and statistics(rounds).emitted == 40
    assert header["target"]["vocabulary"] and len(header["sequences"]) == 2
    assert [each["prompt"] for each in header["sequences"]] == [0, 0] and "notebook" in header["prompts"]["0"]


def test_the_log_has_figures_and_no_text(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    logger = logging.getLogger("outrider.server")
    logger.addHandler(caplog.handler)
    try:
        answer = server.chat(prompt="A secret of mine", temperature=0)
        time.sleep(0.2)
    finally:
        logger.removeHandler(caplog.handler)
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")][-1]  # type: ignore[attr-defined]
    assert fields["id"] == answer["id"] and fields["completion_tokens"] == 24 and fields["status"] == 200
    assert "secret" not in str(fields) and answer["choices"][0]["message"]["content"] not in str(fields)


def test_a_drafter_and_a_length_for_one_request(server: Running) -> None:
    wanted = server.chat(temperature=0, max_tokens=60, speculation=False)["choices"][0]["message"]
    for drafter, draft in (("none", None), ("suffix", 2), ("model", 3), ("lookup", 1), ("suffix", 0)):
        asked = {"drafter": drafter, "draft": draft, "report": True}
        answer = server.chat(temperature=0, max_tokens=60, speculation=asked)
        (report,) = answer["speculation"]
        assert answer["choices"][0]["message"] == wanted and report["drafter"] == drafter
        assert (report["proposed"] > 0) == (drafter != "none" and draft != 0), drafter
        assert "".join(text for text, _ in report["pieces"]) == wanted["content"]
        assert draft is None or report["proposed"] <= draft * report["passes"]


def test_a_prediction_is_used_and_accounted_for() -> None:
    with serving(served("none")) as server:
        plain = server.chat(temperature=0, max_tokens=80)["choices"][0]["message"]["content"]
        answer = server.chat(temperature=0, max_tokens=80, prediction={"type": "content", "content": plain})
        assert answer["choices"][0]["message"]["content"] == plain
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 30 > details["rejected_prediction_tokens"] >= 0
        wrong = server.chat(temperature=0, max_tokens=80, prediction={"type": "content", "content": "nothing like it " * 9})
        assert wrong["choices"][0]["message"]["content"] == plain
        refusal = refused(server, prediction={"content": "x"}, speculation=False)
        assert refusal["param"] == "prediction"


def test_the_dashboard_asks_for_metrics_that_there_are(server: Running) -> None:
    import re
    from pathlib import Path

    server.chat(prompt="abcabcabcabcabcabc", temperature=0, max_tokens=100)
    with server.client() as client:
        there = client.get("/metrics").text
    dashboard = (Path(__file__).parents[1] / "deploy/grafana.json").read_text()
    asked = set(re.findall(r"outrider:\w+", dashboard))
    assert len(asked) > 12 and not [name for name in asked if f"\n{name}{{" not in there]
