"""Ctrl-C while a library works that calls back into Python.

Python raises KeyboardInterrupt in whatever Python code runs next. In a callback that is lost: ctypes reports it as ignored, the library goes
on, and so does the program.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import Any, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred() -> Iterator[None]:
    """Hold back interruptions until the end of the block. In other threads than the first there are none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, Any]] = []
    held = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    for number in held:
        signal.signal(number, lambda *what: waiting.append(what))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for caught, frame in waiting[:1]:
            held[signal.Signals(caught)](caught, frame)
