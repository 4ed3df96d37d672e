# SPDX-License-Identifier: Apache-2.0
"""Engine: one thread that alternates between decode steps of all batches and parts of prompts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_not
from typing import Any

from transformers.cache_utils import Cache

from kvpress_eval.serve.admission import Admission
from kvpress_eval.serve.batch import AnswerRow, Batch, PressSteps, PromptReader
from kvpress_eval.serve.metrics import Metrics
from kvpress_eval.serve.prefixes import Prefixes, PrefixKey
from kvpress_eval.serve.requests import (
    FailedEvent,
    FinishedEvent,
    FinishReason,
    GenerationJob,
    RefusedError,
    TokenEvent,
    lost_conversation,
)
from kvpress_eval.serve.sampling import next_token
from kvpress_eval.serve.suspension import SuspendedRows, may_give_way

RETRY_AFTER = 5
"""Seconds after which a client may try again when the queue is full."""


@dataclass(frozen=True)
class EngineSettings:
    """Limits of the engine."""

    presses: Sequence[str]
    """Presses that requests may choose; the first is the default."""
    memory: int
    """Bytes for caches."""
    chunk: int = 256
    """Tokens of a prompt that are read between two decode steps."""
    queue: int = 256
    """Most waiting requests."""
    rows: int = 64
    """Most requests that run at once."""
    prompts: int = 4
    """Most prompts that are read at once, in turn."""
    preempt_seconds: float | None = None
    """Seconds of waiting after which a short request suspends a long one; None for never."""


class BatchEngine:
    """Continuous batching over compressed caches.

    In each round, every batch decodes one token of each of its rows, and one prompt reads one part. So a stream waits for at
    most one part of a prompt between two tokens, for any length of the prompt. Requests under one press share a batch where the
    press allows it (`kvpress.join`); batches of other presses take turns.

    Args:
        model: the model in evaluation mode; it belongs to the engine until `stop`.
        tokenizer: its tokenizer.
        settings: limits.
        prefixes: compressed system prompts and documents.
        metrics: counters.

    Raises:
        ValueError, NotImplementedError: the model does not support a press, or its memory cannot be planned.
    """

    def __init__(
        self, model: Any, tokenizer: Any, settings: EngineSettings, prefixes: Prefixes, metrics: Metrics
    ) -> None:
        self.model, self.settings, self.prefixes, self.metrics = model, settings, prefixes, metrics
        self.admission = Admission(model.config, settings.memory, settings.chunk)
        for press in settings.presses:
            self.admission.check_press(press)
        self.steps: dict[str, PressSteps] = {}
        try:
            for press in settings.presses:
                self.steps[press] = PressSteps(model, press, tokenizer)
        except BaseException:
            self._close_steps()
            raise
        ends = model.generation_config.eos_token_id
        self.end_tokens = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self._queue: deque[GenerationJob] = deque()
        self._prompts: deque[PromptReader] = deque()
        self._batches: list[Batch] = []
        self._suspended = SuspendedRows(model)
        self._changed = threading.Condition()
        self._state = "running"
        self._thread = threading.Thread(target=self._run, name="kvpress-engine", daemon=True)

    # -- called by any thread ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread of the engine."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine accepts and runs requests."""
        return self._state == "running" and self._thread.is_alive()

    @property
    def load(self) -> dict[str, int]:
        """Numbers of waiting requests, prompts being read, running rows, batches and suspended rows."""
        with self._changed:
            rows = sum(len(batch.rows) for batch in self._batches)
            return {
                "queued": len(self._queue), "prompts": len(self._prompts), "rows": rows, "batches": len(self._batches),
                "suspended": len(self._suspended.rows),
            }  # fmt: skip

    def submit(self, job: GenerationJob) -> None:
        """Queue a request.

        Raises:
            RefusedError: the request can never fit the memory limit, its conversation was dropped, the queue is full, or the
                server is shutting down.
        """
        if job.conversation and self.prefixes.store is None and job.key not in self.prefixes:
            raise RefusedError(lost_conversation(job.conversation), 404)
        self.admission.check_fits(job)
        with self._changed:
            if self._state != "running":
                raise RefusedError("the server is shutting down", 503, RETRY_AFTER)
            if len(self._queue) >= self.settings.queue:
                raise RefusedError(
                    f"the queue is full, with {self.settings.queue} waiting requests: try again later", 429, RETRY_AFTER
                )
            self._queue.append(job)
            self._changed.notify_all()

    def cancel(self, job: GenerationJob) -> None:
        """Drop a request: its row leaves the batch, and its memory is free, at the next step."""
        with self._changed:
            job.is_cancelled = True
            self._changed.notify_all()

    def stop(self, patience: float) -> None:
        """Accept no more requests, finish those accepted for at most `patience` seconds, then fail the others."""
        with self._changed:
            self._state = "draining"
            self._changed.notify_all()
        if not self._thread.is_alive():
            return
        self._thread.join(patience)
        with self._changed:
            self._state = "stopped"
            self._changed.notify_all()
        self._thread.join()

    # -- thread of the engine ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._drop_cancelled()
                self._resume()
                self._admit()
                for batch in list(self._batches):
                    self._guarded(partial(self._decode, batch), [row.job for row in batch.rows])
                self._batches = [batch for batch in self._batches if batch.rows]
                if self._prompts:
                    self._read(self._prompts.popleft())
        finally:
            self._state = "stopped"
            for job in self._jobs():
                self._end(job, FailedEvent("the server was shut down before the answer was complete"), "failed")
            self._queue.clear()
            self._prompts.clear()
            self._batches.clear()
            self._suspended.close()
            self._close_steps()
            self.prefixes.write_conversations()

    def _wait(self) -> bool:
        """Wait for work; return False once the engine must end."""
        with self._changed:
            while not (self._queue or self._prompts or self._batches or self._suspended.rows):
                if self._state != "running":
                    return False
                self._changed.wait()
            return self._state != "stopped"

    def _jobs(self) -> list[GenerationJob]:
        rows = [row.job for batch in self._batches for row in batch.rows]
        suspended_jobs = [row.job for row in self._suspended.rows]
        return [*self._queue, *(prompt.job for prompt in self._prompts), *rows, *suspended_jobs]

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled = [job for job in self._jobs() if job.is_cancelled]
            if not cancelled:
                return
            self._queue = deque(job for job in self._queue if job not in cancelled)
            self._prompts = deque(prompt for prompt in self._prompts if prompt.job not in cancelled)
        for batch in self._batches:
            batch.keep(lambda row: row.job not in cancelled)
        for row in [row for row in self._suspended.rows if row.job in cancelled]:
            self._suspended.remove(row)
        self._batches = [batch for batch in self._batches if batch.rows]
        for job in cancelled:
            self._end(job, FinishedEvent("cancelled"), "cancelled")

    def _admit(self) -> None:
        """Begin the oldest waiting requests that fit, in order, so that none is overtaken for ever."""
        while self._queue:
            job = self._queue[0]
            if len(self._prompts) >= self.settings.prompts:
                return
            if not self._has_room(job) and not (self._suspend_for(job) and self._has_room(job)):
                return
            with self._changed:
                self._queue.popleft()
            self.prefixes.pin(job.key, job.name)
            self.metrics.queue_seconds.observe(time.monotonic() - job.created)
            prompt = PromptReader(job, self.steps[job.press], self.model, self.prefixes, self.settings.chunk)
            self._prompts.append(prompt)

    def _num_running(self) -> int:
        return len(self._prompts) + sum(len(batch.rows) for batch in self._batches)

    def _suspend_for(self, job: GenerationJob) -> bool:
        """Suspend the longest running answers until a request that has waited long enough fits; return whether it does now."""
        patience = self.settings.preempt_seconds
        if patience is None or time.monotonic() - job.created < patience:
            return False
        rows = [(batch, row) for batch in self._batches for row in batch.rows if may_give_way(row, job)]
        rows.sort(key=lambda each: each[1].job.generated - each[1].job.max_tokens)
        needed_bytes = max(self.admission.price(job, job.key in self.prefixes)) + self.prefixes.held_bytes
        missing_bytes = self.admission.reserved + needed_bytes - self.admission.limit
        missing_rows = self._num_running() + 1 - self.settings.rows
        if sum(row.job.reserved_bytes for _, row in rows) < missing_bytes or len(rows) < missing_rows:
            return False
        for batch, row in rows:
            if missing_bytes <= 0 and missing_rows <= 0:
                break
            try:
                self._suspended.add(row, batch.row_cache(row))
            except OSError as error:
                self.metrics.log_failure([row.job], error)  # the answer goes on
                break
            missing_bytes, missing_rows = missing_bytes - row.job.reserved_bytes, missing_rows - 1
            batch.keep(partial(is_not, row))
            self.admission.release(row.job)
            self.metrics.suspensions.inc()
        self._batches = [batch for batch in self._batches if batch.rows]
        return missing_bytes <= 0 and missing_rows <= 0

    def _resume(self) -> None:
        """Continue suspended answers that fit again, before any waiting request begins."""
        while self._suspended.rows and self._num_running() < self.settings.rows:
            row = self._suspended.rows[0]
            if not self.admission.readmit(row.job, self.prefixes.held_bytes):
                if self._num_running():
                    return
                self.prefixes.make_room(self.prefixes.held_bytes)  # nothing else runs: the answer fits without prefixes
                self.admission.readmit(row.job, 0)
            self._guarded(partial(self._continue, row), [row.job])
            self._suspended.remove(row)

    def _continue(self, row: AnswerRow) -> None:
        self._join(row, self._suspended.load(row))

    def _has_room(self, job: GenerationJob) -> bool:
        if self._num_running() >= self.settings.rows:
            return False
        is_held = job.key in self.prefixes
        if self.admission.admit(job, self.prefixes.held_bytes, is_held):
            return True
        if self._num_running():
            return False
        # Nothing else runs: the request fits without the other prefixes.
        self.prefixes.make_room(self.prefixes.held_bytes, spared=job.key)
        return self.admission.admit(job, self.prefixes.held_bytes, is_held)

    def _read(self, prompt: PromptReader) -> None:
        """Read one part of a prompt, whose answer then joins a batch."""
        if self._is_read_by_another(prompt):
            self._prompts.append(prompt)
            return
        self._guarded(partial(self._read_part, prompt), [prompt.job])

    def _is_read_by_another(self, prompt: PromptReader) -> bool:
        """Whether another request reads the same prefix now, which this one waits for."""
        reading: set[PrefixKey] = {
            other.job.key
            for other in self._prompts
            if other.cache is not None and not other.has_prefix and other is not prompt
        }
        return not prompt.has_prefix and prompt.cache is None and prompt.job.key in reading

    def _read_part(self, prompt: PromptReader) -> None:
        if not prompt.read_part():
            self._prompts.append(prompt)
            return
        job = prompt.job
        self.metrics.count_prompt(job)
        self.admission.prompt_read(job)
        if not job.max_tokens or prompt.logits is None:
            if job.inspect is not None and prompt.cache is not None:
                job.inspect(prompt.cache)
            self._end(job, FinishedEvent("length"), "ok")
            return
        row, cache = AnswerRow(job, -1), prompt.cache
        assert cache is not None  # noqa: S101 - for type checkers
        if self._emit(row, prompt.logits, lambda: cache):
            return
        self._join(row, cache)

    def _join(self, row: AnswerRow, cache: Cache) -> None:
        """Add a row to a batch of its press, or begin one."""
        for batch in self._batches:
            if batch.steps.press == row.job.press and batch.join(cache, row):
                return
        self._batches.append(Batch(self.steps[row.job.press], cache, row))

    def _decode(self, batch: Batch) -> None:
        logits = batch.step()
        ended_rows = [
            row
            for row, row_logits in zip(batch.rows, logits, strict=True)
            if self._emit(row, row_logits, partial(batch.row_cache, row))
        ]
        batch.keep(lambda row: row not in ended_rows)
        self.metrics.batch_rows.observe(len(logits))

    def _emit(self, row: AnswerRow, logits: Any, cache: Callable[[], Cache]) -> bool:
        """Choose and deliver the next token of a row; return whether its answer has ended.

        `cache` returns the cache of the row, for requests that keep it.
        """
        job, now = row.job, time.monotonic()
        row.token, logprob, top = next_token(logits, job)
        self.metrics.observe_token(job, now)
        job.tokens.append(row.token)
        if row.token in self.end_tokens:
            return self._finish(job, "stop", cache)
        text = job.text.feed(row.token)
        job.deliver(TokenEvent(row.token, text, logprob, top))
        if job.text.is_stopped:
            return self._finish(job, "stop", cache)
        return job.generated >= job.max_tokens and self._finish(job, "length", cache)

    def _finish(self, job: GenerationJob, reason: FinishReason, cache: Callable[[], Cache]) -> bool:
        if job.keeps_cache:
            job.kept_bytes = self.prefixes.put(job.kept_key, cache()).held_bytes
        self._end(job, FinishedEvent(reason, job.text.finish()), "ok")
        return True

    def _guarded(self, work: Callable[[], None], jobs: Sequence[GenerationJob]) -> None:
        """Run some work; an error ends its requests, and no others."""
        try:
            work()
        except Exception as error:
            event = FailedEvent(f"{type(error).__name__}: {error}")
            if isinstance(error, RefusedError):
                event = FailedEvent(str(error), error.status)
            self.metrics.log_failure(jobs, error)
            self._batches = [batch for batch in self._batches if not any(row.job in jobs for row in batch.rows)]
            for job in jobs:
                self._end(job, event, "failed")

    def _end(self, job: GenerationJob, event: FinishedEvent | FailedEvent, outcome: str) -> None:
        self.admission.release(job)
        self.prefixes.unpin(job.key, job.name)
        self.metrics.count_end(job, outcome)
        job.deliver(event)

    def _close_steps(self) -> None:
        for steps in self.steps.values():
            steps.close()
