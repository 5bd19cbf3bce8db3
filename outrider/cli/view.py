"""`outrider view`: the page that steps through traces; and `--view`, which opens it after a command."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Callable, Sequence

import typer
from typer import Argument, Option

from ..errors import LoadError, ParameterError
from .session import check_writable, say


def view(
    traces: Annotated[list[str], Argument(metavar="TRACE", help="Trace files; several are compared.")],
    export: Annotated[str | None, Option(metavar="FILE", help="Write one HTML file, which needs no network, and end.")] = None,
    port: Annotated[int, Option(min=0, max=65535, help="Port on this machine. [default: a free one]", show_default=False)] = 0,
    no_browser: Annotated[bool, Option("--no-browser", help="Only say the page's address.")] = False,
) -> None:
    """Step through the rounds of traces on a local page: drafts, trees, why each token was kept or not, and how fast it went."""
    from .. import viewer
    from ..bench.report import refuse_overwriting

    if export is not None and (port or no_browser):
        raise ParameterError("--export writes a file and serves nothing: leave --port and --no-browser out")
    refuse_overwriting(export)
    check_writable(export)
    page = viewer.page(traces)
    warn_of_damage(traces)
    if export is None:
        serve(page, port, not no_browser)
        return
    try:
        Path(export).write_text(page, encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot write {export}: {error.strerror}") from error
    say(f"wrote {export}: it opens in any browser, with the network off")


def warn_of_damage(traces: Sequence[str]) -> None:
    """A line for each trace that cannot be read whole; the page shows what it can."""
    from ..trace import read_trace

    for trace in traces:
        try:
            if not read_trace(trace)[1]:
                say(f"warning: {trace} has no rounds")
        except LoadError as error:
            say(f"warning: {error}; what can be read is shown")


def serve(page: str, port: int = 0, browser: bool = True) -> None:
    """Serve the page on this machine until Ctrl-C; where there is a screen, a browser opens it."""
    from .. import viewer

    server = viewer.serve(page, port)
    address = f"http://{viewer.HOST}:{server.server_port}/"
    try:
        say(f"the rounds are at {address} (Ctrl-C ends)")
        if browser and has_screen():
            webbrowser.open(address)
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def has_screen() -> bool:
    """Whether a browser could open a window; one for the terminal would stand in the way."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def viewable(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an `output` whose `view` shows its trace when it has ended, also when Ctrl-C ended it."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        output = values["output"]
        if not output.view:
            command(**values)
            return
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            trace = output.trace or os.path.join(folder, "rounds.jsonl")
            code = 0
            try:
                command(**{**values, "output": replace(output, trace=trace)})
            except typer.Exit as ended:
                code = ended.exit_code
            from .. import viewer

            if os.path.exists(trace):
                serve(viewer.page([trace]))
        if code:
            raise typer.Exit(code)

    return run
