"""Prometheus metrics. Those about speculation have vLLM's names under our prefix, so that its dashboards need one word changed."""

from __future__ import annotations

from typing import Any, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..trace import Round, statistics
from .scheduler import Job, Scheduler

PREFIX = "outrider:"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)


class Metrics:
    """The figures of one server, in a registry of their own."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._model = model
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were decoded.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens emitted.")
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache.")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens that were not computed again.")
        self.requests = self._counter("request_success", "Sequences by how they ended.", "finished_reason")
        self.http = self._counter("http_requests", "Answers by path and status.", "path", "status")
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds in which something was drafted.", "drafter")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", "drafter")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens emitted.", "drafter")
        self.accepted_per_pos = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens emitted, by depth from 0.", "drafter", "position"
        )
        self.passes = self._counter("forward_passes", "Passes of the target after the prompts.")
        self.rows = self._counter("forward_rows", "Rows of these passes.")
        self.first_token = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.between = self._histogram(
            "inter_token_latency_seconds", "Between tokens; those of one round share its time.", SHORT
        )
        self.queued = self._histogram("request_queue_time_seconds", "From arrival until the prompt's turn came.")
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.")

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float] = SECONDS) -> Any:
        made = Histogram(PREFIX + name, help, ("model_name",), registry=self.registry, buckets=buckets)
        return made.labels(self._model)

    def watch(self, scheduler: Scheduler) -> None:
        """Gauges that are read when they are asked for."""
        for name, help, read in (
            ("num_requests_running", "Sequences that decode or whose prompt is computed.", lambda: scheduler.running),
            ("num_requests_waiting", "Sequences that wait for room.", lambda: scheduler.waiting),
            ("num_preemptions", "Sequences that had to wait again for want of room.", lambda: scheduler.preempted),
            ("cache_tokens", "Tokens that the target's cache holds.", lambda: scheduler.held_tokens),
            ("prefix_cache_entries", "Ended sequences that are kept.", lambda: len(scheduler.prefixes)),
        ):
            gauge = Gauge(PREFIX + name, help, ("model_name",), registry=self.registry)
            gauge.labels(self._model).set_function(read)

    def observe(self, rounds: list[Round], ended: list[Job]) -> None:
        """What one pass brought. Called in the engine's thread."""
        for job in ended:
            self._ended(job)
        if not rounds:
            return
        self.passes.labels(self._model).inc(sum(1 / r.sequences for r in rounds))
        self.rows.labels(self._model).inc(sum(len(r.tokens) for r in rounds))
        self.generation_tokens.labels(self._model).inc(sum(len(r.emitted) for r in rounds))
        for drafter in {r.drafter for r in rounds if r.proposed}:
            mine = [r for r in rounds if r.drafter == drafter and r.proposed]
            figures = statistics(mine)
            self.drafts.labels(self._model, drafter).inc(len(mine))
            self.draft_tokens.labels(self._model, drafter).inc(figures.proposed)
            self.accepted_tokens.labels(self._model, drafter).inc(figures.accepted)
            for position, accepted in enumerate(figures.accepted_by_depth):
                self.accepted_per_pos.labels(self._model, drafter, position).inc(accepted)

    def _ended(self, job: Job) -> None:
        self.requests.labels(self._model, job.sequence.finish).inc()
        if job.started is not None:
            self.queued.observe(job.started - job.arrived)
            self.prompt_tokens.labels(self._model).inc(job.sequence.prompt_length)
            self.cache_queries.labels(self._model).inc(job.sequence.prompt_length)
            self.cache_hits.labels(self._model).inc(job.cached)

    def answered(self, path: str, status: int) -> None:
        self.http.labels(self._model, path, status).inc()

    def exposition(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
