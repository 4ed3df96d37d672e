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
from kvpress_eval.common.files import hash_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import ResultSink, Row
from kvpress_eval.run import memory
from kvpress_eval.run.cells import Cell
from kvpress_eval.run.environment import now
from kvpress_eval.run.generation import Answer, Context, Limits, answer, parts, read_contexts, seeded
from kvpress_eval.run.interrupt import Interrupt
from kvpress_eval.run.kept import describe_kept
from kvpress_eval.run.models import Engine
from kvpress_eval.run.progress import JobProgress
from kvpress_eval.run.prompts import Prompt, make_prompt
from kvpress_eval.run.ranks import Ranks
from kvpress_eval.run.savings import Savings
from kvpress_eval.tasks.sample import Sample, score
from kvpress_eval.tasks.source import Source

_FIGURES = (
    "context_tokens", "new_tokens", "kept", "bytes", "peak_bytes", "uncompressed_bytes", "end_bytes",
    "end_uncompressed_bytes", "bits_per_value", "compressed",
)  # fmt: skip
"""Fields of an answer that are stored in its row."""


@dataclass(eq=False)
class _Running:
    """A cell that this process has claimed."""

    cell: Cell
    store: ResultSink
    rows: dict[str, Row]
    """Finished rows by sample id."""
    press: Any
    open: bool = True
    """False after a failure."""
    warned: bool = False
    """True after the warning that nothing is compressed."""
    seconds: float = 0.0
    """Time spent on answers."""


@dataclass(frozen=True)
class _Batch:
    """Contexts that are read together, each with its samples."""

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
    def prompts(self) -> list[tuple[int, Prompt]]:
        """Row of its context and prompt, for each sample."""
        return [(row, prompt) for row, group in enumerate(self.contexts) for _, prompt in group]


