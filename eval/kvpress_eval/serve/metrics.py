# SPDX-License-Identifier: Apache-2.0
"""Metrics of the server for Prometheus, and its log, which has no texts."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpress_eval.serve.requests import GenerationJob

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Bounds of the buckets of times."""
SYSTEM_ERRORS = (OSError, MemoryError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))
"""Errors whose messages never quote a text of a client; torch has `AcceleratorError` since 2.8."""
MOST_FRAMES = 12
"""Innermost frames of an error that are logged."""
logger = logging.getLogger("kvpress.serve")


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("kvpress_requests", "Requests by outcome", ["outcome", "press"], registry=registry)
        self.tokens = Counter("kvpress_tokens", "Tokens: prompt, cached, generated", ["kind"], registry=registry)
        self.prefix_lookups = Counter("kvpress_prefix_lookups", "Prefix lookups", ["result"], registry=registry)
        self.queue_seconds = Histogram(
            "kvpress_queue_seconds", "Seconds in the queue", buckets=SECONDS, registry=registry
        )
        self.first_token = Histogram(
            "kvpress_time_to_first_token_seconds", "Seconds to the first token", buckets=SECONDS, registry=registry
        )
        self.between_tokens = Histogram(
            "kvpress_time_between_tokens_seconds", "Seconds between tokens", buckets=SECONDS, registry=registry
        )
        self.failures = Counter(
            "kvpress_failures", "Unexpected errors of the engine by stage", ["stage"], registry=registry
        )
        self.suspensions = Counter("kvpress_suspensions", "Answers that gave way to shorter ones", registry=registry)
        self.batch_rows = Histogram(
            "kvpress_batch_rows", "Rows of a decode step", buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=registry
        )

    def gauge(self, name: str, words: str, value: Callable[[], float]) -> None:
        """Add a gauge that is read when metrics are fetched."""
        Gauge(name, words, registry=self.registry).set_function(value)

    def count_prompt(self, job: GenerationJob) -> None:
        """Count the tokens of a prompt that was read, and the lookup of its prefix."""
        if job.prefix:
            self.prefix_lookups.labels("hit" if job.cached_tokens else "miss").inc()
        self.tokens.labels("cached").inc(job.cached_tokens)
        self.tokens.labels("prompt").inc(len(job.prefix) + len(job.prompt) - job.cached_tokens)

    def observe_token(self, job: GenerationJob, now: float) -> None:
        """Record the time of a generated token."""
        self.tokens.labels("generated").inc()
        if job.last_token_at is None:
            job.first_token_seconds = now - job.created
            self.first_token.observe(job.first_token_seconds)
        else:
            self.between_tokens.observe(now - job.last_token_at)
        job.last_token_at = now

    def count_end(self, job: GenerationJob, outcome: str) -> None:
        """Count and log the end of a request."""
        self.requests.labels(outcome, job.press).inc()
        log(
            "request", id=job.name, outcome=outcome, press=job.press, prompt_tokens=len(job.prefix) + len(job.prompt),
            cached_tokens=job.cached_tokens, generated_tokens=job.generated, first_token_seconds=job.first_token_seconds,
        )  # fmt: skip

    def count_failure(self, stage: str, jobs: Sequence[GenerationJob], error: BaseException) -> None:
        """Count and log an unexpected error of a stage of the engine, with its place in the code.

        The message is logged only if it comes from the system or the accelerator, since others may quote texts of clients.
        """
        self.failures.labels(stage).inc()
        frames = traceback.extract_tb(error.__traceback__)[-MOST_FRAMES:]
        log(
            "failure", logging.ERROR, stage=stage, requests=[job.name for job in jobs], error=type(error).__name__,
            message=str(error) if isinstance(error, SYSTEM_ERRORS) else None,
            frames=[f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames],
        )  # fmt: skip


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Write one line of JSON to the log."""
    logger.log(level, json.dumps({"event": event, **fields}))
