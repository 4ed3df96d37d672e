# SPDX-License-Identifier: Apache-2.0
"""Worker on another machine: runs jobs and sends their results to the driver, the process that writes the output folder.

A worker of several ranks (tensor parallel) starts a process for each rank after its own. They run the same jobs, and their
results are dropped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import kvpress
from kvpress_eval.common.errors import EvalError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import ResultSink, Row
from kvpress_eval.run.cells import Cell
from kvpress_eval.run.environment import describe_run
from kvpress_eval.run.interrupt import Interrupt
from kvpress_eval.run.job import Job
from kvpress_eval.run.models import Engine, load_engine
from kvpress_eval.run.ranks import Followers, Ranks, SharedInterrupt, end_with_parent
from kvpress_eval.run.savings import Savings
from kvpress_eval.tasks.source import Source


@dataclass(frozen=True)
class Call:
    """A method call for the driver: on the store of a cell or, without a cell, on the progress."""

    method: str
    arguments: tuple[Any, ...]
    cell: str | None = None


@dataclass(frozen=True)
class JobPart:
    """Cells of one source that are run together."""

    source: Source
    cells: Sequence[Cell]
    rows: Mapping[str, dict[str, Row]]
    """Existing rows by cell id and sample id."""
    shown: bool
    """Whether kept tokens are recorded."""


@dataclass(frozen=True)
class Introduction:
    """Record of a worker, with the model, device and dtype that are part of the cells' specs."""

    record: dict[str, Any]
    fingerprint: str
    device: str
    dtype: str

    @property
    def names(self) -> tuple[str, str, str]:
        """Values that must be equal in all workers of a run."""
        return self.fingerprint, self.device, self.dtype


Send = Callable[[Any], None]


@dataclass(frozen=True)
class SentResults:
    """Results of a cell whose folder is on the driver: existing rows are included, new ones are sent."""

    cell: str
    rows: Mapping[str, Row]
    send: Send

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Yield True: the driver has claimed the cell."""
        yield True

    def open(self, cell: Mapping[str, Any], ids: Sequence[str]) -> dict[str, Row]:
        """Return the rows that existed when the cell was sent to the worker."""
        return dict(self.rows)

    def append(self, row: Row) -> None:
        self._call("append", row)

    def finish(self, samples: int) -> None:
        self._call("finish", samples)

    def fail(self, status: str, message: str, details: str, peak_bytes: int) -> None:
        self._call("fail", status, message, details, peak_bytes)

    def record_kept(self, kept: Mapping[str, Any]) -> None:
        self._call("record_kept", dict(kept))

    def _call(self, method: str, *arguments: Any) -> None:
        self.send(Call(method, arguments, self.cell))


@dataclass(frozen=True)
class SentProgress:
    """Progress of a run that the driver shows."""

    send: Send

    def start(self, label: str) -> None:
        self.send(Call("start", (label,)))

    def cell(self, label: str) -> None:
        self.send(Call("cell", (label,)))

    def advance(self, work: int) -> None:
        self.send(Call("advance", (work,)))

    def skip(self, work: int) -> None:
        self.send(Call("skip", (work,)))

    def finished(self, label: str, scores: Sequence[float | None], seconds: float) -> None:
        self.send(Call("finished", (label, list(scores), seconds)))

    def problem(self, text: str) -> None:
        self.send(Call("problem", (text,)))


class Worker:
    """Loads the model once and runs parts of a run, one after another.

    `presses` are the presses of the run: unpickling them imports the modules of user-defined presses. `free_bytes` is the
    memory for caches, without the weights; None on a GPU, which no other worker uses.
    """

    def __init__(self, config: RunConfig, presses: Sequence[Any], free_bytes: int | None) -> None:
        self._config, self._free_bytes = config, free_bytes
        self._presses = presses
        self._interrupt = Interrupt()
        self._engine: Engine | None = None
        self._record: dict[str, Any] = {}
        self._ranks: Ranks | None = None
        self._followers: Followers | None = None

    def join(self, ranks: Ranks) -> None:
        """Run as one of several ranks."""
        self._ranks, self._interrupt = ranks, SharedInterrupt(ranks)

    def introduce(self) -> Introduction:
        """Load the model, with the other ranks if there are any; return its introduction.

        Raises:
            DataError: the model does not exist on this machine.
        """
        if self._config.tp > 1 and self._ranks is None:
            arguments = (self._config, self._presses, self._free_bytes)
            self._followers = Followers(self._config.tp, follow, arguments)
            self.join(self._followers.ranks)
        engine = self._engine = load_engine(self._config)
        self._record = describe_run(self._config, engine)
        return Introduction(self._record, engine.fingerprint, engine.device, engine.dtype)

    def run(self, part: JobPart) -> Iterator[Call | Savings]:
        """Yield each result at once, and the savings at the end; raise any error of the job."""
        if self._followers is not None:
            self._followers.send(part)
        sent: queue.SimpleQueue[Call | Savings | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(part, sent.put), daemon=True).start()
        while True:
            message = sent.get()
            if isinstance(message, BaseException):
                raise message
            yield message
            if isinstance(message, Savings):
                return

    def stop(self) -> None:
        """Stop after the sample in flight."""
        self._interrupt.requested = True

    def _work(self, part: JobPart, send: Send) -> None:
        try:
            if self._engine is None:
                raise RuntimeError("a worker introduces itself before it runs anything")
            store = self._config.prefix_store
            job = Job(
                self._config,
                self._engine,
                self._record["run"],
                SentProgress(send),
                self._interrupt,
                results=partial(_results, part, send),
                shown=part.source if part.shown else None,
                prefixes=None if store is None else kvpress.PrefixStore(store),
                free_bytes=self._free_bytes,
                ranks=self._ranks,
            )
            job.run_source(part.source, part.cells)
            send(job.savings)
        except BaseException as error:
            send(error)


def follow(
    rank: int,
    count: int,
    folder: str,
    parts: Connection,
    config: RunConfig,
    presses: Sequence[Any],
    free_bytes: int | None,
) -> None:
    """Run the parts that rank 0 receives as another rank, until rank 0 ends."""
    end_with_parent()
    worker = Worker(config, presses, free_bytes)
    worker.join(Ranks(rank, count, folder))
    with suppress(EvalError):  # rank 0 reports the error
        worker.introduce()
    with suppress(EOFError):
        while True:
            for _ in worker.run(parts.recv()):
                pass


def _results(part: JobPart, send: Send, cell: str) -> ResultSink:
    return SentResults(cell, part.rows[cell], send)
