"""`outrider view`: served on this machine only, exported whole, damage told in a line; `--view` after other commands."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from traces import PROMPT, target, trace
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import ParameterError
from outrider.viewer import page, serve


def call(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args])


def asked(port: int, path: str = "/", host: str | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    return connection.getresponse()


def test_it_is_one_file_that_refers_to_no_other(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = call("view", trace("block"), trace("plain"), "--export", out)
    assert result.exit_code == 0 and str(out) in result.stderr
    text = out.read_text(encoding="utf-8")
    assert text == page([trace("block"), trace("plain")])
    assert not re.search(r'(src|href)="(?!data:|#)', text) and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in text


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    before = trace("block").read_bytes()
    result = call("view", trace("block"), "--export", trace("block"))
    assert result.exit_code == 2 and "exists already" in result.stderr
    assert trace("block").read_bytes() == before


@pytest.mark.parametrize(
    "args, message",
    [
        (["/no/such/trace.jsonl"], "cannot read the trace /no/such/trace.jsonl"),
        ([str(Path("/tmp"))], "cannot read the trace"),
        (["TRACE", "--export", "/no/such/folder/page.html"], "there is no folder"),
        (["TRACE", "--export", "x.html", "--port", "80"], "leave --port"),
        (["TRACE", "--port", "99999"], "--port"),
        ([], "TRACE"),
    ],
)
def test_mistakes_are_told_in_a_line(args: list[str], message: str) -> None:
    result = call("view", *(trace("block") if word == "TRACE" else word for word in args))
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda whole: b"", "is not an Outrider trace"),
        (lambda whole: whole.replace(b'"outrider_trace": 2', b'"outrider_trace": 9', 1), "version 9"),
        (lambda whole: whole.replace(b'"number": 2,', b'"number": {,', 1), "line 4: not a Round"),
        (lambda whole: whole.split(b"\n")[0], "has no rounds"),
    ],
)
def test_damage_is_told_and_the_page_made_all_the_same(spoil: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(spoil(trace("block").read_bytes()))
    result = call("view", tmp_path / "t", "--export", tmp_path / "page.html")
    assert result.exit_code == 0 and message in result.stderr
    assert "<script" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.jsonl").write_bytes(trace("plain").read_bytes())
    made = page([tmp_path / "a" / "t.jsonl", tmp_path / "b" / "t.jsonl"])
    assert re.findall(r'data-name="([^"]+)"', made) == [str(tmp_path / name / "t.jsonl") for name in ("a", "b")]


def test_it_is_served_to_this_machine_only() -> None:
    server = serve("<p>h\u00e9</p>")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        good = asked(port)
        assert good.status == 200 and good.read().decode() == "<p>h\u00e9</p>" and "utf-8" in good.headers["Content-Type"]
        assert asked(port, host=f"localhost:{port}").status == 200
        assert asked(port, host="evil.example").status == asked(port, host=f"evil.example:{port}").status == 403
        assert asked(port, "/../trace.py").status == asked(port, "/etc/passwd").status == 404
        with pytest.raises(ParameterError, match="another --port"):
            serve("", port)
    finally:
        server.shutdown()
        server.server_close()


def test_view_serves_until_it_is_stopped() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    command = [sys.executable, "-c", "from outrider.cli import main; main()", "view", str(trace("block"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends\)", line)
        assert found, line
        content = asked(int(found[1])).read().decode()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert content == page([trace("block")]) and (process.returncode, out, err) == (0, "", "")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pages that commands would serve."""
    pages: list[str] = []
    monkeypatch.setattr("outrider.cli.view.serve", lambda page, *_: pages.append(page))
    return pages


def test_view_after_a_run_shows_its_rounds(shown: list[str], tmp_path: Path) -> None:
    words = ("run", "-t", target(), "--max-tokens", "8", PROMPT)
    assert call(*words).exit_code == 0 and shown == []
    assert call(*words, "--view", "--logprobs", "2").exit_code == 0
    assert len(re.findall(r'^\{"sequence": 0', shown[0], re.MULTILINE)) >= 1 and '"top": [[' in shown[0]
    assert call(*words, "--view", "--trace", tmp_path / "kept.jsonl").exit_code == 0
    assert shown[1] == page([tmp_path / "kept.jsonl"])


def test_view_after_a_command_that_fails(shown: list[str], tmp_path: Path) -> None:
    """Rounds that were made are shown, and the exit code is the command's; without rounds there is nothing to show."""
    (tmp_path / "prompts.txt").write_text(PROMPT)
    words = ("-t", target(), "-d", "replay", "--draft", "4", "--max-tokens", "4", "--prompts", tmp_path / "prompts.txt")
    result = call("bench", *words, "--view")
    assert result.exit_code == 1 and "DRAFTED NOTHING" in result.stderr and '"sequence": 1' in shown[0]
    result = call("run", "-t", "/no/such/model", "--view", PROMPT)
    assert result.exit_code == 2 and len(shown) == 1


def test_view_after_the_demo(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("demo", "-t", target(), "--only", "4", "--max-tokens", "6", "--view").exit_code == 0
    assert '"prompts": {"chat": "What is the difference' in shown[0] and '{"sequence": 1' in shown[0]


def test_view_does_not_go_with_a_roofline_or_a_report(shown: list[str], tmp_path: Path) -> None:
    result = call("bench", "--report", tmp_path / "report", "--view")
    assert result.exit_code == 2 and "--report and --view" in result.stderr
    result = call("bench", "--roofline", "--view")
    assert result.exit_code == 2 and "--view does not go with --roofline" in result.stderr and shown == []
