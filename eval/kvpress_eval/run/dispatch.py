# SPDX-License-Identifier: Apache-2.0
"""Run the cells of a configuration on the machines of a Ray cluster.

Every worker loads the model once and sends each finished sample to this process. Only this process writes the output folder,
so that the machines need no shared storage. If a worker is lost, another one runs the missing samples of its cells.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

import kvpress
from kvpress_eval.common.errors import ClusterError, ConfigError, EvalError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import CellStore, log_run, store_of
from kvpress_eval.run.cells import Cell, make_cells
from kvpress_eval.run.cluster import Need, connected, free_bytes, has_gpus, need_of, places
from kvpress_eval.run.generation import parts
from kvpress_eval.run.interrupt import Interrupt
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.run.savings import Savings
from kvpress_eval.run.worker import Call, Introduction, JobPart, Worker
from kvpress_eval.tasks.source import Source

_TICK = 0.5
"""Seconds between checks for an interrupt."""
_PATIENCE = 30
"""Seconds without any worker until the reason for waiting is printed."""
MOST_LOSSES = 3
"""Lost workers after which cells count as failed, because the cells may be the cause."""
_PARTS_PER_WORKER = 2


@dataclass
class Work:
    """Outcome of a run."""

    cells: Sequence[Cell] = ()
    record: dict[str, Any] = field(default_factory=dict)
    """Record of the first worker."""
    interrupted: bool = False
    savings: Savings = field(default_factory=Savings)
    busy: list[Cell] = field(default_factory=list)
    """Cells that other processes have claimed."""


@dataclass(eq=False)
class _Task:
    """Cells of one source that a worker runs together."""

    source: Source
    cells: Sequence[Cell]
    losses: int = 0
    """Number of workers lost while they ran the task."""
    counted: int = 0
    """Work counted as finished by the current worker."""
    skipped: int = 0
    """Work counted as skipped by the current worker."""
    claims: ExitStack = field(default_factory=ExitStack)
    """Claims on the cells while the task runs."""
    stores: dict[str, CellStore] = field(default_factory=dict)
    """Stores of the claimed cells by cell id."""

    @property
    def work(self) -> int:
        """Relative work of the task."""
        return sum(cell.weight for cell in self.cells) * len(self.source.ids)


@dataclass(eq=False)
class _WorkerHandle:
    """A worker on the cluster."""

    actor: Any
    pending: Any
    """Pending result of the actor; None if the worker is idle."""
    introduction: Introduction | None = None
    """None until the worker has loaded the model."""
    task: _Task | None = None
    """Task that it runs."""
    started: float = 0.0
    """Start of the task, in monotonic seconds."""
    busy_seconds: float = 0.0
    """Total time of its finished tasks."""
    savings: Savings = field(default_factory=Savings)


def run_on_cluster(config: RunConfig, sources: Sequence[Source], settings: Any, console: Console) -> Work:
    """Run the missing samples of some tasks on a cluster.

    Raises:
        ClusterError: no cluster answers, no machine of it has room for a worker, or all workers were lost.
    """
    with connected(config.ray_address) as ray:
        gpu = config.device != "cpu" and has_gpus(ray)
        if config.device == "cuda" and not gpu:
            raise ClusterError("no machine of the cluster has a GPU: give device auto or cpu, or add one")
        need = need_of(config, sources, settings, gpu=gpu)
        config = config.model_copy(update={"threads": need.cpus // need.ranks, "device": "cuda" if gpu else "cpu"})
        total = sum(max(1, source.length) * len(source.ids) for source in sources) * len(config.presses)
        with (
            Interrupt() as interrupt,
            RunProgress(console, total) as progress,
            _WorkerPool(ray, config, sources, need, progress, interrupt) as pool,
        ):
            return pool.run()


class _WorkerPool:
    """Workers of a run, with their tasks."""

    def __init__(
        self,
        ray: Any,
        config: RunConfig,
        sources: Sequence[Source],
        need: Need,
        progress: RunProgress,
        interrupt: Interrupt,
    ) -> None:
        self.ray, self.config, self.sources, self.need = ray, config, sources, need
        self.progress, self.interrupt = progress, interrupt
        self.work = Work()
        self.todo: deque[_Task] = deque()
        self.handles: list[_WorkerHandle] = []
        self.lost: list[_WorkerHandle] = []
        self.max_workers = len(sources) * len(config.presses)
        self.failed_starts = 0
        self.started = time.monotonic()

    def __enter__(self) -> _WorkerPool:
        room = places(self.ray, self.need, self.max_workers)
        self.num_workers, self.memory = room.workers, room.memory
        self.progress.note(
            f"{room.workers} worker{'s' if room.workers > 1 else ''} on {room.nodes} "
            f"machine{'s' if room.nodes > 1 else ''}: each asks for {self.need}"
        )
        for _ in range(room.workers):
            self._request_worker()
        return self

    def __exit__(self, *problem: object) -> None:
        for handle in self.handles:
            if handle.task:
                handle.task.claims.close()
            self.ray.kill(handle.actor)

    def run(self) -> Work:
        """Assign tasks and store the results until all tasks are finished."""
        is_announced = False
        while not self._is_done():
            pending = {handle.pending: handle for handle in self.handles if handle.pending is not None}
            if not pending and not any(handle.introduction for handle in self.handles):
                self._request_replacements()
                continue
            ready, _ = self.ray.wait(list(pending), num_returns=1, timeout=_TICK) if pending else ([], [])
            for reference in ready:
                self._receive(pending[reference])
            if self.interrupt.requested:
                self._stop_workers()
            else:
                self._assign_tasks()
            if not is_announced and not any(h.introduction for h in self.handles) and self._seconds > _PATIENCE:
                is_announced = True
                self.progress.note("waiting for the first worker: the cluster is busy, or the model takes long to load")
        self._log_end()
        return self.work

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.started

    def _is_done(self) -> bool:
        if any(handle.task for handle in self.handles):
            return False
        return self.interrupt.requested or (bool(self.work.cells) and not self.todo)

    def _request_worker(self) -> None:
        """Request a worker; the cluster starts it as soon as there is room."""
        options = {"num_cpus": self.need.cpus, "num_gpus": self.need.gpus, "memory": self.memory}
        presses = [kvpress.get_press(spec) for spec in self.config.presses]
        # Two concurrent calls: `run`, and `stop`.
        actor = self.ray.remote(Worker).options(max_concurrency=2, **options)
        actor = actor.remote(self.config, presses, free_bytes(self.need, self.memory))
        self.handles.append(_WorkerHandle(actor, actor.introduce.remote()))

    def _receive(self, handle: _WorkerHandle) -> None:
        """Process the pending result of a worker, or the loss of the worker."""
        errors = self.ray.exceptions
        try:
            if handle.introduction is None:
                self._register(handle, self.ray.get(handle.pending))
            else:
                self._apply(handle, self.ray.get(next(handle.pending)))
        except StopIteration:
            self._release(handle)
        except errors.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, EvalError) else error) from error
        except errors.RayError as error:
            self._handle_loss(handle, error)

    def _register(self, handle: _WorkerHandle, introduction: Introduction) -> None:
        """Record the introduction of a worker; the first one makes the cells."""
        handle.introduction, handle.pending = introduction, None
        log_run(self.config.out, introduction.record)
        if not self.work.cells:
            self.work.record, self.names = introduction.record, introduction.names
            self.work.cells = make_cells(self.config, self.sources, *introduction.names)
            self._make_tasks()
            self.started = time.monotonic()
        elif introduction.names != self.names:
            raise ConfigError(
                f"the machines of the cluster differ: weights, device and dtype are {self.names} on one and "
                f"{introduction.names} on another; give each of them the same model"
            )

    def _make_tasks(self) -> None:
        """Make tasks of cells of one source, so that they share the reading of contexts; enough tasks for all workers."""
        tasks_per_source = -(-_PARTS_PER_WORKER * self.num_workers // len(self.sources))
        for source in self.sources:
            cells = [cell for cell in self.work.cells if cell.source is source]
            self.todo.extend(
                _Task(source, part) for part in parts(cells, -(-len(cells) // min(tasks_per_source, len(cells))))
            )
        # Longest first, so that all workers finish at about the same time.
        self.todo = deque(sorted(self.todo, key=lambda task: -task.work))

    def _assign_tasks(self) -> None:
        for handle in self.handles:
            while self.todo and handle.introduction and handle.task is None:
                self._start_task(handle, self.todo.popleft())

    def _start_task(self, handle: _WorkerHandle, task: _Task) -> None:
        """Claim the free cells of a task, and run them on a worker."""
        cells = []
        for cell in task.cells:
            store = store_of(self.config.out, cell.id)
            if cell.id in task.stores or task.claims.enter_context(store.claim()):
                task.stores[cell.id] = store
                cells.append(cell)
            else:
                self.work.busy.append(cell)
        task.cells = cells
        if not cells:
            task.claims.close()
            return
        rows = {cell.id: task.stores[cell.id].open(cell.spec, task.source.ids) for cell in cells}
        part = JobPart(task.source, cells, rows, shown=task.source is self.sources[0])
        handle.task, handle.started = task, time.monotonic()
        handle.pending = handle.actor.run.options(num_returns="streaming").remote(part)

    def _apply(self, handle: _WorkerHandle, message: Call | Savings) -> None:
        """Apply a call or the savings that a worker has sent."""
        task = handle.task
        if task is None:
            raise RuntimeError("a worker without a task has sent a result")
        if isinstance(message, Savings):
            handle.savings += message
            return
        if message.method == "advance":
            task.counted += message.arguments[0]
        elif message.method == "skip":
            task.skipped += message.arguments[0]
        target = self.progress if message.cell is None else task.stores[message.cell]
        getattr(target, message.method)(*message.arguments)

    def _release(self, handle: _WorkerHandle) -> None:
        if handle.task:
            handle.task.claims.close()
            handle.busy_seconds += time.monotonic() - handle.started
        handle.task = handle.pending = None

    def _handle_loss(self, handle: _WorkerHandle, error: Exception) -> None:
        """Requeue the task of a lost worker, or fail its cells after `MOST_LOSSES` losses."""
        self.ray.kill(handle.actor)  # an unreachable worker may still run
        self.handles.remove(handle)
        self.lost.append(handle)
        task, handle.task = handle.task, None
        reason = str(error).strip().partition("\n")[0]
        if task is None:
            self.progress.problem(f"a worker was lost before it had loaded the model: {reason}")
            self.failed_starts += 1
        else:
            handle.busy_seconds += time.monotonic() - handle.started
            self.progress.advance(-task.counted)
            self.progress.skip(-task.skipped)
            task.counted, task.skipped, task.losses = 0, 0, task.losses + 1
            if task.losses < MOST_LOSSES:
                where = f"{task.cells[0].place}, {len(task.cells)} presses"
                self.progress.problem(f"a worker was lost; {where}: run again elsewhere")
                self.todo.appendleft(task)
            else:
                self._fail_task(task, reason)
        if not self.interrupt.requested:
            self._request_replacements()

    def _fail_task(self, task: _Task, reason: str) -> None:
        for cell in task.cells:
            store = task.stores[cell.id]
            if len(store.open(cell.spec, task.source.ids)) < len(task.source.ids):
                message = f"{task.losses} workers were lost while they ran it"
                store.fail("lost", message, reason, 0)
                self.progress.problem(f"{cell.label}: {message}")
        task.claims.close()

    def _request_replacements(self) -> None:
        """Request workers where there is room, up to the initial number."""
        try:
            room = places(self.ray, self.need, self.max_workers).workers if self.failed_starts < MOST_LOSSES else 0
        except ClusterError:
            room = 0
        for _ in range(min(room, self.num_workers) - len(self.handles)):
            self._request_worker()
        if not self.handles:
            raise ClusterError("all workers were lost: what is finished is kept, and the same command continues there")

    def _stop_workers(self) -> None:
        """Drop all waiting tasks, and stop workers after their sample in flight."""
        while self.todo:
            self.todo.pop().claims.close()
        for handle in self.handles:
            if handle.task:
                handle.actor.stop.remote()

    def _log_end(self) -> None:
        """Log the records of the workers, and print the speed of the run."""
        handles = [handle for handle in (*self.lost, *self.handles) if handle.introduction]
        for handle in handles:
            self.work.savings += handle.savings
            if handle.introduction:
                log_run(self.config.out, {**handle.introduction.record, "prefills": handle.savings.as_dict()})
        self.work.interrupted = self.interrupt.requested
        self.work.record = {**self.work.record, "prefills": self.work.savings.as_dict()}
        seconds = max(self._seconds, 1e-9)
        busy = sum(handle.busy_seconds for handle in handles)
        done = len(self.work.cells) - len(self.work.busy)
        self.progress.note(str(self.work.savings) if self.work.savings else "")
        self.progress.note(
            f"{done} cells in {seconds:.1f} s, {60 * done / seconds:.1f} a minute; "
            f"{len(handles)} worker{'s' if len(handles) > 1 else ''} did {busy / seconds:.2f} times the work of one"
        )
