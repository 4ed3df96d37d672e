# SPDX-License-Identifier: Apache-2.0
"""Faults that a run on a cluster survives: a lost machine, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.runner import run
from kvpress_eval.tuning.find import tune
from kvpress_eval.tuning.result import RESULT
from kvpress_eval.tuning.wishes import Wishes
from rich.console import Console

from tests.eval.content import content
from tests.eval.faults.runs import PATIENCE, Small, count, lines, uninterrupted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]
_QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 2}


@pytest.fixture(scope="module")
def two_machines() -> Iterator[Any]:
    """A cluster of two machines with a core each; all of its processes end with the tests."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    handler = signal.getsignal(signal.SIGTERM)  # a node of the cluster replaces this handler
    size = {"num_cpus": 1, "memory": 3 * 2**30, "object_store_memory": 100 * 2**20}
    cluster = Cluster(
        initialize_head=True, head_node_args={**size, "include_dashboard": False, "_system_config": _QUICK}
    )
    try:
        cluster.add_node(**size)
        yield cluster
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, handler)


def when(happened: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Run `act` in a thread as soon as `happened` is true, while a run continues."""

    def watch() -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def workers(config: Any) -> list[set[str]]:
    """Return the workers that wrote the rows of each cell."""
    return [{json.loads(row)["measured"]["run"] for row in rows} for rows in lines(config).values()]


def test_a_machine_that_is_lost_loses_no_sample(
    small: Small, quiet: Console, two_machines: Any, tmp_path: Path
) -> None:
    presses = ("none", "random:0.5", "knorm:0.5", "kivi:bits=4,residual_length=8")
    config = small(
        presses=presses, tasks=("niah_single", "vt"), lengths=(512,), samples=12, max_new_tokens=8,
        engine="ray", ray_address=two_machines.address,
    )  # fmt: skip
    (second,) = two_machines.worker_nodes
    both_write = lambda: len(set().union(*workers(config))) == 2  # noqa: E731
    killer = when(both_write, lambda: two_machines.remove_node(second, allow_graceful=False))
    result = run(config, quiet)
    killer.join()
    output = quiet.file.getvalue()  # type: ignore[attr-defined]
    assert result.exit_code == 0
    assert "2 workers on 2 machines: each asks for 1 core and" in output
    assert "a worker was lost; " in output
    assert "8 cells in " in output
    assert " a minute; 2 workers did " in output
    # Some cell was begun by one worker and finished by the other; every sample of every cell is there once.
    assert max(map(len, workers(config))) == 2
    assert {len(rows) for rows in lines(config).values()} == {12}
    assert content(config) == uninterrupted(
        config.model_copy(update={"engine": "local", "ray_address": None}), tmp_path
    )
    records = [json.loads(line) for line in (config.out / "runs.jsonl").read_text().splitlines()]
    assert set().union(*workers(config)) <= {record["run"] for record in records if "prefills" in record}


def test_ctrl_c_leaves_finished_cells(small: Small, quiet: Console, two_machines: Any) -> None:
    config = small(presses=("none",), lengths=(1024,), samples=40, engine="ray", ray_address=two_machines.address)
    handler = signal.getsignal(signal.SIGINT)
    killer = when(lambda: count(config) >= 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = run(config, quiet)
    killer.join()
    assert result.exit_code == 130
    assert result.interrupted
    assert 2 <= count(config) < 40
    assert signal.getsignal(signal.SIGINT) is handler
    kept = {line for rows in lines(config).values() for line in rows}
    # Without a cluster the same run goes on in the same folder.
    local = config.model_copy(update={"engine": "local", "ray_address": None, "samples": count(config) + 1})
    assert run(local, quiet).exit_code == 0
    assert kept < {line for rows in lines(config).values() for line in rows}


def test_a_search_on_a_cluster_picks_the_press_of_one_process(
    small: Small, quiet: Console, two_machines: Any, tmp_path: Path
) -> None:
    local = small(tasks=("niah_single",), lengths=(256,), samples=4)
    wishes = Wishes(smaller=8.0, held_out=2, candidates=2)
    expected = tune(local, wishes, quiet)
    config = local.model_copy(update={"engine": "ray", "ray_address": two_machines.address, "out": tmp_path / "ray"})
    on_cluster = tune(config, wishes, quiet)
    assert (on_cluster.press, on_cluster.kept) == (expected.press, expected.kept)
    assert [measured.press for measured in on_cluster.frontier] == [measured.press for measured in expected.frontier]
    assert searched(config) == searched(local)
    assert "of the cluster examine" in quiet.file.getvalue()  # type: ignore[attr-defined]


def searched(config: RunConfig) -> Any:
    """Return the standings of all presses of a search."""
    return json.loads((config.out / RESULT).read_text())["searched"]
