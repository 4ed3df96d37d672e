# SPDX-License-Identifier: Apache-2.0
"""The work of a run: all presses of one task and length, context by context."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

import kvpress
from kvpress.core.effect import left_whole_note
from kvpress.hf.positions import check_positions
from kvpress_eval.common.errors import EvalError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import Results, Row
from kvpress_eval.run import memory
from kvpress_eval.run.cells import Cell
from kvpress_eval.run.environment import now
from kvpress_eval.run.generation import Answer, Context, Limits, answer, parts, read_contexts, seeded
from kvpress_eval.run.interrupt import Interrupt
from kvpress_eval.run.kept import describe_kept
from kvpress_eval.run.models import Engine
from kvpress_eval.run.progress import JobProgress
from kvpress_eval.run.prompts import Prompt, make_prompt
from kvpress_eval.run.savings import Savings
from kvpress_eval.tasks.sample import Sample
from kvpress_eval.tasks.scoring import score
from kvpress_eval.tasks.source import Source

_FIGURES = (
    "context_tokens", "new_tokens", "kept", "bytes", "uncompressed_bytes", "end_bytes", "end_uncompressed_bytes",
    "bits_per_value", "compressed",
)  # fmt: skip
"""What a row says of an answer."""


@dataclass(eq=False)
class _Running:
    """A cell that this process has claimed; `open` until it failed, `seconds` spent on its answers.

    `warned` once it was said that nothing is compressed.
    """

    cell: Cell
    store: Results
    rows: dict[str, Row]
    press: Any
    open: bool = True
    warned: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class _Batch:
    """Contexts that are read together, and the samples that ask about each."""

    contexts: Sequence[Sequence[tuple[Sample, Prompt]]]

    @property
    def samples(self) -> list[Sample]:
        """All samples, in order."""
        return [sample for group in self.contexts for sample, _ in group]

    @property
    def ids(self) -> list[list[int]]:
        """The tokens of each context."""
        return [group[0][1].first for group in self.contexts]

    @property
    def asked(self) -> list[tuple[int, Prompt]]:
        """The row of each sample's context, and its prompt."""
        return [(row, prompt) for row, group in enumerate(self.contexts) for _, prompt in group]


