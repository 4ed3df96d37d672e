# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster: how it is reached, and how many workers it has room for."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
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
from kvpress_eval.run.shape import shape_of
from kvpress_eval.tasks.source import Source

_SECONDS = 5
"""How long a cluster may take to answer."""
_PROCESS = 2**30
"""Bytes of a process that has imported everything."""
_UNKNOWN = 4096
"""Tokens of a context whose task does not say how long it is."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
"""How HTTP/2, which clusters speak, begins (RFC 9113): the greeting of a client, the type of the first frame of a server."""


@dataclass(frozen=True)
class Need:
    """What a worker asks of a machine: `least` bytes for one press at a time, `most` for all of them beside each other."""

    cpus: int
    gpus: int
    least: int
    most: int
    weights: int

    def __str__(self) -> str:
        cores = f"{self.cpus} core{'s' if self.cpus > 1 else ''}"
        return f"{cores}{', 1 GPU' if self.gpus else ''} and {format_bytes(self.least)} of memory"

    def room(self, resources: Mapping[str, float]) -> int:
        """Return how many workers a machine holds."""
        counts = [resources.get("CPU", 0) // self.cpus, resources.get("memory", 0) // self.least]
        if self.gpus:
            counts.append(resources.get("GPU", 0) // self.gpus)
        return int(min(counts))


@dataclass(frozen=True)
class Places:
    """The workers that a cluster has room for, on how many machines, and the bytes that each may ask for."""

    workers: int
    nodes: int
    memory: int


def need_of(config: RunConfig, sources: Sequence[Source], settings: Any, *, gpu: bool) -> Need:
    """Return what a worker needs: its process, the weights and, unless they are on a GPU, the caches of a batch by formula."""
    cpus = config.threads or 1
    try:
        shape = shape_of(config, settings)
    except NotImplementedError:  # a cache that no formula describes
        return Need(cpus, int(gpu), _PROCESS, _PROCESS, 0)
    least = most = 0
    if not gpu:
        presses = [kvpress.get_press(spec) for spec in config.presses]
        for source in sources:
            tokens = source.length or max(_UNKNOWN, *config.lengths)
            sizes = [
                cache_bytes(press, shape.geometry, config.batch_size, tokens, source.max_new_tokens)
                for press in presses
            ]
            # Press by press, a context is read in full before what is evicted is gone.
            full = cache_bytes(kvpress.get_press("none"), shape.geometry, config.batch_size, tokens, 0)
            least, most = max(least, full, *sizes), max(most, full + sum(sizes))
    own = _PROCESS + shape.weight_bytes
    return Need(cpus, int(gpu), own + int(least / SHARE), own + int(most / SHARE), shape.weight_bytes)


def free_bytes(need: Need, memory: int) -> int | None:
    """Return what is left of the memory of a worker for caches; None on a GPU, which it has for itself."""
    return None if need.gpus else memory - need.weights - _PROCESS


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect to the cluster at an address, or start one on this machine, and yield `ray`.

    A connection that the process has already is used, and left open.

    Raises:
        ConfigError: Ray is not installed, or the address is not one.
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
    # A library reports nothing to its makers unless the user wants it to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    local = {"address": "local", "include_dashboard": False} if address is None else {"address": address}
    try:
        ray.init(**local, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # the library has errors of many kinds
        where = "start a local cluster" if address is None else f"join the cluster at {address!r}"
        first = str(error).strip().partition("\n")[0]
        raise ClusterError(
            f"cannot {where} ({first}): run this command on one of its machines, on which `ray start` was run"
        ) from error
    if main and handler is not None:
        signal.signal(signal.SIGTERM, handler)  # that of the run, not of the library
    try:
        yield ray
    finally:
        ray.shutdown()


def check_answers(address: str) -> None:
    """Raise an error unless a server that speaks the protocol of clusters answers at HOST:PORT, within seconds.

    Ray itself would try for minutes.

    Raises:
        ConfigError: the address is none.
        ClusterError: nothing, or something else, answers there.
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
    """Whether any machine of the cluster has one."""
    return any(resources.get("GPU", 0) >= 1 for resources in _machines(ray))


def places(ray: Any, need: Need, parts: int) -> Places:
    """Return the workers that the machines of a cluster have room for, at most one for each of `parts`.

    Raises:
        ClusterError: no machine has room for one; says what is needed.
    """
    machines = _machines(ray)
    rooms = [(need.room(resources), resources) for resources in machines]
    used = [(room, resources) for room, resources in rooms if room]
    if not used:
        told = "; ".join(
            f"{resources.get('CPU', 0):g} cores, {resources.get('GPU', 0):g} GPUs, "
            f"{format_bytes(int(resources.get('memory', 0)))}"
            for resources in machines[:8]
        )
        raise ClusterError(
            f"a worker needs {need}, and no machine of the cluster has that ({told or 'it has none'}): "
            "give fewer threads, shorter lengths or a smaller batch_size, or add a machine"
        )
    workers = min(parts, sum(room for room, _ in used))
    share = min(int(resources["memory"] // min(room, workers)) for room, resources in used)
    return Places(workers, min(workers, len(used)), max(need.least, min(need.most, share)))


def _machines(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
