# SPDX-License-Identifier: Apache-2.0
"""Runs on a cluster: requested resources, and errors of machines that do not answer or have no room."""

from __future__ import annotations

import importlib.util
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kvpress_eval.common.errors import ClusterError, ConfigError
from kvpress_eval.config.load import load_config
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run import cluster
from kvpress_eval.run.cluster import check_answers, connected, free_bytes, need_of, places
from kvpress_eval.run.models import read_settings
from kvpress_eval.run.runner import run
from kvpress_eval.tasks.catalogue import expand_tasks
from rich.console import Console

from tests.eval.commands import invoke
from tests.eval.engines import bundled_model

Small = Callable[..., RunConfig]
GIB = 2.0**30


class Machines:
    """Stand-in for `ray.nodes` with cores, GPUs and GiB of each machine."""

    def __init__(self, *machines: tuple[float, float, float]) -> None:
        self._machines = machines

    def nodes(self) -> list[dict[str, Any]]:
        gone = {"Alive": False, "Resources": {"CPU": 99.0, "memory": 99 * GIB}}
        named = ({"CPU": cores, "GPU": gpus, "memory": gib * GIB} for cores, gpus, gib in self._machines)
        return [gone, *({"Alive": True, "Resources": resources} for resources in named)]


def need(config: RunConfig, *, gpu: bool = False) -> cluster.Need:
    return need_of(config, expand_tasks(config), read_settings(config), gpu=gpu)


def test_a_worker_requests_its_process_the_weights_and_the_caches_of_a_batch(small: Small) -> None:
    short = small(presses=("none", "random:0.5"), threads=3)
    long = short.model_copy(update={"lengths": (1024,), "batch_size": 4})
    # A token of the reference model takes 2048 bytes; answers and activations take as much as the caches.
    more = need(long).least - need(short).least
    assert more == pytest.approx(2 * 2048 * (4 * 1024 - 64), rel=0.05)
    assert need(short).cpus == 3
    assert need(long).most > need(long).least
    weights = sum(p.numel() * p.element_size() for p in bundled_model().model.parameters())
    assert need(short).weights == pytest.approx(weights, rel=0.01)


def test_a_gpu_worker_requests_no_memory_of_the_machine_for_caches(small: Small) -> None:
    required = need(small(lengths=(1024,), batch_size=64), gpu=True)
    assert (required.cpus, required.gpus) == (1, 1)
    assert required.least == required.most == 2**30 + required.weights
    assert free_bytes(required, required.least) is None


def test_workers_go_where_there_is_room(small: Small) -> None:
    required = need(small(threads=2))
    placed = places(Machines((4, 0, 8), (1, 0, 8), (9, 0, 2.5)), required, parts=99)
    assert (placed.workers, placed.nodes) == (4, 2)  # two by cores on the first, two by memory on the last
    assert required.least <= placed.memory <= required.most
    assert places(Machines((4, 0, 8)), required, parts=1).workers == 1
    assert places(Machines((8, 3, 8), (8, 0, 8)), need(small(threads=2), gpu=True), parts=99).workers == 3


def test_without_room_the_error_names_the_needed_resources(small: Small) -> None:
    with pytest.raises(ClusterError, match=r"needs 4 cores and 1\.0 GiB of memory, .*\(2 cores, 0 GPUs, 8\.0 GiB\)"):
        places(Machines((2, 0, 8)), need(small(threads=4)), parts=9)
    with pytest.raises(ClusterError, match=r"1 GPU and .*it has none"):
        places(Machines(), need(small(), gpu=True), parts=9)


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """Accept one connection on a local port, send `answer`, and wait; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connections = []

        def take() -> None:
            connection, _ = listening.accept()
            connection.sendall(answer)
            connections.append(connection)

        thread = threading.Thread(target=take)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join()
        connections[0].close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_server_that_is_no_cluster_is_reported_at_once(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_SECONDS", 0.2)
    with server(answer) as address, pytest.raises(ClusterError, match=f"{address}.*ray start --head"):
        check_answers(address)


def test_an_address_that_does_not_answer_ends_with_a_sentence(small: Small) -> None:
    pytest.importorskip("ray")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        code, output = invoke(
            "eval", "--press", "none", "--engine", "ray", "--ray-address", address, "--out", small().out
        )
    assert code == ClusterError.exit_code
    assert f"no cluster answers at {address}" in output


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", ":6379"])
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"ray_address must be HOST:PORT .* got '"):
        check_answers(address)


def test_without_ray_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(ConfigError, match=r"pip install 'kvpress-toolkit\[ray\]'"), connected(None):
        pass


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": "dask"}, "engine: .*'local' or 'ray'"),
        ({"ray_address": "head:6379"}, "needs engine ray"),
        ({"engine": "ray", "device": "cuda:1"}, "must be auto, cpu or cuda, got 'cuda:1'"),
        ({"engine": "ray", "device_map": "auto"}, "device_map has nothing to spread"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, fields)


def test_a_loaded_model_cannot_be_sent(small: Small, quiet: Console) -> None:
    with pytest.raises(ConfigError, match="give its name"):
        run(small(engine="ray"), quiet, bundled_model())
