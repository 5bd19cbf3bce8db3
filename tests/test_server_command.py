"""`outrider serve` as a process: it says where it listens, answers, and ends in order; mistakes are one line."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import types
from pathlib import Path

import httpx2
import pytest
from serving import NAME, process
from tiny import tiny_folder
from typer.testing import CliRunner

from outrider import server
from outrider.cli import app
from outrider.server import serve


def test_it_serves_and_ends_in_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    model = ("-t", str(tiny_folder(context=512, eos=None)), "--also", "lookup", "--draft", "3", "--allow-host", "chat.lan")
    with process(log, *model, "--batch", "2", "--log-prompts", "--traces", str(tmp_path / "traces")) as (url, running):
        body = {"model": NAME, "prompt": "The bridge", "max_tokens": 12, "speculation": {"report": True}}
        got = httpx2.post(f"{url}/v1/completions", json=body, headers={"X-Outrider-Trace": "1"}, timeout=60)
        assert got.status_code == 200 and got.json()["usage"]["completion_tokens"] == 12
        assert httpx2.get(f"{url}/v1/models").json()["data"][0]["context_length"] == 512
        for host, status in (("chat.lan", 200), ("evil.example", 403)):
            assert httpx2.get(f"{url}/v1/models", headers={"host": host}).status_code == status
    assert running.returncode == 0, log.read_text()
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (request,) = [line for line in lines if line.get("path") == "/v1/completions"]
    assert request["body"]["prompt"] == "The bridge" and request["texts"] == [got.json()["choices"][0]["text"]]
    assert len(list((tmp_path / "traces").iterdir())) == 1 and "Traceback" not in log.read_text()


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-c", "from outrider.cli import main; main()", "serve", "-t", "/no/such/model"]
        port = str(taken.getsockname()[1])
        done = subprocess.run([*command, "--port", port], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "choose another --host or --port" in done.stderr and len(done.stderr.splitlines()) == 1


def test_which_names_it_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound to a loopback address only its own names; bound elsewhere any, unless some are given."""
    folder, asked = str(tiny_folder(context=512, eos=None)), []
    monkeypatch.setattr(server, "make_app", lambda served, options: asked.append(options.hosts))
    monkeypatch.setattr(serve, "Server", lambda *_: types.SimpleNamespace(run=lambda sockets: None))
    for arguments in ([], ["--host", "0.0.0.0"], ["--host", "0.0.0.0", "--allow-host", "a"], ["--host", "localhost"]):
        result = CliRunner().invoke(app, ["serve", "-t", folder, "-d", "none", "--port", "0", *arguments])
        assert result.exit_code == 0, result.output
    assert asked == [(), None, ("a",), ()]
    wrong = CliRunner().invoke(app, ["serve", "-t", folder, "--allow-host", "http://a:80"])
    assert wrong.exit_code != 0 and asked[4:] == []
