"""The engine's thread: jobs wait, join the running batch between rounds, and leave it; asyncio sees their Rounds.

Everything that touches the target, the drafters or the prefix cache happens in this thread. Other threads put jobs into the
queue, mark them cancelled, and get Rounds through their event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Callable, Iterable

from ..decode import Batch, close_sequence
from ..decode import Sequence as Decoding
from ..drafters.base import Drafter
from ..engine import Engine
from ..errors import CacheError, OutriderError
from ..trace import Round
from .errors import busy, closing
from .prefixes import Prefixes

log = logging.getLogger("outrider.server")
CLOSING = "the server is shutting down"


@dataclass(frozen=True)
class Limits:
    """batch: most sequences that decode together. queue: most that wait beyond these. chunk: prompt tokens that are computed
    between two rounds. prefixes: ended sequences that are kept for those that begin alike. tokens: most that the target's cache
    holds, all sequences together; None for no limit.
    """

    batch: int = 16
    queue: int = 64
    chunk: int = 128
    prefixes: int = 16
    tokens: int | None = None


@dataclass(eq=False)
class Job:
    """One choice of a request. loop and events: where its Rounds go, and None when it has ended.

    choice: its number among all of the request; is_first: whether it is the first of its prompt. cached: prompt tokens that were
    not computed again. started: when its prompt's turn came, on the clock of `time.monotonic`.
    """

    sequence: Decoding
    choice: int
    is_first: bool
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[tuple[Job, Round | None]]
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    cached: int = 0

    @property
    def refused(self) -> bool:
        """Whether it was ended because the server shuts down."""
        return self.sequence.error == CLOSING


class Scheduler:
    """Continuous batching over one target.

    observe: called after every pass, in the engine's thread, with its Rounds and the jobs that have ended.
    """

    def __init__(self, engine: Engine, limits: Limits, observe: Callable[[list[Round], list[Job]], None]):
        self.engine = engine
        self.limits = limits
        self.prefixes = Prefixes(engine.target, limits.prefixes)
        self.preempted = 0
        self.held_tokens = 0
        """Tokens that the target's cache held after the last round."""
        self._batch = Batch(engine.target, engine.drafter, engine.pace, limits.chunk, self._prepare)
        self._observe = observe
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._jobs: dict[int, Job] = {}  # in the batch, by the sequence's number
        self._numbers = 0
        self._is_full = False  # a sequence had to wait again, and none has ended since
        self._deadline: float | None = None  # of those that still run when the server shuts down
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    # ---- from any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: list[Job]) -> None:
        """Queue the jobs of one request, all or none. Raises Refusal where there is no room, or no time left."""
        with self._changed:
            if self.is_closing:
                raise closing()
            held = len(self._jobs) + len(self._waiting)
            if held and held + len(jobs) > self.limits.batch + self.limits.queue:
                raise busy(f"{len(self._jobs)} sequences run and {len(self._waiting)} wait; try again later")
            for job in jobs:
                job.sequence.number = self._numbers
                job.sequence.keep_open = True
                self._numbers += 1
            self._waiting += jobs
            self._changed.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Let these leave before the next round. Whatever has ended stays as it is."""
        with self._changed:
            for job in jobs:
                job.sequence.cancelled = True
            self._changed.notify()

    def drain(self, seconds: float) -> None:
        """Take no more jobs; what has not ended after so many seconds is ended."""
        with self._changed:
            self._deadline = time.monotonic() + seconds
            self._changed.notify()

    def stop(self) -> None:
        """End everything and free what it held."""
        self.drain(0)
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_closing(self) -> bool:
        return self._deadline is not None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._batch.is_busy or self._stopped):
                    self._changed.wait()
                if self._stopped and not (self._waiting or self._batch.is_busy):
                    break
                self._admit()
            try:
                rounds = self._round()
            except Exception:
                log.exception("the engine failed; what was running is ended")
                rounds = []
                self._end_all("the engine failed")
            ended = [job for job in self._jobs.values() if job.sequence.finish]
            self._observe(rounds, ended)
            self._deliver(rounds, ended)
            self.held_tokens = self._tokens()
        self.prefixes.clear()

    def _admit(self) -> None:
        """Move jobs from the queue into the batch, as far as there is room; let go of those that were cancelled."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            for job in (*self._waiting, *self._jobs.values()):
                if not job.sequence.finish:
                    job.sequence.cancelled, job.sequence.error = True, CLOSING
        room = max(self.limits.batch - len(self._jobs), 0) if not (self._is_full and self._jobs) else 0
        gone = [job for job in self._waiting if job.sequence.cancelled]  # the batch sees to their end
        for job in [*[job for job in self._waiting if job not in gone][:room], *gone]:
            self._waiting.remove(job)
            self._jobs[job.sequence.number] = job
            self._batch.add(job.sequence)

    def _prepare(self, sequence: Decoding) -> None:
        """Called by the batch right before a prompt is computed."""
        job = self._jobs[sequence.number]
        cached = self.prefixes.attach(sequence, self._drafter(sequence), self._batch.running, self.engine.drafter)
        if job.started is None:
            job.started, job.cached = time.monotonic(), cached

    def _drafter(self, sequence: Decoding) -> Drafter:
        return sequence.drafter or self.engine.drafter

    def _tokens(self) -> int:
        """That the target's cache holds."""
        return self.prefixes.tokens + sum(s.slot.length for s in (*self._batch.joining, *self._batch.running) if s.is_open)

    def _round(self) -> list[Round]:
        """One round of all. Where the target has no room, cached prefixes go first, then the newest sequence waits again."""
        self._make_room()
        while True:
            try:
                return self._batch.step()
            except CacheError:
                if not (self.prefixes.evict() or self._preempt()):
                    return self._batch.step_apart()
            except OutriderError as error:
                log.warning("a sequence failed", extra={"fields": {"error": str(error)}})
                return self._batch.step_apart()

    def _make_room(self) -> None:
        while self.limits.tokens is not None and self._tokens() > self.limits.tokens:
            if not (self.prefixes.evict() or self._preempt()):
                break

    def _preempt(self) -> bool:
        """Let the newest of several running sequences wait again; what it held is computed anew then."""
        if len(self._batch.running) + len(self._batch.joining) < 2:
            return False
        group = self._batch.joining or self._batch.running
        sequence = group.pop()
        sequence.keep_open = False
        close_sequence(self.engine.target, sequence)
        sequence.keep_open = True
        self.preempted += 1
        self._is_full = True
        with self._changed:
            self._waiting.insert(0, self._jobs.pop(sequence.number))
        return True

    def _end_all(self, why: str) -> None:
        """After an error that should not be: nothing that was held is trusted any more."""
        for job in self._jobs.values():
            if not job.sequence.finish:
                job.sequence.finish, job.sequence.error = "error", why
            job.sequence.keep_open = False
            close_sequence(self.engine.target, job.sequence)
        self._batch.close()

    def _deliver(self, rounds: list[Round], ended: list[Job]) -> None:
        """Send the Rounds to who waits for them, one wake-up for each event loop, and let go of what has ended."""
        posts: dict[asyncio.AbstractEventLoop, list[tuple[Job, Round | None]]] = defaultdict(list)
        for round in rounds:
            job = self._jobs[round.sequence]
            posts[job.loop].append((job, round))
        for job in ended:
            self.prefixes.keep(job.sequence, self._drafter(job.sequence))
            with self._changed:
                del self._jobs[job.sequence.number]
            posts[job.loop].append((job, None))
            self._is_full = False
        for loop, mine in posts.items():
            try:
                loop.call_soon_threadsafe(_hand_out, mine)
            except RuntimeError:  # the loop has been closed: nobody waits any more
                continue


def _hand_out(posts: list[tuple[Job, Round | None]]) -> None:
    for job, round in posts:
        job.events.put_nowait((job, round))
