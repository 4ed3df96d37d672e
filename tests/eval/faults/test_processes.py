# SPDX-License-Identifier: Apache-2.0
"""Faults from outside that a run survives: kills, signals, racing processes and a hub that cannot be reached."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.results.store import read_rows
from kvpress_eval.run.runner import run
from rich.console import Console

from tests.eval.content import content
from tests.eval.engines import bundled_model
from tests.eval.faults.runs import (
    PATIENCE,
    Small,
    command,
    count,
    lines,
    options,
    start,
    uninterrupted,
    wait_for,
    without_network,
    work,
)


@pytest.mark.filterwarnings("ignore:.*dropped an unfinished last line")
def test_kill_9_at_random_moments(small: Small, quiet: Console, tmp_path: Path) -> None:
    config = small(presses=("random:0.5", "kivi:bits=4,residual_length=8"), tasks=("niah_single", "vt"), samples=10)
    rng = random.Random(9)  # noqa: S311  # reproducible, not secret
    for done in [0, *sorted(rng.sample(range(2, 30), 5))]:
        before = lines(config)
        process = start(work, config)
        wait_for(lambda done=done: count(config) >= done, process)  # type: ignore[misc]
        time.sleep(rng.uniform(0, 0.05))
        seen = count(config)
        process.kill()
        process.join()
        assert count(config) >= seen
        assert all(lines(config)[cell][: len(rows)] == rows for cell, rows in before.items())
        files = list(config.out.glob("cells/*/rows.jsonl"))
        assert sum(read_rows(path)[2] for path in files) <= 1
        assert not any(read_rows(path)[1] for path in files)
    kept = {line for rows in lines(config).values() for line in rows}
    assert 2 <= len(kept) < 40
    assert run(config, quiet).exit_code == 0
    assert kept < {line for rows in lines(config).values() for line in rows}
    assert content(config) == uninterrupted(config, tmp_path)


@pytest.mark.parametrize(
    ("signals", "code"), [([signal.SIGINT], 130), ([signal.SIGINT] * 2, 130), ([signal.SIGTERM], 143)]
)
def test_signals_end_the_command_in_time(small: Small, quiet: Console, signals: list[int], code: int) -> None:
    # Long enough that all signals meet samples, not the end of the interpreter, on a machine that has much else to do.
    config = small(presses=("none",), samples=12, lengths=(1024,))
    process = start(command, options(config))
    wait_for(lambda: count(config) >= 2, process)
    for number in signals:
        assert process.pid is not None
        os.kill(process.pid, number)
        time.sleep(0.01)
    process.join(PATIENCE)
    assert process.exitcode == code
    assert 2 <= count(config) < 12
    assert not any(read_rows(path)[2] for path in config.out.glob("cells/*/rows.jsonl"))
    assert run(config, quiet).exit_code == 0


def test_a_second_ctrl_c_leaves_the_model_as_it_was(small: Small, quiet: Console, sabotage: Any) -> None:
    config = small(presses=("none", "sabotaged:0.5"), samples=2)
    engine = bundled_model()
    attention, handler = engine.model.config._attn_implementation, signal.getsignal(signal.SIGINT)

    def twice(rows: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    sabotage(twice)
    with pytest.raises(KeyboardInterrupt):
        run(config, quiet)
    assert engine.model.config._attn_implementation == attention
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    assert not any(getattr(module, name) for module in engine.model.modules() for name in hooks)
    assert signal.getsignal(signal.SIGINT) is handler
    sabotage(lambda rows: None)
    assert run(config, quiet).exit_code == 0


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_that_cannot_be_reached(small: Small, offline: bool) -> None:
    config = small(samples=1)
    start(time.sleep, 0).join()  # the server that processes are forked from has imported everything
    before = time.monotonic()
    process = start(without_network, [*options(config), "--model", "someone/a-model"], offline)
    process.join(30)
    assert process.exitcode == 3
    assert time.monotonic() - before < 10


def test_eight_processes_race_for_cells_and_one_dies(small: Small, quiet: Console) -> None:
    depths = tuple(round(0.05 * step, 2) for step in range(20))
    presses = ("none", *(f"random:0.{tenths}" for tenths in range(1, 10)))
    config = small(presses=presses, depths=depths, samples=1, max_new_tokens=1)
    processes = [start(work, config) for _ in range(8)]
    wait_for(lambda: count(config) >= 10, processes[0])
    processes[0].kill()
    for process in processes:
        process.join(PATIENCE)
    assert processes[0].exitcode == -signal.SIGKILL
    assert {process.exitcode for process in processes[1:]} <= {0, 5}
    result = run(config, quiet)
    assert result.exit_code == 0
    assert len(result.cells) == 200
    rows_by_cell = lines(config)
    assert len(rows_by_cell) == 200
    assert all(len(rows) == 1 for rows in rows_by_cell.values())
    assert len({json.loads(rows[0])["measured"]["run"] for rows in rows_by_cell.values()}) > 1
