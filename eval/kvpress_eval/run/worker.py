# SPDX-License-Identifier: Apache-2.0
"""The part of a run that happens on another machine: a job whose results are sent to the process that asked for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import kvpress
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import Results, Row
from kvpress_eval.run.cells import Cell
from kvpress_eval.run.environment import describe_run
from kvpress_eval.run.interrupt import Interrupt
from kvpress_eval.run.job import Job
from kvpress_eval.run.models import Engine, load_engine
from kvpress_eval.run.savings import Savings
from kvpress_eval.tasks.source import Source


@dataclass(frozen=True)
class Call:
    """A method that the asking process calls: of the folder of a cell or, without one, of its progress."""

    method: str
    arguments: tuple[Any, ...]
    cell: str | None = None


@dataclass(frozen=True)
class Part:
    """Cells of one source that go through its contexts together, and the rows that each has already.

    `shown` says whether the tokens that were kept are recorded.
    """

    source: Source
    cells: Sequence[Cell]
    rows: Mapping[str, dict[str, Row]]
    shown: bool


@dataclass(frozen=True)
class Introduction:
    """What a worker runs: the record of its invocation, and what names its cells."""

    record: dict[str, Any]
    fingerprint: str
    device: str
    dtype: str

    @property
    def names(self) -> tuple[str, str, str]:
        """What all workers of a run must have in common."""
        return self.fingerprint, self.device, self.dtype


Send = Callable[[Any], None]


@dataclass(frozen=True)
class SentResults:
    """The results of a cell whose folder is elsewhere: what was there is given, what is new is sent."""

    cell: str
    rows: Mapping[str, Row]
    send: Send

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """The asking process holds the claim."""
        yield True

    def open(self, cell: Mapping[str, Any], asked: Sequence[str]) -> dict[str, Row]:
        """Return the rows that were there when this part of the run was sent."""
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
    """The progress of a run that is shown elsewhere."""

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

    `presses` are those of the run: taking them out of the message imports the modules that define a user's own ones.
    `free_bytes` is what the caches may take beside the weights, None on a GPU, which a worker has for itself.
    """

    def __init__(self, config: RunConfig, presses: Sequence[Any], free_bytes: int | None) -> None:
        self._config, self._free_bytes = config, free_bytes
        self._interrupt = Interrupt()
        self._engine: Engine | None = None
        self._record: dict[str, Any] = {}

    def introduce(self) -> Introduction:
        """Load the model, and say what it is.

        Raises:
            DataError: there is no such model on this machine.
        """
        engine = self._engine = load_engine(self._config)
        self._record = describe_run(self._config, engine)
        return Introduction(self._record, engine.fingerprint, engine.device, engine.dtype)

    def run(self, part: Part) -> Iterator[Call | Savings]:
        """Yield every result as soon as it is there, at the end what sharing saved; raise what ends a run."""
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
        """Let the sample in flight be the last one."""
        self._interrupt.requested = True

    def _work(self, part: Part, send: Send) -> None:
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
            )
            job.run_source(part.source, part.cells)
            send(job.savings)
        except BaseException as error:
            send(error)


def _results(part: Part, send: Send, cell: str) -> Results:
    return SentResults(cell, part.rows[cell], send)
