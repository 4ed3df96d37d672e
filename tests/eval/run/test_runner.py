# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpress_eval.common.errors import ConfigError, DiskFullError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.stats import mean_interval
from kvpress_eval.results.store import CellStore
from kvpress_eval.results.summary import summarise
from kvpress_eval.run import job, runner
from kvpress_eval.run.interrupt import Interrupt
from kvpress_eval.run.models import load_engine
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.run.runner import RunResult, run
from rich.console import Console

from tests.eval.content import content
from tests.eval.faults.runs import start, wait_for, work
from tests.eval.jsonl import write_lines

Small = Callable[..., RunConfig]


def rows_on_disk(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.glob("cells/*/rows.jsonl"))


def test_a_run_measures_the_configured_cells(finished: tuple[RunConfig, RunResult]) -> None:
    _, result = finished
    assert result.exit_code == 0
    assert [cell.press for cell in result.cells] == ["none", "none", "random:0.5", "random:0.5"]
    for cell in result.cells:
        assert cell.complete
        for row in cell.rows:
            evicted = cell.press != "none"
            assert row["kept"] == pytest.approx(0.5 if evicted else 1.0, abs=0.02)
            assert row["bytes"] < 0.75 * row["uncompressed_bytes"] if evicted else row["bits_per_value"] >= 16
            assert row["measured"]["prefill_seconds"] > 0
    assert all(score == 1 for cell in result.cells if cell.press == "none" for score in cell.scores.values())
    assert {"torch", "transformers", "kvpress", "threads", "dtype", "config", "date"} <= set(result.record)


def test_answers_about_one_document_share_its_name(small: Small, quiet: Console, tmp_path: Path) -> None:
    """Four questions about each of three texts weigh as three independent answers, not as twelve."""
    rows = [
        {"context": f" The code for {key} is {1000 + place}.", "question": f" What is {number}?", "answer": "1"}
        for place, key in enumerate(("tiger", "lantern", "hammer"))
        for number in range(4)
    ]
    tasks = (f"file:{write_lines(tmp_path / 'own.jsonl', *rows)}",)
    for question_aware in (False, True):
        result = run(small(tasks=tasks, samples=12, presses=("none",), question_aware=question_aware), quiet)
        (cell,) = result.cells
        assert len(cell.rows) == 12
        assert len(set(cell.documents.values())) == len(cell.independent_scores) == 3
        (summary,) = summarise(result.cells)
        assert summary.accuracy == mean_interval([cell.independent_scores])


