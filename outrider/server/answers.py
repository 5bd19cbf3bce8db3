"""What is sent back: whole answers, chunks of streams, usage, log-probabilities, as OpenAI's API has them."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Sequence

from ..chat import Piece, Reader
from ..text import REPLACEMENT, Tokenizer
from ..trace import Round, TokenLogprob
from .scheduler import Job

JSON = dict[str, Any]
IMPOSSIBLE = -9999.0
"""The log-probability of what cannot be: JSON has no infinity, and OpenAI's API says this."""


@dataclass
class Tally:
    """What the Rounds of one choice come to."""

    drafter: str | None = None
    tokens: list[int] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, round: Round) -> None:
        self.drafter = round.drafter
        self.tokens += round.emitted
        self.proposed += round.proposed
        self.accepted += round.accepted
        self.passes += 1
        self.logprobs += round.logprobs or ()
        self.pieces += round.pieces

    def report(self) -> JSON:
        return {name: getattr(self, name) for name in ("drafter", "tokens", "passes", "proposed", "accepted")}


@dataclass
class Answer:
    """The objects of one request's answer. Subclasses say what those of a kind look like.

    readers: what reads each choice's text, where it may hold reasoning or calls. report: whether they tell what was drafted;
    predicted: whether the drafts are a prediction's.
    """

    model: str
    jobs: Sequence[Job]
    tokenizer: Tokenizer | None
    readers: Sequence[Reader | None]
    report: bool = False
    predicted: bool = False
    kind = ""
    chunk_kind = ""
    prefix = ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.tallies = [Tally() for _ in self.jobs]
        self.offsets = [0] * len(self.jobs)
        self.calls = [0] * len(self.jobs)

    def _envelope(self, kind: str, choices: list[JSON]) -> JSON:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    # ---- streams ------------------------------------------------------------------------------------------------

    def opening(self) -> list[JSON]:
        """Chunks before any text."""
        return []

    def chunk(self, job: Job, round: Round) -> JSON | None:
        """What one Round adds; None where that is nothing."""
        self.tallies[job.choice].add(round)
        if not round.text and not round.logprobs and not self.report:
            return None
        choice = {**self._delta(job, round), "finish_reason": None}
        made = self._envelope(self.chunk_kind, [choice])
        if self.report:
            made["speculation"] = {"pieces": round.pieces, "proposed": round.proposed, "accepted": round.accepted}
        return made

    def ending(self, job: Job) -> JSON:
        """The chunk that says why a choice ended."""
        choice = {**self._last(job), "finish_reason": self._finish(job)}
        made = self._envelope(self.chunk_kind, [choice])
        if self.report:
            made["speculation"] = self._report(job)
        return made

    def closing(self) -> JSON:
        """The chunk with the usage, after all choices."""
        return {**self._envelope(self.chunk_kind, []), "usage": self.usage()}

    def _delta(self, job: Job, round: Round) -> JSON:
        raise NotImplementedError

    def _last(self, job: Job) -> JSON:
        raise NotImplementedError

    # ---- whole --------------------------------------------------------------------------------------------------

    def whole(self) -> JSON:
        """The answer of a request that is not streamed, once all jobs have ended."""
        choices = [{**self._choice(job), "finish_reason": self._finish(job)} for job in self.jobs]
        made = {**self._envelope(self.kind, choices), "usage": self.usage()}
        if self.report:
            made["speculation"] = [self._report(job) | {"pieces": self.tallies[job.choice].pieces} for job in self.jobs]
        return made

    def _choice(self, job: Job) -> JSON:
        raise NotImplementedError

    def _finish(self, job: Job) -> str | None:
        reader = self.readers[job.choice]
        return "tool_calls" if reader and reader.calls and job.sequence.finish == "stop" else job.sequence.finish

    # ---- both ---------------------------------------------------------------------------------------------------

    def _report(self, job: Job) -> JSON:
        return {"seed": job.sequence.sampler.seed, "rule": job.sequence.rule, **self.tallies[job.choice].report()}

    def usage(self) -> JSON:
        """Each prompt counts once, however many choices it has."""
        prompts = [job for job in self.jobs if job.is_first]
        prompt = sum(job.sequence.prompt_length for job in prompts)
        completion = sum(len(tally.tokens) for tally in self.tallies)
        made: JSON = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        made["prompt_tokens_details"] = {"cached_tokens": sum(job.cached for job in prompts)}
        if self.predicted:
            accepted = sum(tally.accepted for tally in self.tallies)
            rejected = sum(tally.proposed for tally in self.tallies) - accepted
            made["completion_tokens_details"] = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return made

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token]) if self.tokenizer else ""