@dataclass(frozen=True)
class Job:
    """Work of one process on a configuration."""

    config: RunConfig
    engine: Engine
    run_id: str
    progress: JobProgress
    interrupt: Interrupt
    results: Callable[[str], ResultSink]
    """Returns the destination of results by cell id."""
    shown: Source | None
    """Source whose kept tokens are recorded, once per press."""
    savings: Savings = field(default_factory=Savings)
    prefixes: kvpress.PrefixStore | None = None
    """Compressed contexts of other runs."""
    free_bytes: int | None = None
    """Memory for the caches of this process; None: the free memory of the machine."""
    ranks: Ranks | None = None
    """Processes that share the model, which fail together."""

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
        missing = {name: sum(name not in cell_run.rows for cell_run in running) for name in ids}
        self.progress.skip((len(ids) * len(running) - sum(missing.values())) * weight)
        if any(missing.values()):
            place = running[0].cell.place
            self.progress.start(f"{place}: {len(running)} presses, {len(ids)} samples")
            for batch in self._batches(source, running):
                self._run_batch(running, batch)
                self.progress.advance(sum(missing[sample.id] for sample in batch.samples) * weight)
                if self.interrupt.requested:
                    return
        for cell_run in running:
            if cell_run.open:
                cell_run.store.finish(len(ids))
                scores = [cell_run.rows[name]["score"] for name in ids]
                self.progress.finished(cell_run.cell.label, scores, cell_run.seconds)

    def _batches(self, source: Source, running: Sequence[_Running]) -> list[_Batch]:
        """Return the samples grouped by context and batch; batches do not depend on rows that exist already."""
        aware, longest, tokenizer = self.config.question_aware, self.config.max_context_length, self.engine.tokenizer
        try:
            prompts = [
                (sample, make_prompt(tokenizer, sample, question_aware=aware, longest=longest))
                for sample in source.make(tokenizer)
            ]
            if not source.length:
                self._check_positions(prompts)
        except EvalError:
            raise
        except Exception as error:
            for cell_run in running:
                self._fail(cell_run, error)
            return []
        contexts = [list(group) for _, group in groupby(prompts, key=lambda pair: pair[1].first)]
        return [_Batch(part) for part in parts(contexts, self.config.batch_size)]

    def _check_positions(self, prompts: Sequence[tuple[Sample, Prompt]]) -> None:
        """Raise for samples longer than the positions of the model; configured lengths were checked before the run."""
        for sample, prompt in prompts:
            tokens = len(prompt.first) + len(prompt.second)
            check_positions(
                self.engine.model.config, tokens, "shorten it", f"sample {sample.id} has {tokens} tokens, which is"
            )

    def _run_batch(self, running: Sequence[_Running], batch: _Batch) -> None:
        """Run the missing samples of a batch: presses that share the reading in groups that fit in memory, others alone."""
        missing = [
            cell_run for cell_run in running if cell_run.open and any(s.id not in cell_run.rows for s in batch.samples)
        ]
        sharing = [cell_run for cell_run in missing if cell_run.press.recipe().shares_prefill]
        groups = memory.fitting(
            self.engine.model,
            sharing,
            lambda cell_run: cell_run.press,
            len(batch.ids),
            max(map(len, batch.ids)),
            running[0].cell.source.max_new_tokens + max(len(prompt.second) for _, prompt in batch.prompts),
            self.free_bytes,
        )
        for group in [*groups, *([cell_run] for cell_run in missing if cell_run not in sharing)]:
            if not self.interrupt.requested:
                self._read_and_answer(group, batch)

    def _read_and_answer(self, group: Sequence[_Running], batch: _Batch) -> None:
        """Read the contexts of a batch once for a group of presses; after a failure, retry with smaller groups."""
        failure = None
        try:
            with seeded(batch.samples[0].id):
                contexts = read_contexts(self.engine, [cell_run.press for cell_run in group], batch.ids, self.prefixes)
        except Exception as error:
            failure = _freed(error)
        if failure is not None:
            self._retry(group, batch, failure)
            return
        self.savings.add(contexts, len(batch.contexts), len(batch.samples))
        for cell_run in group:
            # `pop` frees each cache as soon as its questions are answered.
            if not self.interrupt.requested:
                self._answer(cell_run, contexts.pop(0), batch)

    def _answer(self, cell_run: _Running, context: Context, batch: _Batch) -> None:
        sample, prompt = batch.contexts[0][0]
        if self.shown is cell_run.cell.source and sample.id == self.shown.ids[0]:
            kept = describe_kept(context.cache, self.engine.tokenizer, prompt, sample, self.engine.shards)
            cell_run.store.record_kept(kept)
        self._warn_if_whole(cell_run, context)
        self.progress.cell(cell_run.cell.label)
        started = time.monotonic()
        limits = Limits(
            cell_run.cell.source.max_new_tokens, self.config.max_seconds_per_sample, batch.samples[0].query.stop
        )
        failure = None
        try:
            with seeded(batch.samples[0].id):
                answers = answer(self.engine, context, batch.prompts, limits)
        except Exception as error:
            failure = _freed(error)
        cell_run.seconds += time.monotonic() - started
        if failure is not None:
            del context
            self._retry([cell_run], batch, failure)
            return
        for sample, result, (_, prompt) in zip(batch.samples, answers, batch.prompts, strict=True):
            if sample.id in cell_run.rows:
                continue
            try:
                row = self._row(cell_run.cell, sample, prompt, result, context, len(batch.contexts))
            except Exception as error:
                self._fail(cell_run, error)
                return
            cell_run.store.append(row)
            cell_run.rows[sample.id] = row

    def _warn_if_whole(self, cell_run: _Running, context: Context) -> None:
        """Warn once per cell if its press did not compress a context."""
        if not cell_run.warned and not all(map(context.compressed, range(len(context.kept)))):
            cell_run.warned = True
            self.progress.problem(f"{cell_run.cell.label}: {left_whole_note(cell_run.press)}")

    def _retry(self, group: Sequence[_Running], batch: _Batch, error: Exception) -> None:
        """Retry with half of the presses, or half of the contexts if memory ran out, until the failing press is alone."""
        memory.release()
        if self.ranks is not None:
            self.ranks.match_failure()
        if len(group) > 1:
            for half in parts(group, (len(group) + 1) // 2):
                self._read_and_answer(half, batch)
        elif isinstance(error, torch.OutOfMemoryError) and len(batch.contexts) > 1:
            for part in parts(batch.contexts, (len(batch.contexts) + 1) // 2):
                if group[0].open:
                    self._read_and_answer(group, _Batch(part))
        else:
            self._fail(group[0], error)

    def _fail(self, cell_run: _Running, error: Exception) -> None:
        cell_run.open = False
        message = f"{type(error).__name__}: {error}"
        details = "".join(traceback.format_exception(error))
        cell_run.store.fail(_status(error), message, details, memory.peak_bytes(self.engine.model.device))
        self.progress.problem(f"{cell_run.cell.label}: {message}")

    def _row(
        self, cell: Cell, sample: Sample, prompt: Prompt, answer: Answer, context: Context, batch_size: int
    ) -> Row:
        timed_out = answer.text is None
        return {
            "cell": cell.id,
            "sample": sample.id,
            "prompt_sha256": _hash_ids(prompt),
            # Answers about one document are not independent.
            "document": (sample.document or hash_json(sample.context))[:16],
            "status": "timeout" if timed_out else "ok",
            "prediction": answer.text,
            "expected": list(sample.query.answers),
            "score": None if timed_out else score(sample.query, answer.text),
            "batch_size": batch_size,
            "cut_tokens": prompt.num_cut,
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
    """Clear the frames of an error, which hold tensors; its traceback can still be formatted."""
    traceback.clear_frames(error.__traceback__)
    return error


def _status(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    return "nan" if isinstance(error, FloatingPointError) else "error"


def _hash_ids(prompt: Prompt) -> str:
    return hashlib.sha256(repr((prompt.first, prompt.second)).encode()).hexdigest()[:16]
