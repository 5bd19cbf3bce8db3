"""A server that is treated badly: dropped connections, malformed, huge and odd bodies, whatever its OpenAPI document allows."""

from __future__ import annotations

import http.client
import json
import logging
import random
import re
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest
from serving import NAME, process, serving
from tiny import tiny_folder

WORDS = [
    "the",
    "bridge",
    "over",
    "river",
    "will",
    "be",
    "closed",
    "for",
    "cars",
    "until",
    "end",
    "of",
    "week",
    "please",
    "bring",
    "a",
    "notebook",
    "and",
    "pen",
]
DROPPED = "dropped"


def a_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """One that must be served."""
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))
    body: dict[str, Any] = {"model": NAME, "max_tokens": rng.randint(1, 60), "stream": rng.random() < 0.5}
    extras: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": rng.randint(0, 99), "top_p": 0.8},
        {"n": 2},
        {"stop": ["a", "q"]},
        {"presence_penalty": 1.0},
        {"speculation": {"drafter": rng.choice(["none", "suffix", "lookup"]), "draft": rng.randint(0, 6)}},
        {"prediction": {"content": prompt}},
    ]
    for extra in rng.sample(extras, 2):
        body |= extra
    if body.get("speculation", {}).get("drafter") in ("none", "lookup"):
        body.pop("prediction", None)
    if rng.random() < 0.5:
        return "/v1/completions", {**body, "prompt": prompt}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}


def a_bad_body(rng: random.Random) -> tuple[bytes, int]:
    """Bytes, and the status that must come."""
    _, body = a_request(rng)
    text = json.dumps(body).encode()
    return rng.choice(
        [
            (text[: rng.randint(0, len(text) - 1)], 400),
            (text.replace(b'"model"', b'"model\xff\xfe"'), 400),
            (json.dumps({**body, "unknown_field": 1}).encode(), 400),
            (json.dumps({**body, "temperature": "hot"}).encode(), 400),
            (b"[" * 5000, 400),
            (b'{"model": "' + b"x" * 300_000 + b'"}', 413),
            (text.replace(b"{", b'{"min_p": 1e999, ', 1), 400),
            (json.dumps({**body, "user": "\ud800"}).encode(), 400),
        ]
    )