def test_a_finished_run_is_not_repeated(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    run(config, quiet)
    monkeypatch.setattr(job, "read_contexts", None)
    assert run(config, quiet).exit_code == 0


def test_more_samples_extend_a_cell(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier samples are left alone, and do not enter the estimate of the remaining time."""
    config = small(samples=2)
    run(config, quiet)
    before = content(config)
    counted = {"advance": 0, "skip": 0}
    for name in counted:
        inner = getattr(RunProgress, name)

        def count(self: RunProgress, work: int, name: str = name, inner: Any = inner) -> None:
            counted[name] += work
            inner(self, work)

        monkeypatch.setattr(RunProgress, name, count)
    result = run(config.model_copy(update={"samples": 4}), quiet)
    after = content(config)
    assert counted["advance"] == counted["skip"] > 0
    assert result.exit_code == 0
    assert all(after[cell][:2] == rows and len(after[cell]) == 4 for cell, rows in before.items())


def test_batches_answer_like_single_samples(small: Small, quiet: Console, tmp_path: Path) -> None:
    alone = small(presses=("none",), tasks=("niah_single", "vt"), samples=5, max_new_tokens=8)
    together = alone.model_copy(update={"batch_size": 3, "out": tmp_path / "batched"})
    run(alone, quiet)
    run(together, quiet)

    def predictions(config: RunConfig) -> set[tuple[str, str]]:
        return {(row["sample"], row["prediction"]) for rows in content(config).values() for row in rows}

    assert predictions(alone) == predictions(together)


def test_question_aware_runs_see_the_question_first(small: Small, quiet: Console) -> None:
    config = small(presses=("none",), samples=2)
    run(config, quiet)
    unaware = {row["sample"]: row["context_tokens"] for rows in content(config).values() for row in rows}
    result = run(config.model_copy(update={"question_aware": True}), quiet)
    for row in result.cells[0].rows:
        assert row["context_tokens"] > unaware[row["sample"]]
        assert row["score"] == 1.0


@pytest.mark.parametrize("done", [1, 4])
def test_a_killed_run_continues_to_the_same_result(small: Small, quiet: Console, tmp_path: Path, done: int) -> None:
    config = small(samples=4)
    process = start(work, config)
    wait_for(lambda: rows_on_disk(config.out) >= done, process)
    process.kill()
    process.join()
    assert rows_on_disk(config.out) >= done
    assert run(config, quiet).exit_code == 0
    undisturbed = config.model_copy(update={"out": tmp_path / "whole"})
    run(undisturbed, quiet)
    assert content(config) == content(undisturbed)


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("full"), "oom"), (FloatingPointError("NaN"), "nan"), (RuntimeError("broken"), "error")],
)
@pytest.mark.parametrize("when", ["read_contexts", "answer"])
def test_one_cell_fails_and_the_others_run(
    small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str, when: str
) -> None:
    config = small(presses=("none", "random:0.5", "knorm:0.5"), samples=2)
    work = getattr(job, when)

    def fail_for_random(engine: Any, subject: Any, *arguments: Any) -> Any:
        presses = subject if isinstance(subject, list) else [subject.press]
        if any(type(press).__name__ == "RandomPress" for press in presses):
            raise error
        return work(engine, subject, *arguments)

    monkeypatch.setattr(job, when, fail_for_random)
    result = run(config, quiet)
    none, half, knorm = result.cells
    assert result.exit_code == 1
    assert none.complete
    assert knorm.complete
    assert half.failure is not None
    assert half.failure["status"] == status
    assert type(error).__name__ in half.failure["details"]
    assert "fail_for_random" in half.failure["details"]
    assert half.failure["peak_bytes"] > 2**20
    assert half.problem == f"{status}: {type(error).__name__}: {error}"
    assert half.scores == {}
    monkeypatch.undo()
    assert run(config, quiet).exit_code == 0


def test_nan_weights_give_no_score(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        engine = load_engine(*arguments)
        engine.model.model.layers[1].mlp.up_proj.weight.data.fill_(float("nan"))
        return engine

    monkeypatch.setattr(runner, "load_engine", broken)
    result = run(small(presses=("none",)), quiet)
    assert result.exit_code == 1
    assert result.cells[0].failure is not None
    assert result.cells[0].failure["status"] == "nan"
    assert result.cells[0].rows == []


def test_an_answer_that_takes_too_long_has_no_score(small: Small, quiet: Console) -> None:
    result = run(small(presses=("none",), samples=2, max_seconds_per_sample=1e-6), quiet)
    assert result.exit_code == 1
    assert [(row["status"], row["score"]) for row in result.cells[0].rows] == [("timeout", None)] * 2
    assert result.cells[0].problem == "2 timed out"


def test_a_length_that_holds_no_facts_fails_its_cells_only(small: Small, quiet: Console) -> None:
    result = run(small(presses=("none",), tasks=("vt", "niah_single"), lengths=(16,), samples=1), quiet)
    vt, single = result.cells
    assert "length 16 is too short" in str(vt.problem)
    assert single.complete


def test_ctrl_c_finishes_the_sample(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    answer = job.answer

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return answer(*args)

    monkeypatch.setattr(job, "answer", interrupted)
    result = run(config, quiet)
    assert result.exit_code == 130
    assert rows_on_disk(config.out) == 1
    monkeypatch.undo()
    assert run(config, quiet).exit_code == 0


def test_a_second_ctrl_c_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_full_disk_ends_the_run(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: CellStore, row: object) -> None:
        raise DiskFullError("no space left")

    monkeypatch.setattr(CellStore, "append", full)
    with pytest.raises(DiskFullError):
        run(small(), quiet)


def test_lengths_beyond_the_positions_of_the_model(small: Small, quiet: Console) -> None:
    with pytest.raises(ConfigError, match="length 8192 is over the 4096 positions"):
        run(small(lengths=(8192,)), quiet)
