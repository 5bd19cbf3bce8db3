"""One request on its way: its jobs' Rounds as they come, what they cost, and its end, whoever ends it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any, AsyncIterator, Iterator, Mapping

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..files import to_json
from ..trace import Round, TraceWriter
from .answers import Answer
from .errors import Refusal, closing, invalid
from .metrics import Metrics
from .scheduler import Job, Scheduler

KEEP_ALIVE = 15.0
"""Seconds after which a stream that has nothing to say sends a comment, so that proxies keep it open."""


class Generation:
    """The Rounds of one request's jobs, each yielded once, with None at the end of each job.

    fields: gets what the log says about the request.
    """

    def __init__(
        self, answer: Answer, scheduler: Scheduler, metrics: Metrics, trace: TraceWriter | None, fields: dict[str, Any]
    ):
        self.answer = answer
        self.jobs = answer.jobs
        self.fields = fields
        self._scheduler = scheduler
        self._metrics = metrics
        self._trace = trace
        self._began = self.jobs[0].arrived
        self._last = [self._began] * len(self.jobs)

    async def events(self) -> AsyncIterator[tuple[Job, Round | None]]:
        """Until all have ended. Raises Refusal when one ends with an error."""
        left = len(self.jobs)
        while left:
            job, round = await self.jobs[0].events.get()
            if round is None:
                left -= 1
                self._end(job)
            else:
                self._count(job, round)
                if self._trace:
                    self._trace.write(replace(round, sequence=job.choice), self.answer.tokenizer)
            yield job, round

    async def whole(self) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        async for job, round in self.events():
            if round is not None:
                self.answer.tallies[job.choice].add(round)
        return self.answer.whole()

    def close(self) -> None:
        """However it ended: its jobs leave the engine, and the log gets the figures."""
        self._scheduler.cancel(self.jobs)
        if self._trace:
            self._trace.__exit__()
        answer = self.answer
        self.fields |= {
            "id": answer.id,
            "choices": len(self.jobs),
            "finish": [job.sequence.finish or "dropped" for job in self.jobs],
            "queued_seconds": self.jobs[0].started and self.jobs[0].started - self.jobs[0].arrived,
            **answer.usage(),
            **{name: sum(getattr(tally, name) for tally in answer.tallies) for name in ("passes", "proposed", "accepted")},
        }

    def _count(self, job: Job, round: Round) -> None:
        if not round.emitted:
            return
        now = time.monotonic()
        if round.number == 0:
            self._metrics.first_token.observe(now - self._began)
            self.fields.setdefault("first_token_seconds", now - self._began)
        else:
            for _ in round.emitted:
                self._metrics.between.observe((now - self._last[job.choice]) / len(round.emitted))
        self._last[job.choice] = now

    def _end(self, job: Job) -> None:
        if job.refused:
            raise closing()
        if job.sequence.finish == "error":
            why = job.sequence.error or "the engine failed"
            raise invalid(why) if job.sequence.at_fault else Refusal(500, why, "server_error")
        self._metrics.whole.observe(time.monotonic() - self._began)


async def until_gone(request: Request) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Chunks as server-sent events. However it ends, its jobs leave the engine."""

    def __init__(self, generation: Generation, usage: bool, headers: Mapping[str, str]):
        """usage: whether the last chunk tells it."""
        self._generation = generation
        self._answer = generation.answer
        self._usage = usage
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(self._lines(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()

    async def _lines(self) -> AsyncIterator[str]:
        answer = self._answer
        for opening in answer.opening():
            yield event(opening)
        events = self._generation.events()
        coming = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait([coming], timeout=KEEP_ALIVE)
                if not done:
                    yield ": waiting\n\n"
                    continue
                try:
                    job, round = coming.result()
                except StopAsyncIteration:
                    break
                coming = None
                for chunk in self._chunks(job, round):
                    yield event(chunk)
            if self._usage:
                yield event(answer.closing())
            yield "data: [DONE]\n\n"
        except Refusal as refusal:
            yield event(refusal.body)
        finally:
            if coming is not None:
                coming.cancel()

    def _chunks(self, job: Job, round: Round | None) -> Iterator[dict[str, Any]]:
        if round is None:
            yield self._answer.ending(job)
        elif (chunk := self._answer.chunk(job, round)) is not None:
            yield chunk


def event(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {to_json(value)}\n\n"
