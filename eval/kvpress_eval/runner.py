"""Runs the cells of a configuration, one sample after the other, and never loses a finished one."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from rich.console import Console

import kvpress
from kvpress_eval.cells import Cell, Source, expand_tasks, hash_json, make_cells
from kvpress_eval.config import RunConfig
from kvpress_eval.environment import describe_run, now
from kvpress_eval.errors import EvalError
from kvpress_eval.generation import Answer, Limits, answer_batch
from kvpress_eval.highlight import describe_kept
from kvpress_eval.interrupt import Interrupt
from kvpress_eval.models import Engine, load_engine
from kvpress_eval.output import cell_store, claim, log_run
from kvpress_eval.progress import RunProgress
from kvpress_eval.prompts import make_prompt
from kvpress_eval.results import CellResult, read_result
from kvpress_eval.store import CellStore, Row
from kvpress_eval.tasks import Sample, score

FAILED, INTERRUPTED = 1, 130


@dataclass(frozen=True)
class RunResult:
    """The cells of a run and the record of the invocation that completed them."""

    cells: Sequence[CellResult]
    record: dict[str, Any]
    interrupted: bool

    @property
    def exit_code(self) -> int:
        """0 if every cell has its result."""
        if self.interrupted:
            return INTERRUPTED
        return 0 if all(cell.complete for cell in self.cells) else FAILED


def run(config: RunConfig, console: Console) -> RunResult:
    """Run what is missing of a configuration; return all of its results."""
    sources = expand_tasks(config)
    with claim(config.out):
        if config.threads:
            torch.set_num_threads(config.threads)
        engine = load_engine(config)
        record = describe_run(config, engine)
        log_run(config.out, record)
        cells = make_cells(config, sources, engine.fingerprint, engine.device, engine.dtype)
        results: list[CellResult] = []
        total = len(cells) * config.samples
        with Interrupt() as interrupt, RunProgress(console, total) as progress:
            job = _Job(config, engine, record["run"], progress, interrupt, shown=sources[0])
            for source in sources:
                results += job.run_source(source, [cell for cell in cells if cell.source is source])
        return RunResult(results, record, interrupt.requested)


@dataclass(frozen=True)
class _Job:
    config: RunConfig
    engine: Engine
    run_id: str
    progress: RunProgress
    interrupt: Interrupt
    shown: Source
    """Where the tokens that were kept are recorded, for the first sample of each press."""

    def run_source(self, source: Source, cells: Sequence[Cell]) -> list[CellResult]:
        """Run every press on one task and length: the samples are made once, and timings stay comparable."""
        make_samples = cache(lambda: source.samples(self.config, self.engine.tokenizer))
        results = []
        for cell in cells:
            store = cell_store(self.config.out, cell)
            if not self.interrupt.requested:
                self.progress.cell(cell.label)
                self._run_guarded(cell, store, make_samples)
            results.append(read_result(cell, store, source.sample_ids(self.config)))
        return results

    def _run_guarded(self, cell: Cell, store: CellStore, make_samples: Callable[[], list[Sample]]) -> None:
        try:
            self._run_cell(cell, store, make_samples)
        except EvalError:
            raise
        except torch.OutOfMemoryError as error:
            self._fail(cell, store, "oom", error)
        except FloatingPointError as error:
            self._fail(cell, store, "nan", error)
        except Exception as error:
            self._fail(cell, store, "error", error)

    def _fail(self, cell: Cell, store: CellStore, status: str, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"
        store.fail(status, message, traceback.format_exc())
        self.progress.problem(f"{cell.label}: {message}")

    def _run_cell(self, cell: Cell, store: CellStore, make_samples: Callable[[], list[Sample]]) -> None:
        rows, samples = store.open(cell), make_samples()
        press = kvpress.get_press(cell.press)
        size = self.config.batch_size
        for start in range(0, len(samples), size):
            # A batch is formed the same way in every run: which samples share one can change the last bits.
            batch = samples[start : start + size]
            if any(sample.id not in rows for sample in batch):
                for row in self._run_batch(cell, store, press, batch, first=start == 0):
                    if row["sample"] not in rows:
                        store.append(row)
            self.progress.advance(len(batch))
            if self.interrupt.requested:
                return
        store.finish(len(samples))

    def _run_batch(
        self, cell: Cell, store: CellStore, press: Any, batch: Sequence[Sample], *, first: bool
    ) -> list[Row]:
        config, tokenizer = self.config, self.engine.tokenizer
        prompts = [make_prompt(tokenizer, sample, question_aware=config.question_aware) for sample in batch]
        limits = Limits(cell.source.max_new_tokens(config), config.max_seconds_per_sample)
        with torch.random.fork_rng():
            # A press that draws at random must draw the same in a run that was stopped and continued.
            torch.manual_seed(int(hash_json(batch[0].id)[:8], 16))
            answers, compressed = answer_batch(self.engine, press, prompts, limits)
        if first and cell.source is self.shown:
            store.record_kept(describe_kept(compressed, tokenizer, prompts[0], batch[0]))
        return [self._row(cell, sample, answer) for sample, answer in zip(batch, answers, strict=True)]

    def _row(self, cell: Cell, sample: Sample, answer: Answer) -> Row:
        timed_out = answer.text is None
        return {
            "cell": cell.id,
            "sample": sample.id,
            "status": "timeout" if timed_out else "ok",
            "prediction": answer.text,
            "expected": list(sample.query.answers),
            "score": None if timed_out else score(sample.query, answer.text),
            "context_tokens": answer.context_tokens,
            "new_tokens": answer.new_tokens,
            "kept": answer.kept,
            "bytes": answer.bytes,
            "uncompressed_bytes": answer.uncompressed_bytes,
            "bits_per_value": answer.bits_per_value,
            "measured": {
                "run": self.run_id,
                "date": now(),
                "prefill_seconds": answer.prefill_seconds,
                "seconds_per_token": answer.seconds_per_token,
            },
        }
