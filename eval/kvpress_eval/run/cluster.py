# SPDX-License-Identifier: Apache-2.0
"""Connection to a Ray cluster, and the number of workers that fit on it."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import kvpress
from kvpress.cache.report import format_bytes
from kvpress_eval.common.errors import ClusterError, ConfigError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.memory import SHARE, cache_bytes
from kvpress_eval.run.models import shape_of
from kvpress_eval.tasks.source import Source

_SECONDS = 5
"""Timeout for the answer of a cluster."""
_PROCESS = 2**30
"""Bytes of a process after all imports."""
_UNKNOWN = 4096
"""Assumed tokens of a context, for a task without lengths."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
"""Start of HTTP/2, the protocol of clusters (RFC 9113): the client's preface, and the type of the server's first frame."""


@dataclass(frozen=True)
class Need:
    """Resources that a worker needs on a machine."""

    cpus: int
    gpus: int
    ranks: int
    """Processes that share the model."""
    least: int
    """Bytes of memory for one press at a time."""
    most: int
    """Bytes of memory for the caches of all presses at once."""
    weights: int
    """Bytes of the weights in main memory."""

    def __str__(self) -> str:
        cores = f"{self.cpus} core{'s' if self.cpus > 1 else ''}"
        gpus = f", {self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else ""
        return f"{cores}{gpus} and {format_bytes(self.least)} of memory"

    def room(self, resources: Mapping[str, float]) -> int:
        """Return the number of workers that fit on a machine."""
        counts = [resources.get("CPU", 0) // self.cpus, resources.get("memory", 0) // self.least]
        if self.gpus:
            counts.append(resources.get("GPU", 0) // self.gpus)
        return int(min(counts))


@dataclass(frozen=True)
class Places:
    """Workers that fit on a cluster."""

    workers: int
    nodes: int
    """Number of machines."""
    memory: int
    """Bytes of memory to request per worker."""


def need_of(config: RunConfig, sources: Sequence[Source], settings: Any, *, gpu: bool) -> Need:
    """Return the need of a worker: its processes, the weights and, without a GPU, the planned caches of a batch."""
    cpus, gpus, process = config.tp * (config.threads or 1), config.tp * int(gpu), config.tp * _PROCESS
    try:
        shape = shape_of(config, settings)
    except NotImplementedError:  # a cache that no formula describes
        return Need(cpus, gpus, config.tp, process, process, 0)
    smallest = largest = 0
    if not gpu:
        presses = [kvpress.get_press(spec) for spec in config.presses]
        for source in sources:
            tokens = min(source.length or max(_UNKNOWN, *config.lengths), config.max_context_length or sys.maxsize)
            sizes = [
                cache_bytes(press, shape.geometry, config.batch_size, tokens, source.max_new_tokens)
                for press in presses
            ]
            # Even with one press at a time, the full context is in the cache before pairs are evicted.
            full = cache_bytes(kvpress.get_press("none"), shape.geometry, config.batch_size, tokens, 0)
            smallest, largest = max(smallest, full, *sizes), max(largest, full + sum(sizes))
    weights = shape.weight_bytes
    least, most = (process + weights + int(size / SHARE) for size in (smallest, largest))
    return Need(cpus, gpus, config.tp, least, most, weights)


def free_bytes(need: Need, memory: int) -> int | None:
    """Return the memory of a worker that remains for caches; None on a GPU, which no other process uses."""
    return None if need.gpus else memory - need.weights - need.ranks * _PROCESS


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect to the cluster at an address, or start one on this machine, and yield `ray`.

    An existing connection of the process is used and left open.

    Raises:
        ConfigError: Ray is not installed, or the address is invalid.
        ClusterError: no cluster answers there.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("engine ray needs Ray: pip install 'kvpress-toolkit[ray]'")
    import ray

    if ray.is_initialized():
        at = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", at):
            raise ConfigError(f"this process is connected to the cluster at {at} already, not to {address!r}")
        yield ray
        return
    if address not in (None, "auto"):
        check_answers(str(address))
    # No usage statistics are sent unless the user enables them.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    local = {"address": "local", "include_dashboard": False} if address is None else {"address": address}
    try:
        ray.init(**local, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises many types of errors
        where = "start a local cluster" if address is None else f"join the cluster at {address!r}"
        first = str(error).strip().partition("\n")[0]
        raise ClusterError(
            f"cannot {where} ({first}): run this command on one of its machines, on which `ray start` was run"
        ) from error
    if main and handler is not None:
        signal.signal(signal.SIGTERM, handler)  # restore the handler of the run, which Ray replaced
    try:
        yield ray
    finally:
        ray.shutdown()


def check_answers(address: str) -> None:
    """Raise an error unless a Ray cluster answers at HOST:PORT within seconds; Ray itself would retry for minutes.

    Raises:
        ConfigError: the address is invalid.
        ClusterError: no server, or another kind of server, answers.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError(
            f"ray_address must be HOST:PORT as `ray start --head` prints it, or auto for the cluster of this machine, "
            f"got {address!r}"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS) as connection:
            connection.settimeout(_SECONDS)
            connection.sendall(_GREETING)
            frame = connection.recv(4)
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"no cluster answers at {address} ({error}): is `ray start --head` running there?"
        ) from error
    if len(frame) < 4 or frame[3] != _SETTINGS:
        raise ClusterError(
            f"what answers at {address} is no Ray cluster: give the address that `ray start --head` prints"
        )


def has_gpus(ray: Any) -> bool:
    """Whether any machine of the cluster has a GPU."""
    return any(resources.get("GPU", 0) >= 1 for resources in _machines(ray))


def places(ray: Any, need: Need, parts: int) -> Places:
    """Return the workers that fit on the machines of a cluster, at most `parts`.

    Raises:
        ClusterError: no machine has room for a worker; the message names the resources that it needs.
    """
    machines = _machines(ray)
    rooms = [(need.room(resources), resources) for resources in machines]
    used = [(room, resources) for room, resources in rooms if room]
    if not used:
        offers = "; ".join(
            f"{resources.get('CPU', 0):g} cores, {resources.get('GPU', 0):g} GPUs, "
            f"{format_bytes(int(resources.get('memory', 0)))}"
            for resources in machines[:8]
        )
        raise ClusterError(
            f"a worker needs {need}, and no machine of the cluster has that ({offers or 'it has none'}): "
            f"give {'a smaller tp, ' if need.ranks > 1 else ''}fewer threads, shorter lengths or a smaller batch_size, or add "
            "a machine"
        )
    workers = min(parts, sum(room for room, _ in used))
    share = min(int(resources["memory"] // min(room, workers)) for room, resources in used)
    return Places(workers, min(workers, len(used)), max(need.least, min(need.most, share)))


def _machines(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
