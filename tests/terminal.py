"""`outrider` on a real pseudo-terminal: what a person would see, and type."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """A running command. `seen`: everything that it wrote; `plain`: without colours and other marks;
    `at`: how far of that was expected."""

    def __init__(self, *arguments: object, columns: int = 160, **environment: str):
        self.seen = ""
        self.at = 0
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
        own = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES")}
        own |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from outrider.cli import main; main()", *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=own,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    @property
    def plain(self) -> str:
        return MARKS.sub("", self.seen)

    def expect(self, text: str, seconds: float = 120) -> str:
        """Wait until `text` appears after what was expected before; returns what came in between."""
        end = time.monotonic() + seconds
        while (found := self.plain.find(text, self.at)) < 0:
            if not self.read(end - time.monotonic()):
                raise AssertionError(f"{text!r} did not come; the last lines were:\n{self.plain[self.at :][-3000:]}")
        between = self.plain[self.at : found]
        self.at = found + len(text)
        return between

    def send(self, line: str) -> None:
        os.write(self._master, (line + "\n").encode())

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.write(self._master, b"\x03")

    def end(self, seconds: float = 120) -> int:
        """Read to the end; the exit code."""
        end = time.monotonic() + seconds
        while self.read(end - time.monotonic()):
            pass
        code = self._process.wait(max(end - time.monotonic(), 1))
        os.close(self._master)
        return code

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self.end()

    def read(self, seconds: float) -> bool:
        """More of what it writes; False at the end, or after so many seconds."""
        if seconds <= 0 or not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            new = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.seen += new.decode("utf-8", "replace")
        return bool(new)
