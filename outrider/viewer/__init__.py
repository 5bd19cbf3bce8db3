"""The page that steps through traces: one HTML file with everything in it, which asks no network for anything.

`page` makes it from trace files; it works from a disk and from the server on this machine that `serve` starts.
"""

from __future__ import annotations

import html
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Sequence

from ..colours import COLOURS
from ..errors import LoadError, ParameterError

HERE = Path(__file__).parent
HOST = "127.0.0.1"


def page(traces: Sequence[str | Path]) -> str:
    """The page with these trace files in it. What is wrong within a file is told by the page; LoadError for one that cannot be read."""
    made = _part("index.html")
    made = re.sub(r'<link rel="stylesheet" href="(\S+)">', lambda m: f"<style>\n{_colours()}{_part(m[1])}</style>", made)
    made = re.sub(r'<script src="(\S+)"></script>', lambda m: f"<script>\n{_part(m[1])}</script>", made)
    return made.replace("<!-- traces -->", "\n".join(map(_trace, _names(traces), map(Path, traces))))


def _part(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _colours() -> str:
    roles = (f"--{role}: light-dark({colour.light}, {colour.dark});" for role, colour in COLOURS.items())
    return f":root {{ {' '.join(roles)} }}\n"


def _names(traces: Sequence[str | Path]) -> list[str]:
    """The files' names, with their folders where two are called the same."""
    short = [Path(trace).name for trace in traces]
    return [str(trace) if short.count(name) > 1 else name for trace, name in zip(traces, short)]


def _trace(name: str, path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise LoadError(f"cannot read the trace {path}: {error.strerror}") from error
    # In JSON "<" stands within strings only, where an escape says the same; so no text can end the script element.
    return (
        f'<script type="application/x-ndjson" data-name="{html.escape(name)}">{text.replace("<", chr(92) + "u003c")}</script>'
    )


def serve(content: str, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page on this machine only, not yet running; port 0 takes a free one. Raises ParameterError for a taken one."""
    body = content.encode("utf-8")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").split(":")[0] not in (HOST, "localhost"):  # a name that was made to point here
                self.send_error(403)
                return
            if self.path != "/":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise ParameterError(f"cannot serve on port {port}: {error}; take another --port") from error
