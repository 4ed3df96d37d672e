"""The work of a run: all presses of one task and length, context by context."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import torch

import kvpress
from kvpress_eval import memory
from kvpress_eval.cells import Cell, Source, hash_json
from kvpress_eval.config import RunConfig
from kvpress_eval.environment import now
from kvpress_eval.errors import EvalError
from kvpress_eval.generation import Answer, Context, Limits, answer, parts, read_contexts
from kvpress_eval.highlight import describe_kept
from kvpress_eval.interrupt import Interrupt
from kvpress_eval.models import Engine
from kvpress_eval.output import cell_store
from kvpress_eval.progress import RunProgress
from kvpress_eval.prompts import Prompt, make_prompt
from kvpress_eval.store import CellStore, Row
from kvpress_eval.tasks import Sample, score


@dataclass
class Savings:
    """What reading contexts once for several presses and questions came to."""

    contexts: int = 0
    answers: int = 0
    seconds: float = 0.0
    saved_seconds: float = 0.0

    def add(self, contexts: Sequence[Context], rows: int, questions: int) -> None:
        """Count contexts that were read together, `rows` of them under each press, and asked `questions` in all."""
        reading = contexts[0].reading_seconds * rows
        own = [context.seconds * rows - reading for context in contexts]
        self.contexts += rows
        self.answers += questions * len(contexts)
        self.seconds += reading + sum(own)
        self.saved_seconds += reading * (questions / rows * len(contexts) - 1) + sum(own) * (questions / rows - 1)

    def __bool__(self) -> bool:
        return self.answers > self.contexts

    def __str__(self) -> str:
        return (
            f"{self.contexts} contexts read for {self.answers} answers, in {self.seconds:.1f} s; "
            f"reading one for each answer would have taken {self.saved_seconds:.1f} s more"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)


@dataclass(eq=False)
class _Running:
    """A cell that this process has claimed; `open` until it failed, `seconds` spent on its answers."""

    cell: Cell
    store: CellStore
    rows: dict[str, Row]
    press: Any
    open: bool = True
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
    """One process at work on a configuration. `shown` is where the tokens that were kept are recorded, per press once."""

    config: RunConfig
    engine: Engine
    run_id: str
    progress: RunProgress
    interrupt: Interrupt
    shown: Source
    savings: Savings = field(default_factory=Savings)

    def run_source(self, source: Source, cells: Sequence[Cell]) -> list[Cell]:
        """Run cells of one task and length; return those that another process has claimed."""
        busy = []
        with ExitStack() as claims:
            running = []
            for cell in cells:
                store = cell_store(self.config.out, cell)
                if claims.enter_context(store.claim()):
                    rows = store.open(cell, source.sample_ids(self.config))
                    running.append(_Running(cell, store, rows, kvpress.get_press(cell.press)))
                else:
                    busy.append(cell)
            if running:
                self._run_cells(source, running)
        return busy

    def _run_cells(self, source: Source, running: Sequence[_Running]) -> None:
        ids, weight = source.sample_ids(self.config), running[0].cell.weight
        if any(name not in one.rows for one in running for name in ids):
            place = running[0].cell.place
            self.progress.start(f"{place}: {len(running)} presses, {len(ids)} samples")
            for batch in self._batches(source, running):
                self._run_batch(running, batch)
                self.progress.advance(len(batch.samples) * weight * len(running))
                if self.interrupt.requested:
                    return
        else:
            self.progress.advance(len(ids) * weight * len(running))
        for one in running:
            if one.open:
                one.store.finish(len(ids))
                scores = [one.rows[name]["score"] for name in ids]
                self.progress.finished(one.cell.label, scores, one.seconds)

    def _batches(self, source: Source, running: Sequence[_Running]) -> list[_Batch]:
        """Return the samples, those about the same context together; a batch is formed the same way in every run."""
        aware, tokenizer = self.config.question_aware, self.engine.tokenizer
        try:
            samples = source.samples(self.config, tokenizer)
            asked = [(sample, make_prompt(tokenizer, sample, question_aware=aware)) for sample in samples]
        except EvalError:
            raise
        except Exception as error:
            for one in running:
                self._fail(one, error)
            return []
        contexts = [list(group) for _, group in groupby(asked, key=lambda pair: pair[1].first)]
        return [_Batch(part) for part in parts(contexts, self.config.batch_size)]

    def _run_batch(self, running: Sequence[_Running], batch: _Batch) -> None:
        """Run what is missing of a batch: presses that share the reading together as they fit in memory, every other alone."""
        missing = [one for one in running if one.open and any(s.id not in one.rows for s in batch.samples)]
        sharing = [one for one in missing if one.press.shares_prefill]
        groups = memory.fitting(
            self.engine.model, sharing, lambda one: one.press, len(batch.ids), max(map(len, batch.ids))
        )
        for group in [*groups, *([one] for one in missing if one not in sharing)]:
            if not self.interrupt.requested:
                self._read_and_answer(group, batch)

    def _read_and_answer(self, group: Sequence[_Running], batch: _Batch) -> None:
        """Read the contexts of a batch once for a group of presses; where that fails, for half of them at a time."""
        failure = None
        try:
            with self._seeded(batch):
                contexts = read_contexts(self.engine, [one.press for one in group], batch.ids)
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
        if one.cell.source is self.shown and sample.id == self.shown.sample_ids(self.config)[0]:
            one.store.record_kept(describe_kept(context.cache, self.engine.tokenizer, prompt, sample))
        self.progress.cell(one.cell.label)
        started = time.monotonic()
        limits = Limits(
            one.cell.source.max_new_tokens(self.config),
            self.config.max_seconds_per_sample,
            batch.samples[0].query.stop,
        )
        failure = None
        try:
            with self._seeded(batch):
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

    def _retry(self, group: Sequence[_Running], batch: _Batch, error: Exception) -> None:
        """Find out whose failure it was: half of the presses each time; without memory, also half of the contexts."""
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

    @contextmanager
    def _seeded(self, batch: _Batch) -> Iterator[None]:
        """Make a press that draws at random draw the same in a run that was stopped and continued."""
        with torch.random.fork_rng():
            torch.manual_seed(int(hash_json(batch.samples[0].id)[:8], 16))
            yield

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
            "context_tokens": answer.context_tokens,
            "new_tokens": answer.new_tokens,
            "kept": answer.kept,
            "bytes": answer.bytes,
            "uncompressed_bytes": answer.uncompressed_bytes,
            "end_bytes": answer.end_bytes,
            "end_uncompressed_bytes": answer.end_uncompressed_bytes,
            "bits_per_value": answer.bits_per_value,
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
