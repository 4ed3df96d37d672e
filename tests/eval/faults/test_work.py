# SPDX-License-Identifier: Apache-2.0
"""Faults that a run survives in its own work: presses and scorers that raise, no memory, NaN, slow samples, a clock that jumps.

Faults come from a press, which is code that users write.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpress_eval.run import environment, job, runner
from kvpress_eval.run.models import load_engine
from kvpress_eval.run.runner import run
from rich.console import Console

from tests.eval.content import content
from tests.eval.faults.runs import Small, count, uninterrupted


def fails(error: type[Exception]) -> Callable[[int], None]:
    def act(rows: int) -> None:
        raise error("broken")

    return act


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError])
def test_any_error_of_a_press_costs_its_cell_only(
    small: Small, quiet: Console, sabotage: Any, error: type[Exception]
) -> None:
    config = small(presses=("none", "sabotaged:0.5", "knorm:0.5"), samples=2)
    sabotage(fails(error))
    result = run(config, quiet)
    none, broken, knorm = result.cells
    assert result.exit_code == 1
    assert none.complete
    assert knorm.complete
    assert not broken.scores
    assert broken.failure is not None
    assert broken.failure["status"] == "error"
    assert "in act" in broken.failure["details"]
    sabotage(lambda rows: None)
    assert run(config, quiet).exit_code == 0


def test_a_scorer_that_raises_costs_its_cell_only(
    small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(presses=("none",), tasks=("niah_single", "vt"), samples=2)
    score = job.score

    def broken(query: Any, text: str) -> float:
        if len(query.answers) > 1 or "Let" in str(query):
            raise ZeroDivisionError("no answer")
        return score(query, text)

    monkeypatch.setattr(job, "score", broken)
    single, vt = run(config, quiet).cells
    assert single.complete
    assert vt.problem == "error: ZeroDivisionError: no answer"
    assert "in broken" in (vt.failure or {})["details"]


def live_bytes() -> int:
    """Return the bytes of all tensors that exist."""
    gc.collect()
    storages = [item.untyped_storage() for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_without_memory_a_batch_is_halved(small: Small, quiet: Console, sabotage: Any) -> None:
    config = small(presses=("none", "sabotaged:0.5"), samples=4, batch_size=4)
    attempts = []

    def at_most_two(rows: int) -> None:
        attempts.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError("4 rows are too many")

    sabotage(at_most_two)
    before = live_bytes()
    none, halved = run(config, quiet).cells
    assert none.complete
    assert halved.complete
    assert {row["batch_size"] for row in none.rows} == {4}
    assert {row["batch_size"] for row in halved.rows} == {2}
    assert attempts[0] == 4
    assert live_bytes() <= 1.01 * before + 2**16


def test_without_any_memory_the_next_cell_runs(small: Small, quiet: Console, sabotage: Any) -> None:
    config = small(presses=("sabotaged:0.5", "none"), samples=2, batch_size=2)
    sabotage(fails(torch.OutOfMemoryError))
    before = live_bytes()
    result = run(config, quiet)
    failed, none = result.cells
    assert result.exit_code == 1
    assert none.complete
    assert failed.problem == "oom: OutOfMemoryError: broken"
    assert (failed.failure or {})["peak_bytes"] > 2**20
    assert live_bytes() <= 1.01 * before + 2**16


def test_nan_while_decoding_is_never_a_score(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        engine = load_engine(*arguments)

        def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output * torch.nan if output.shape[1] == 1 else output

        engine.model.model.layers[1].mlp.register_forward_hook(spoil)
        return engine

    monkeypatch.setattr(runner, "load_engine", broken)
    result = run(small(presses=("none",)), quiet)
    assert result.exit_code == 1
    assert "nan: FloatingPointError: NaN in the logits" in str(result.cells[0].problem)
    assert not result.cells[0].scores


def test_a_slow_sample_times_out_alone(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(presses=("none",), max_seconds_per_sample=2.0)

    def slow(*arguments: Any) -> Any:
        engine = load_engine(*arguments)

        def wait(module: Any, inputs: Any) -> None:
            if count(config) == 1:
                time.sleep(1)

        engine.model.model.layers[1].mlp.register_forward_pre_hook(wait)
        return engine

    monkeypatch.setattr(runner, "load_engine", slow)
    result = run(config, quiet)
    assert [row["status"] for row in result.cells[0].rows] == ["ok", "timeout", "ok"]
    assert result.cells[0].problem == "1 timed out"


def test_a_clock_that_runs_backwards(
    small: Small, quiet: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small()
    expected = uninterrupted(config, tmp_path)
    seconds = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    for module in (job, environment):
        monkeypatch.setattr(module, "now", lambda: "1970-01-01T00:00:00+00:00")
    first_result, second = run(config, quiet), run(config, quiet)
    assert first_result.exit_code == second.exit_code == 0
    assert content(config) == expected
    # Two runs of the same second are two runs.
    assert first_result.record["run"] != second.record["run"]
    assert all(row["measured"]["prefill_seconds"] > 0 for cell in first_result.cells for row in cell.rows)
