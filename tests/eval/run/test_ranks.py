# SPDX-License-Identifier: Apache-2.0
"""Workers of several ranks (tensor parallel): results of one process, errors before the start, requested resources."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvpress_eval.common.errors import ClusterError, ConfigError
from kvpress_eval.config.load import load_config
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.cluster import free_bytes, places
from kvpress_eval.run.models import load_engine
from kvpress_eval.run.runner import prepare, run
from rich.console import Console
from transformers import GPTNeoConfig

from tests.eval.content import content
from tests.eval.faults.runs import count
from tests.eval.faults.test_cluster import when
from tests.eval.run.test_cluster import Machines, need

Small = Callable[..., RunConfig]
PRESSES = ("none", "adakv(snapkv:0.5)", "kvzip:0.5,repeat_prompt=", "random:0.5", "kivi:bits=4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "tp: .*greater than or equal to 1"),
        ({"tp": 2}, "2 ranks need engine ray"),
        ({"tp": 2, "engine": "ray", "max_seconds_per_sample": 5.0}, "their clocks differ"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, fields)


def test_ranks_that_cannot_share_the_heads_are_refused(small: Small, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'reference' has 2 KV heads, which 3 ranks .*: give tp 1 or 2"):
        prepare(small(engine="ray", tp=3))
    GPTNeoConfig().save_pretrained(tmp_path / "gpt_neo")
    with pytest.raises(ConfigError, match="has no tensor-parallel plan in transformers: give tp 1"):
        prepare(small(engine="ray", tp=2, model=str(tmp_path / "gpt_neo"), language="english"))
    with pytest.raises(ConfigError, match="tp 2 is for `kvpress eval --engine ray`"):
        load_engine(small(engine="ray", tp=2))


def test_a_worker_requests_the_resources_of_all_ranks(small: Small) -> None:
    single, double = (need(small(threads=3, engine="ray", tp=tp)) for tp in (1, 2))
    assert (double.cpus, double.gpus, double.ranks) == (6, 0, 2)
    assert (double.least - single.least, double.weights) == (2**30, single.weights)
    assert free_bytes(double, double.least) == free_bytes(single, single.least)
    on_gpu = need(small(engine="ray", tp=2), gpu=True)
    assert (on_gpu.cpus, on_gpu.gpus) == (2, 2)
    assert places(Machines((8, 3, 8), (8, 1, 8), (8, 4, 8)), on_gpu, parts=99).workers == 3
    with pytest.raises(
        ClusterError, match=r"needs 2 cores, 2 GPUs and .*\(8 cores, 1 GPUs, 8\.0 GiB\): give a smaller tp, "
    ):
        places(Machines((8, 1, 8)), on_gpu, parts=9)


@pytest.fixture
def machine() -> Iterator[Any]:
    """A cluster of one machine with two cores."""
    ray = pytest.importorskip("ray")
    handler = signal.getsignal(signal.SIGTERM)  # Ray replaces this handler
    ray.init(
        address="local", num_cpus=2, _memory=6 * 2**30, object_store_memory=100 * 2**20, include_dashboard=False,
        log_to_driver=False,
    )  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_two_ranks_give_the_results_of_one_process(small: Small, quiet: Console, machine: Any, tmp_path: Path) -> None:
    config = small(presses=PRESSES, lengths=(256,), samples=4, batch_size=2, max_new_tokens=8, dtype="float32")
    assert run(config, quiet).exit_code == 0
    ranks = config.model_copy(update={"engine": "ray", "tp": 2, "out": tmp_path / "ranks"})
    assert run(ranks, quiet).exit_code == 0
    assert "1 worker on 1 machine: each asks for 2 cores and" in quiet.file.getvalue()  # type: ignore[attr-defined]
    assert_same(ranks, config)
    kept = sorted(path.read_text() for path in config.out.glob("cells/*/kept.json"))
    assert kept == sorted(path.read_text() for path in ranks.out.glob("cells/*/kept.json"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_a_worker_that_loses_a_rank_is_replaced(small: Small, quiet: Console, machine: Any, tmp_path: Path) -> None:
    config = small(presses=("none",), lengths=(512,), samples=12, max_new_tokens=8, dtype="float32")
    assert run(config, quiet).exit_code == 0
    ranks = config.model_copy(update={"engine": "ray", "tp": 2, "out": tmp_path / "ranks"})
    killer = when(lambda: count(ranks) >= 2, kill_a_rank)
    assert run(ranks, quiet).exit_code == 0
    killer.join()
    assert "a worker was lost; " in quiet.file.getvalue()  # type: ignore[attr-defined]
    assert_same(ranks, config)


def kill_a_rank() -> None:
    """Kill the second rank of a worker, a grandchild of this process."""
    processes = psutil.Process().children(recursive=True)
    next(process for process in processes if "spawn_main" in " ".join(process.cmdline())).kill()


def assert_same(ranks: RunConfig, single: RunConfig) -> None:
    """Check that the rows of several ranks are those of one process, but for a few bytes that each rank stores."""
    expected, actual = content(single), content(ranks)
    assert actual.keys() == expected.keys()
    for cell, rows in expected.items():
        for row, ours in zip(rows, actual[cell], strict=True):
            sizes = {name: pytest.approx(row[name], rel=1e-3) for name in ("bytes", "end_bytes", "bits_per_value")}
            assert ours == {**row, **sizes, "peak_bytes": pytest.approx(row["peak_bytes"], rel=1e-3)}