def post(url: str, rng: random.Random) -> str:
    """Send one request of some kind, and say what came of it. Raises AssertionError where that is wrong."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    headers = {"content-type": "application/json"}
    try:
        if rng.random() < 0.3:
            return drop(connection, rng)
        if rng.random() < 0.3:
            content, wanted = a_bad_body(rng)
            connection.request("POST", rng.choice(["/v1/chat/completions", "/v1/completions"]), content, headers)
            got = connection.getresponse()
            text = got.read()
            assert got.status == wanted and b'"error"' in text, (got.status, wanted, content[:200], text[:300])
            return str(wanted)
        path, body = a_request(rng)
        connection.request("POST", path, json.dumps(body), headers)
        got = connection.getresponse()
        text = got.read()
        assert got.status in (200, 429), (got.status, text, body)
        if got.status == 200 and body["stream"]:
            assert text.rstrip().endswith(b"data: [DONE]"), text[-200:]
        return str(got.status)
    finally:
        connection.close()


def drop(connection: http.client.HTTPConnection, rng: random.Random) -> str:
    """Close the connection at a random moment: in the middle of the request, while it is answered, between two chunks."""
    path, body = a_request(rng)
    body["max_tokens"] = 200
    text = json.dumps(body).encode()
    connection.putrequest("POST", path)
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(text)))
    connection.endheaders(text[: rng.randint(0, len(text))] if rng.random() < 0.3 else text)
    assert connection.sock is not None
    connection.sock.settimeout(rng.random() * 0.3 + 0.001)
    try:
        for _ in range(rng.randint(0, 5)):
            connection.sock.recv(200)
    except (TimeoutError, OSError):
        pass
    if rng.random() < 0.5:  # a reset instead of an orderly end
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    return DROPPED


def abuse(url: str, count: int, seed: int, after_each: Callable[[int], None] = lambda done: None) -> Counter[str]:
    """`count` requests from 16 threads."""
    done = iter(range(1, count + 1))
    lock = threading.Lock()

    def one(i: int) -> str:
        outcome = post(url, random.Random(seed * 1_000_003 + i))
        with lock:
            after_each(next(done))
        return outcome

    with ThreadPoolExecutor(16) as pool:
        return Counter(pool.map(one, range(count)))


def probe(url: str) -> list[Any]:
    """What 16 requests, one after another, are answered."""
    answers = []
    with httpx2.Client(base_url=url, timeout=60) as client:
        for i in range(16):
            messages = [{"role": "user", "content": f"{i} {' '.join(WORDS[i:])}"}]
            body = {"model": NAME, "messages": messages, "max_tokens": 20, "temperature": i % 2, "seed": i}
            got = client.post("/v1/chat/completions", json=body)
            assert got.status_code == 200
            answers.append(got.json()["choices"])
    return answers


def gauge(url: str, name: str) -> float:
    text = httpx2.get(f"{url}/metrics").text
    return float(re.findall(rf"^outrider:{name}\{{.*\}} (.*)$", text, re.M)[0])


def test_two_hundred_bad_requests(caplog: pytest.LogCaptureFixture) -> None:
    names = ("outrider.server", "uvicorn.error", "asyncio")
    for name in names:
        logging.getLogger(name).addHandler(caplog.handler)
    try:
        with serving(max_body=200_000, batch=8, prefixes=4) as server:
            fresh = probe(server.url)
            outcomes = abuse(server.url, 200, seed=1)
            server.until_idle()
            assert server.slots() == 0, "a slot was lost"
            assert probe(server.url) == fresh
        assert server.service.served.engine.target.opened == 0  # type: ignore[attr-defined]
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(caplog.handler)
    assert {DROPPED, "200", "400", "413"} <= outcomes.keys(), outcomes
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR], caplog.text


@pytest.mark.slow
def test_two_thousand_bad_requests(tmp_path: Path) -> None:
    """In a process of its own, whose memory is watched."""
    log, folder = tmp_path / "log", tiny_folder(context=512, eos=None)
    with process(log, "-t", str(folder), "--max-body", "200000", "--batch", "8", "--prefixes", "4") as (url, running):
        memory = psutil.Process(running.pid)
        fresh = probe(url)
        abuse(url, 300, seed=2)
        samples: list[int] = [memory.memory_info().rss]
        outcomes = abuse(url, 2000, 3, lambda done: samples.append(memory.memory_info().rss) if done % 100 == 0 else None)
        end = time.monotonic() + 20
        while gauge(url, "num_requests_running") + gauge(url, "num_requests_waiting") and time.monotonic() < end:
            time.sleep(0.05)
        assert gauge(url, "num_requests_running") == gauge(url, "num_requests_waiting") == 0
        assert probe(url) == fresh
        samples.append(memory.memory_info().rss)
    print(outcomes, f"memory after 300, during and after 2000 requests, MiB: {[round(s / 2**20) for s in samples]}")
    assert running.returncode == 0
    assert max(samples[-3:]) <= 1.05 * samples[0]
    assert 500 < outcomes[DROPPED] < 700
    assert "Traceback" not in log.read_text() and '"error"' not in log.read_text()


@pytest.mark.parametrize("examples", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_what_its_openapi_document_allows_never_makes_it_fail(examples: int) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import not_a_server_error

    with serving(batch=4, prefixes=2) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        asked: Counter[int] = Counter()
        for operation in (result.ok() for result in schema.get_all_operations()):

            @given(case=operation.as_strategy())
            @settings(
                max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
            )
            def check(case: Any) -> None:
                if isinstance(case.body, dict):  # so that some get beyond the name, and none takes long
                    case.body |= {"model": NAME} if len(str(case.body)) % 2 else {}
                    case.body.setdefault("max_tokens", 3)
                got = case.call(timeout=60)
                asked[got.status_code] += 1
                case.validate_response(got, checks=[not_a_server_error])

            check()
        server.until_idle()
        assert server.slots() == 0
    print(f"statuses: {dict(asked)}")
    assert asked[200] and asked[400]