class ChatAnswer(Answer):
    """``chat.completion`` and ``chat.completion.chunk``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self) -> list[JSON]:
        return [
            self._envelope(
                self.chunk_kind,
                [{"index": job.choice, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
            )
            for job in self.jobs
        ]

    def _delta(self, job: Job, round: Round) -> JSON:
        reader = self.readers[job.choice]
        pieces = reader.push(round.text) if reader else [Piece("content", round.text)] if round.text else []
        return {"index": job.choice, "delta": self._said(job, pieces), "logprobs": self._logprobs(round.logprobs)}

    def _last(self, job: Job) -> JSON:
        reader = self.readers[job.choice]
        return {"index": job.choice, "delta": self._said(job, reader.close() if reader else []), "logprobs": None}

    def _choice(self, job: Job) -> JSON:
        wanted = job.sequence.params.logprobs is not None
        text, reader = job.sequence.text, self.readers[job.choice]
        said = self._said(job, [*reader.push(text), *reader.close()] if reader else [Piece("content", text)])
        for call in said.get("tool_calls", ()):
            del call["index"]
        return {
            "index": job.choice,
            "message": {"role": "assistant", "content": None if "tool_calls" in said else "", **said},
            "logprobs": self._logprobs(self.tallies[job.choice].logprobs if wanted else None),
        }

    def _said(self, job: Job, pieces: Sequence[Piece]) -> JSON:
        """The fields of a message or delta with these pieces."""
        said: JSON = {}
        for name, kind in (("content", "content"), ("reasoning_content", "reasoning")):
            if text := "".join(piece.text for piece in pieces if piece.kind == kind):
                said[name] = text
        if calls := [piece.call for piece in pieces if piece.call]:
            first = self.calls[job.choice]
            self.calls[job.choice] += len(calls)
            said["tool_calls"] = [
                {
                    "index": index,
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(calls, first)
            ]
        return said

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> JSON | None:
        if entries is None:
            return None
        return {
            "content": [
                {**self._entry(e.token, e.logprob), "top_logprobs": [self._entry(t, value) for t, value in e.top]}
                for e in entries
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> JSON:
        text = self._text(token)  # of a part of a character the bytes are not known
        return {
            "token": text,
            "logprob": max(logprob, IMPOSSIBLE),
            "bytes": None if REPLACEMENT in text else list(text.encode()),
        }


class TextAnswer(Answer):
    """``text_completion``, whole or in chunks."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _delta(self, job: Job, round: Round) -> JSON:
        return {"index": job.choice, "text": round.text, "logprobs": self._logprobs(job, round.logprobs)}

    def _last(self, job: Job) -> JSON:
        return {"index": job.choice, "text": "", "logprobs": None}

    def _choice(self, job: Job) -> JSON:
        wanted = job.sequence.params.logprobs is not None
        logprobs = self._logprobs(job, self.tallies[job.choice].logprobs if wanted else None)
        return {"index": job.choice, "text": job.sequence.text, "logprobs": logprobs}

    def _logprobs(self, job: Job, entries: Sequence[TokenLogprob] | None) -> JSON | None:
        if entries is None:
            return None
        tokens = [self._text(entry.token) for entry in entries]
        offsets = []
        for text in tokens:
            offsets.append(self.offsets[job.choice])
            self.offsets[job.choice] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [max(entry.logprob, IMPOSSIBLE) for entry in entries],
            "top_logprobs": [{self._text(t): max(value, IMPOSSIBLE) for t, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }
