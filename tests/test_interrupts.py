"""Ctrl-C during a C library's work is not lost in its callbacks."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

import pytest

from outrider.targets.llama.interrupts import deferred

COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def sort_with(callback):
    """Let the C library sort, calling back into Python."""
    libc = ctypes.CDLL(None)
    numbers = (ctypes.c_int * 50)(*range(50, 0, -1))
    libc.qsort(numbers, ctypes.c_size_t(50), ctypes.c_size_t(4), COMPARE(callback))


@pytest.fixture
def interrupting():
    """A comparison that is interrupted once, and how often it was called."""
    calls = []

    def compare(a, b):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return 0

    return compare, calls


def test_without_it_an_interruption_in_a_callback_is_lost(interrupting, monkeypatch):
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: lost.append(what.exc_type))
    sort_with(interrupting[0])
    assert lost == [KeyboardInterrupt]


def test_it_comes_after_the_work(interrupting):
    compare, calls = interrupting
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), deferred():
        sort_with(compare)
        done = len(calls)
    assert done > 5 and signal.getsignal(signal.SIGINT) is before
    with deferred():
        pass  # nothing is left waiting


def test_errors_pass_through_and_other_threads_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError), deferred():
        raise ValueError
    assert signal.getsignal(signal.SIGINT) is before
    ran = []

    def work():
        with deferred():
            ran.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]