@dataclass(frozen=True)
class Job:
    """One process at work on a configuration. `results` says where those of a cell go, by its id.

    `shown` is where the tokens that were kept are recorded, per press once. `prefixes` holds compressed contexts of other runs.
    `free_bytes` is the memory that is left to this process, None where it may take what the machine has.
    """

    config: RunConfig
    engine: Engine
    run_id: str
    progress: JobProgress
    interrupt: Interrupt
    results: Callable[[str], Results]
    shown: Source | None
    savings: Savings = field(default_factory=Savings)
    prefixes: kvpress.PrefixStore | None = None
    free_bytes: int | None = None

    def run_source(self, source: Source, cells: Sequence[Cell]) -> list[Cell]:
        """Run cells of one task and length; return those that another process has claimed."""
        busy = []
        with ExitStack() as claims:
            running = []
            for cell in cells:
                store = self.results(cell.id)
                if claims.enter_context(store.claim()):
                    rows = store.open(cell.spec, source.ids)
                    running.append(_Running(cell, store, rows, kvpress.get_press(cell.press)))
                else:
                    busy.append(cell)
            if running:
                self._run_cells(source, running)
        return busy

    def _run_cells(self, source: Source, running: Sequence[_Running]) -> None:
        ids, weight = source.ids, running[0].cell.weight
        missing = {name: sum(name not in one.rows for one in running) for name in ids}
        self.progress.skip((len(ids) * len(running) - sum(missing.values())) * weight)
        if any(missing.values()):
            place = running[0].cell.place
            self.progress.start(f"{place}: {len(running)} presses, {len(ids)} samples")
            for batch in self._batches(source, running):
                self._run_batch(running, batch)
                self.progress.advance(sum(missing[sample.id] for sample in batch.samples) * weight)
                if self.interrupt.requested:
                    return
        for one in running:
            if one.open:
                one.store.finish(len(ids))
                scores = [one.rows[name]["score"] for name in ids]
                self.progress.finished(one.cell.label, scores, one.seconds)

    def _batches(self, source: Source, running: Sequence[_Running]) -> list[_Batch]:
        """Return the samples, those about the same context together; a batch is formed the same way in every run."""
        aware, tokenizer = self.config.question_aware, self.engine.tokenizer
        try:
            asked = [(s, make_prompt(tokenizer, s, question_aware=aware)) for s in source.make(tokenizer)]
            if not source.length:
                self._check_positions(asked)
        except EvalError:
            raise
        except Exception as error:
            for one in running:
                self._fail(one, error)
            return []
        contexts = [list(group) for _, group in groupby(asked, key=lambda pair: pair[1].first)]
        return [_Batch(part) for part in parts(contexts, self.config.batch_size)]

    def _check_positions(self, asked: Sequence[tuple[Sample, Prompt]]) -> None:
        """Refuse samples that are longer than the model has positions; of those with a length, the run has checked that."""
        for sample, prompt in asked:
            tokens = len(prompt.first) + len(prompt.second)
            check_positions(
                self.engine.model.config, tokens, "shorten it", f"sample {sample.id} has {tokens} tokens, which is"
            )

    def _run_batch(self, running: Sequence[_Running], batch: _Batch) -> None:
        """Run what is missing of a batch: presses that share a reading together, as far as memory goes, the others alone."""
        missing = [one for one in running if one.open and any(s.id not in one.rows for s in batch.samples)]
        sharing = [one for one in missing if one.press.recipe().shares_prefill]
        groups = memory.fitting(
            self.engine.model,
            sharing,
            lambda one: one.press,
            len(batch.ids),
            max(map(len, batch.ids)),
            running[0].cell.source.max_new_tokens + max(len(prompt.second) for _, prompt in batch.asked),
            self.free_bytes,
        )
        for group in [*groups, *([one] for one in missing if one not in sharing)]:
            if not self.interrupt.requested:
                self._read_and_answer(group, batch)

    def _read_and_answer(self, group: Sequence[_Running], batch: _Batch) -> None:
        """Read the contexts of a batch once for a group of presses; where that fails, for half of them at a time."""
        failure = None
        try:
            with seeded(batch.samples[0].id):
                contexts = read_contexts(self.engine, [one.press for one in group], batch.ids, self.prefixes)
        except Exception as error:
            failure = _freed(error)
        if failure is not None:
            self._retry(group, batch, failure)
            return
        self.savings.add(contexts, len(batch.contexts), len(batch.samples))
        for one in group:
            # Each cache is let go as soon as its questions are answered.
            if not self.interrupt.requested:
                self._answer(one, contexts.pop(0), batch)

    def _answer(self, one: _Running, context: Context, batch: _Batch) -> None:
        sample, prompt = batch.contexts[0][0]
        if self.shown is one.cell.source and sample.id == self.shown.ids[0]:
            one.store.record_kept(describe_kept(context.cache, self.engine.tokenizer, prompt, sample))
        self._warn_if_whole(one, context)
        self.progress.cell(one.cell.label)
        started = time.monotonic()
        limits = Limits(one.cell.source.max_new_tokens, self.config.max_seconds_per_sample, batch.samples[0].query.stop)
        failure = None
        try:
            with seeded(batch.samples[0].id):
                answers = answer(self.engine, context, batch.asked, limits)
        except Exception as error:
            failure = _freed(error)
        one.seconds += time.monotonic() - started
        if failure is not None:
            del context
            self._retry([one], batch, failure)
            return
        for sample, given, (_, prompt) in zip(batch.samples, answers, batch.asked, strict=True):
            if sample.id in one.rows:
                continue
            try:
                row = self._row(one.cell, sample, prompt, given, context, len(batch.contexts))
            except Exception as error:
                self._fail(one, error)
                return
            one.store.append(row)
            one.rows[sample.id] = row

    def _warn_if_whole(self, one: _Running, context: Context) -> None:
        """Warn, once for a cell, that its press has compressed nothing of a context."""
        if not one.warned and not all(map(context.compressed, range(len(context.kept)))):
            one.warned = True
            self.progress.problem(f"{one.cell.label}: {left_whole_note(one.press)}")

    def _retry(self, group: Sequence[_Running], batch: _Batch, error: Exception) -> None:
        """Try again with half of the presses and, where memory ran out, half of the contexts; what fails alone is at fault."""
        memory.release()
        if len(group) > 1:
            for half in parts(group, (len(group) + 1) // 2):
                self._read_and_answer(half, batch)
        elif isinstance(error, torch.OutOfMemoryError) and len(batch.contexts) > 1:
            for part in parts(batch.contexts, (len(batch.contexts) + 1) // 2):
                if group[0].open:
                    self._read_and_answer(group, _Batch(part))
        else:
            self._fail(group[0], error)

    def _fail(self, one: _Running, error: Exception) -> None:
        one.open = False
        message = f"{type(error).__name__}: {error}"
        details = "".join(traceback.format_exception(error))
        one.store.fail(_status(error), message, details, memory.peak_bytes(self.engine.model.device))
        self.progress.problem(f"{one.cell.label}: {message}")

    def _row(
        self, cell: Cell, sample: Sample, prompt: Prompt, answer: Answer, context: Context, batch_size: int
    ) -> Row:
        timed_out = answer.text is None
        return {
            "cell": cell.id,
            "sample": sample.id,
            "prompt_sha256": _hash_ids(prompt),
            "status": "timeout" if timed_out else "ok",
            "prediction": answer.text,
            "expected": list(sample.query.answers),
            "score": None if timed_out else score(sample.query, answer.text),
            "batch_size": batch_size,
            **{name: getattr(answer, name) for name in _FIGURES},
            "measured": {
                "run": self.run_id,
                "date": now(),
                "prefill_seconds": answer.prefill_seconds,
                "seconds_per_token": answer.seconds_per_token,
                "prefill_shared_by": context.shared_by,
            },
        }


def _freed(error: Exception) -> Exception:
    """Let go of what the frames of an error hold, tensors above all; its traceback can still be written."""
    traceback.clear_frames(error.__traceback__)
    return error


def _status(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    return "nan" if isinstance(error, FloatingPointError) else "error"


def _hash_ids(prompt: Prompt) -> str:
    return hashlib.sha256(repr((prompt.first, prompt.second)).encode()).hexdigest()[:16]
