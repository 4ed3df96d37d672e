# SPDX-License-Identifier: Apache-2.0
"""Search on a Ray cluster: each worker loads the model and examines presses, a few contexts at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvpress.core.registry import entries
from kvpress_eval.common.errors import ClusterError, ConfigError, EvalError
from kvpress_eval.config.schema import RAY, RunConfig
from kvpress_eval.results.store import Row
from kvpress_eval.run.cluster import connected, need_of, places
from kvpress_eval.run.models import Engine, load_engine
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.tasks.source import Source
from kvpress_eval.tuning.items import Split
from kvpress_eval.tuning.scoring import Contexts, Examiner
from kvpress_eval.tuning.search import Examined

_RETRIES = 3
"""Retries of work whose worker was lost."""


class RemoteExaminer:
    """Examiner on another machine.

    `presses` are all registered classes: unpickling them imports the modules of user-defined presses.
    """

    def __init__(self, config: RunConfig, presses: Sequence[type]) -> None:
        self._engine = load_engine(config)
        self._examiner = Examiner(self._engine, None, config.max_seconds_per_sample)

    def names(self) -> tuple[str, str, str]:
        """Return the identifier of the weights, the device and the dtype, which must be equal in all examiners."""
        return self._engine.fingerprint, self._engine.device, self._engine.dtype

    def examine(self, presses: Sequence[str], contexts: Contexts, full_cache_rows: Sequence[Row]) -> list[Row]:
        """Score presses, and return the rows; `full_cache_rows` are existing rows of the full cache."""
        self._examiner.remember(full_cache_rows)
        self._examiner.examine(presses, contexts)
        return self._examiner.stored_rows(presses, contexts)


class WorkerPool:
    """Workers of a cluster that compute scores; `examiner` stores them.

    Ray restarts a lost worker where there is room, and repeats its work.
    """

    def __init__(self, ray: Any, examiner: Examiner, workers: Sequence[Any]) -> None:
        self._ray, self._examiner, self._workers = ray, examiner, workers

    def __len__(self) -> int:
        return len(self._workers)

    def examined(self, presses: Sequence[str], batches: Iterable[Contexts]) -> Iterator[Contexts]:
        """Examine presses on batches of contexts, all workers at once; yield each batch when it is scored."""
        queued, idle, running = deque(batches), list(self._workers), dict[Any, tuple[Any, Contexts]]()
        while queued or running:
            while queued and idle:
                contexts = queued.popleft()
                missing = self._examiner.missing(presses, contexts)
                if missing:
                    worker, full_cache_rows = idle.pop(), self._examiner.stored_rows((), contexts)
                    running[worker.examine.remote(missing, contexts, full_cache_rows)] = worker, contexts
                else:
                    yield contexts
            ready, _ = self._ray.wait(list(running), num_returns=1) if running else ([], [])
            for reference in ready:
                worker, contexts = running.pop(reference)
                self._examiner.remember(self._answer(reference))
                idle.append(worker)
                yield contexts

    def check(self, names: tuple[str, str, str]) -> None:
        """Raise if a worker has other weights, another device or dtype than this process.

        Raises:
            ConfigError: a worker differs.
        """
        for worker in self._workers:
            theirs = self._answer(worker.names.remote())
            if theirs != names:
                raise ConfigError(
                    f"the machines of the cluster differ: weights, device and dtype are {names} here and {theirs} on "
                    "another; give each of them the same model, and name the device and the dtype"
                )

    def _answer(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, EvalError) else error) from error
        except self._ray.exceptions.RayError as error:
            first = str(error).strip().partition("\n")[0]
            raise ClusterError(
                f"a worker was lost {_RETRIES + 1} times over the same work ({first}): the same command continues there"
            ) from error


@contextmanager
def worker_pool(
    config: RunConfig, engine: Engine, examiner: Examiner, sources: Sequence[Source], max_workers: int
) -> Iterator[WorkerPool]:
    """Start up to `max_workers` workers of a cluster, on the same type of device as this process; stop them at the end.

    Raises:
        ClusterError: no cluster answers, or no machine of it has room for a worker.
        ConfigError: the machines have different models.
    """
    with connected(config.ray_address) as ray:
        gpu = engine.device.startswith("cuda")
        config = config.model_copy(update={"presses": ("none",), "device": "cuda" if gpu else "cpu"})
        need = need_of(config, sources, engine.model.config, gpu=gpu)
        config = config.model_copy(update={"threads": need.cpus})
        room = places(ray, need, max_workers)
        actor = ray.remote(RemoteExaminer).options(
            num_cpus=need.cpus,
            num_gpus=need.gpus,
            memory=room.memory,
            max_restarts=-1,
            max_task_retries=_RETRIES,
        )
        classes = [entry.press for entry in entries()]
        workers = [actor.remote(config, classes) for _ in range(room.workers)]
        try:
            pool = WorkerPool(ray, examiner, workers)
            pool.check((engine.fingerprint, engine.device, engine.dtype))
            yield pool
        finally:
            for worker in workers:
                ray.kill(worker)


@contextmanager
def helpers(
    config: RunConfig, engine: Engine, examiner: Examiner, split: Split, progress: RunProgress
) -> Iterator[Examined | None]:
    """Yield a function that examines presses on a cluster; None if this process examines them itself."""
    if config.engine != RAY:
        yield None
        return
    sources = [part.source for part in split.searched if part.source is not None]
    with worker_pool(config, engine, examiner, sources, sum(len(part.contexts) for part in split.searched)) as pool:
        several = len(pool) > 1
        progress.note(
            f"{len(pool)} worker{'s' if several else ''} of the cluster examine{'' if several else 's'} presses"
        )
        yield pool.examined
