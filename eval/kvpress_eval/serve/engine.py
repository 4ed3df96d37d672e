# SPDX-License-Identifier: Apache-2.0
"""Engine: one thread that alternates between decode steps of all batches and parts of prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import is_not
from typing import Any

from transformers.cache_utils import Cache

from kvpress_eval.serve.admission import Admission
from kvpress_eval.serve.batch import AnswerRow, Batch, PressSteps, PromptReader
from kvpress_eval.serve.engine_thread import EngineThread
from kvpress_eval.serve.failures import Failures, any_answers
from kvpress_eval.serve.metrics import Metrics
from kvpress_eval.serve.prefixes import Prefixes
from kvpress_eval.serve.requests import (
    FailedEvent,
    FinishedEvent,
    FinishReason,
    GenerationJob,
    PrefixKey,
    RefusedError,
    TokenEvent,
    lost_conversation,
)
from kvpress_eval.serve.sampling import next_token
from kvpress_eval.serve.settings import EngineSettings
from kvpress_eval.serve.suspension import SuspendedRows, rows_giving_way

SHORT_PARTS = 4
"""Most parts of prompts in one round; a pass of few tokens takes about as long as one of a quarter of `chunk`."""
RETRY_AFTER = 5
"""Seconds after which a client may try again when the queue is full."""
SHUT_DOWN = "the server was shut down before the answer was complete"
LOST = "the engine of this server has failed: send the request again once the server has restarted"


class BatchEngine(EngineThread):
    """Continuous batching over compressed caches.

    In each round, every batch decodes one token of each of its rows, and prompts read one part of `chunk` tokens, or up to
    `SHORT_PARTS` short ones. So the time that a stream waits between two tokens does not depend on the length of any prompt.
    Requests under one press share a batch where the press allows it (`kvpress.join`); batches of other presses take turns.

    An unexpected error ends the requests of the stage in which it is raised, and no others. If the engine cannot go on
    (`Failures`), all requests end with an error, and `on_lost` is called.

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
        super().__init__()
        self.model, self.settings, self.prefixes, self.metrics = model, settings, prefixes, metrics
        self.admission = Admission(model, settings.memory, settings.chunk)
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
        self._failures = Failures(metrics, partial(any_answers, self.steps.values(), model, tokenizer, prefixes))

    # -- called by any thread ----------------------------------------------------------------------------------

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
                raise RefusedError(LOST if self.is_lost else "the server is shutting down", 503, RETRY_AFTER)
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

    # -- thread of the engine ----------------------------------------------------------------------------------

    def _round(self) -> None:
        self._drop_cancelled()
        self._resume()
        self._admit()
        for batch in list(self._batches):
            self._guarded("decode", partial(self._decode, batch), [row.job for row in batch.rows])
        self._read_prompts()

    def _has_work(self) -> bool:
        return bool(self._queue or self._prompts or self._batches or self._suspended.rows)

    def _fail_round(self, error: BaseException) -> None:
        self._fail("round", self._begun_jobs(), error)

    def _note_failure(self, error: BaseException) -> None:
        self._failures.add("engine", (), error)

    def _is_fatal(self) -> bool:
        return self._failures.is_fatal()

    def _shut_down(self) -> None:
        """End all requests and free all memory; an error of one step is raised after the others."""
        event = FailedEvent(LOST if self.is_lost else SHUT_DOWN, 503)
        with ExitStack() as stack:
            stack.callback(self.prefixes.write_conversations)
            stack.callback(self._close_steps)
            stack.callback(self._suspended.close)
            for places in (self._queue, self._prompts, self._batches):
                stack.callback(places.clear)
            for job in (*self._queue, *self._begun_jobs()):
                stack.callback(self._end, job, event, "failed")

    def _begun_jobs(self) -> list[GenerationJob]:
        rows = [row.job for batch in self._batches for row in batch.rows]
        suspended_jobs = [row.job for row in self._suspended.rows]
        return [*(prompt.job for prompt in self._prompts), *rows, *suspended_jobs]

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled = {job for job in (*self._queue, *self._begun_jobs()) if job.is_cancelled}
            if not cancelled:
                return
            self._queue = deque(job for job in self._queue if job not in cancelled)
            self._prompts = deque(prompt for prompt in self._prompts if prompt.job not in cancelled)
        for batch in list(self._batches):
            self._keep(batch, lambda row: row.job not in cancelled)
        for row in [row for row in self._suspended.rows if row.job in cancelled]:
            self._suspended.remove(row)
        for job in cancelled:
            self._end(job, FinishedEvent("cancelled"), "cancelled")

    def _keep(self, batch: Batch, wanted: Callable[[AnswerRow], bool]) -> None:
        """Take the other rows out of a batch, and an empty batch out of the list."""
        self._guarded("decode", partial(batch.keep, wanted), [row.job for row in batch.rows])
        self._batches = [entry for entry in self._batches if entry.rows]

    def _admit(self) -> None:
        """Begin the oldest waiting requests that fit, in order, so that none is overtaken for ever."""
        while self._queue and len(self._prompts) < self.settings.prompts:
            job = self._queue[0]
            self._guarded("admission", partial(self._begin, job), [job])
            if self._queue and self._queue[0] is job:  # no room yet
                return

    def _begin(self, job: GenerationJob) -> None:
        """Begin a request, if it fits.

        Raises:
            RefusedError: nothing else runs, and the request takes more than was planned when it was accepted.
        """
        if not self._has_room(job) and not (self._suspend_for(job) and self._has_room(job)):
            if self._num_running() or self._suspended.rows:
                return
            raise RefusedError(
                "the text of this request takes more memory than was planned, and leaves no room for it", 503
            )
        self.prefixes.pin(job.key, job.name)
        self.metrics.queue_seconds.observe(time.monotonic() - job.created)
        prompt = PromptReader(job, self.steps[job.press], self.model, self.prefixes, self.settings.chunk)
        with self._changed:
            self._queue.popleft()
            self._prompts.append(prompt)

    def _num_running(self) -> int:
        return len(self._prompts) + sum(len(batch.rows) for batch in self._batches)

    def _suspend_for(self, job: GenerationJob) -> bool:
        """Suspend the longest running answers until a request that has waited long enough fits; return whether any was."""
        patience = self.settings.preempt_seconds
        if patience is None or time.monotonic() - job.created < patience or not self._suspended.is_ready:
            return False
        held_prefix = self.prefixes.bytes_of(job.key)
        needed_bytes = max(self.admission.price(job, held_prefix)) + self.prefixes.held_bytes
        missing_bytes = self.admission.reserved + needed_bytes - self.admission.limit
        missing_rows = self._num_running() + 1 - self.settings.rows
        chosen = rows_giving_way(self._batches, job, missing_bytes, missing_rows)
        for batch, row in chosen:
            try:
                self._suspended.add(row, batch.row_cache(row))
            except BaseException as error:  # the answer goes on in its batch
                self.metrics.count_failure("preemption", [row.job], error)
                return False
            self._keep(batch, partial(is_not, row))
            self.admission.release(row.job)
            self.metrics.suspensions.inc()
        return bool(chosen)

    def _resume(self) -> None:
        """Continue suspended answers that fit again, before any waiting request begins."""
        while self._suspended.rows and self._num_running() < self.settings.rows:
            row = self._suspended.rows[0]
            self._guarded("resume", partial(self._continue, row), [row.job])
            if self._suspended.rows and self._suspended.rows[0] is row:  # no room yet
                return

    def _continue(self, row: AnswerRow) -> None:
        """Continue a suspended answer, if it fits."""
        if not self.admission.readmit(row.job, self.prefixes.held_bytes):
            if self._num_running():
                return
            self.prefixes.make_room(self.prefixes.held_bytes)  # nothing else runs: the answer fits without prefixes
            self.admission.readmit(row.job, 0)
        self._join(row, self._suspended.load(row))
        self._suspended.remove(row)

    def _has_room(self, job: GenerationJob) -> bool:
        if self._num_running() >= self.settings.rows:
            return False
        held_prefix = self.prefixes.bytes_of(job.key)
        if self.admission.admit(job, self.prefixes.held_bytes, held_prefix):
            return True
        if self._num_running():
            return False
        # Nothing else runs: the request fits without the other prefixes.
        self.prefixes.make_room(self.prefixes.held_bytes, spared=job.key)
        return self.admission.admit(job, self.prefixes.held_bytes, held_prefix)

    def _read_prompts(self) -> None:
        """Read a part of each prompt in turn, as long as the parts together take about as long as one of `chunk` tokens."""
        cost = 0
        for prompt in list(self._prompts):
            if self._is_read_by_another(prompt):
                continue
            part_cost = max(prompt.next_tokens, self.settings.chunk // SHORT_PARTS)
            if cost and cost + part_cost > self.settings.chunk:
                return
            cost += part_cost
            self._guarded("prefill", partial(self._read, prompt), [prompt.job])

    def _read(self, prompt: PromptReader) -> None:
        """Read one part of a prompt, whose answer then joins a batch."""
        is_read = prompt.read_part()
        with self._changed:
            self._prompts.remove(prompt)
            if not is_read:
                self._prompts.append(prompt)
        if not is_read:
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
        if not self._emit(row, prompt.logits, lambda: cache):
            self._join(row, cache)

    def _is_read_by_another(self, prompt: PromptReader) -> bool:
        """Whether another request reads the same prefix now, which this one waits for."""
        reading: set[PrefixKey] = {
            other.job.key
            for other in self._prompts
            if other.cache is not None and not other.has_prefix and other is not prompt
        }
        return not prompt.has_prefix and prompt.cache is None and prompt.job.key in reading

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
        self._keep(batch, lambda row: row not in ended_rows)
        self.metrics.batch_rows.observe(len(logits))

    def _emit(self, row: AnswerRow, logits: Any, cache: Callable[[], Cache]) -> bool:
        """Choose and deliver the next token of a row; return whether its answer has ended.

        `cache` returns the cache of the row, for requests that keep it. An error ends this answer alone.
        """
        try:
            return self._choose(row, logits, cache)
        except BaseException as error:
            self._end_failed("sampling", [row.job], error)
            return True

    def _choose(self, row: AnswerRow, logits: Any, cache: Callable[[], Cache]) -> bool:
        job, now = row.job, time.monotonic()
        row.token, logprob, top = next_token(logits, job)
        self.metrics.observe_token(job, now)
        job.tokens.append(row.token)
        if row.token in self.end_tokens:
            return self._finish(job, "stop", cache)
        text = job.text.feed(row.token)
        job.deliver(TokenEvent(row.token, text, logprob, top))
        if job.text.is_stopped or (job.grammar is not None and job.grammar.is_complete):
            return self._finish(job, "stop", cache)
        return job.generated >= job.max_tokens and self._finish(job, "length", cache)

    def _finish(self, job: GenerationJob, reason: FinishReason, cache: Callable[[], Cache]) -> bool:
        if job.keeps_cache:
            job.kept_bytes = self.prefixes.put(job.kept_key, cache()).held_bytes
        text = job.text.finish()
        self._end(job, FinishedEvent("stop" if job.text.is_stopped else reason, text), "ok")
        return True

    def _guarded(self, stage: str, work: Callable[[], None], jobs: Sequence[GenerationJob]) -> bool:
        """Run some work and return whether it succeeded; an error ends its requests, and no others."""
        try:
            work()
        except BaseException as error:
            self._fail(stage, jobs, error)
            return False
        return True

    def _fail(self, stage: str, jobs: Sequence[GenerationJob], error: BaseException) -> None:
        """Take requests out, with the batches of their rows, and end them with an error."""
        with self._changed:
            self._queue = deque(job for job in self._queue if job not in jobs)
            self._prompts = deque(prompt for prompt in self._prompts if prompt.job not in jobs)
        self._batches = [batch for batch in self._batches if not any(row.job in jobs for row in batch.rows)]
        for row in [row for row in self._suspended.rows if row.job in jobs]:
            self._suspended.remove(row)
        self._end_failed(stage, jobs, error)

    def _end_failed(self, stage: str, jobs: Sequence[GenerationJob], error: BaseException) -> None:
        event = FailedEvent(f"{type(error).__name__}: {error}")
        if isinstance(error, RefusedError):  # the request is at fault
            event = FailedEvent(str(error), error.status)
        else:
            self._failures.add(stage, jobs, error)
        for job in jobs:
            self._end(job, event, "failed")

    def _end(self, job: GenerationJob, event: FinishedEvent | FailedEvent, outcome: str) -> None:
        """Free the memory of a request and deliver its last event, once."""
        if job.is_ended:
            return
        job.is_ended = True
        if outcome == "ok":
            self._failures.clear()
        try:
            self.admission.release(job)
            self.prefixes.unpin(job.key, job.name)
            self.metrics.count_end(job, outcome)
        finally:
            job.deliver(event)

    def _close_steps(self) -> None:
        for steps in self.steps.values():
            steps.close()
