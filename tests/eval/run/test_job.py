# SPDX-License-Identifier: Apache-2.0
"""One process reads each context once for all presses and questions, and a failure leaves the others unharmed."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpress_eval.common.files import hash_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import CellStore
from kvpress_eval.run import job
from kvpress_eval.run.runner import run
from rich.console import Console

from tests.eval.content import content
from tests.eval.jsonl import write_lines

Small = Callable[..., RunConfig]
SHARING = ("none", "snapkv:0.5", "kivi:bits=4,group_size=16,residual_length=16")


def count_readings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note the presses and contexts of every reading."""
    readings: list[tuple[int, int]] = []
    read = job.read_contexts

    def counted(engine: Any, presses: Sequence[Any], contexts: Sequence[Any], *store: Any) -> Any:
        readings.append((len(presses), len(contexts)))
        return read(engine, presses, contexts, *store)

    monkeypatch.setattr(job, "read_contexts", counted)
    return readings


def questions_file(folder: Path) -> Path:
    """Three questions about one context and one about another."""
    rows = [
        {
            "task": "colours",
            "length": 64,
            "context": context,
            "question": f"{name} ?",
            "answer_prefix": "",
            "answer": "red",
        }
        for context, names in (("the sea is deep . " * 12, "abc"), ("a tree is tall . " * 12, "d"))
        for name in names
    ]
    return write_lines(folder / "samples.jsonl", *rows)


def test_a_context_is_read_once_for_all_presses(
    small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    readings = count_readings(monkeypatch)
    together = small(presses=(*SHARING, "kvzip:0.5"), samples=2)
    result = run(together, quiet)
    assert readings == [(3, 1), (1, 1)] * 2
    assert (result.savings.contexts, result.savings.answers) == (4, 8)
    assert result.savings.saved_seconds > 0
    assert result.record["prefills"]["answers"] == 8
    for press in together.presses:
        run(together.model_copy(update={"presses": (press,), "out": tmp_path / "alone"}), quiet)
    alone = together.model_copy(update={"out": tmp_path / "alone"})
    assert content(together) == content(alone)


def test_a_context_is_read_once_for_all_questions(
    small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    readings = count_readings(monkeypatch)
    config = small(presses=SHARING, tasks=(f"file:{questions_file(tmp_path)}",), samples=4, language="english")
    result = run(config, quiet)
    assert result.exit_code == 0
    assert readings == [(3, 1)] * 2
    assert (result.savings.contexts, result.savings.answers) == (2, 12)
    readings.clear()
    batched = config.model_copy(update={"batch_size": 2, "out": tmp_path / "batched"})
    assert run(batched, quiet).exit_code == 0
    assert readings == [(3, 2)]


def test_only_missing_contexts_are_read(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    run(small(presses=SHARING[:1], samples=3), quiet)
    readings = count_readings(monkeypatch)
    run(small(presses=SHARING, samples=3), quiet)
    assert readings == [(2, 1)] * 3


@pytest.mark.parametrize("when", ["read_contexts", "answer"])
def test_without_memory_smaller_batches_are_tried(
    small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    work = getattr(job, when)

    def limited(engine: Any, subject: Any, rows: Sequence[Any], *arguments: Any) -> Any:
        presses = len(subject) if isinstance(subject, list) else 1
        if presses * len(rows) > 2:
            raise torch.OutOfMemoryError("full")
        return work(engine, subject, rows, *arguments)

    monkeypatch.setattr(job, when, limited)
    result = run(small(presses=SHARING, samples=4, batch_size=4, max_new_tokens=8), quiet)
    assert result.exit_code == 0
    for cell in result.cells:
        assert [row["batch_size"] for row in cell.rows] == [2] * 4


def test_kept_tokens_of_the_first_sample_are_shown_for_any_batch_size(
    small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = job.read_contexts

    def limited(engine: Any, presses: Sequence[Any], contexts: Sequence[Any], *store: Any) -> Any:
        if len(contexts) > 1 and presses[0].recipe().codec:
            raise torch.OutOfMemoryError("full")
        return read(engine, presses, contexts, *store)

    monkeypatch.setattr(job, "read_contexts", limited)
    result = run(small(presses=(SHARING[2], SHARING[0]), samples=4, batch_size=4), quiet)
    assert {str(cell.kept["sample"]) for cell in result.cells if cell.kept} == {result.cells[0].rows[0]["sample"]}
    assert all(cell.kept for cell in result.cells)


def test_a_batch_of_one_that_does_not_fit_fails_its_cell(
    small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = job.read_contexts

    def limited(engine: Any, presses: Sequence[Any], contexts: Sequence[Any], *store: Any) -> Any:
        if any(press.recipe().codec for press in presses):
            raise torch.OutOfMemoryError("full")
        return read(engine, presses, contexts, *store)

    monkeypatch.setattr(job, "read_contexts", limited)
    result = run(small(presses=SHARING, samples=3, batch_size=3), quiet)
    assert [cell.complete for cell in result.cells] == [True, True, False]
    assert str(result.cells[2].problem) == "oom: OutOfMemoryError: full"


def test_failures_hold_no_tensors(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a failed attempt are freed before the next attempt."""
    blocks: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def failing(engine: Any, presses: Sequence[Any], contexts: Sequence[Any], *store: Any) -> Any:
        alive.append(sum(block_ref() is not None for block_ref in blocks))
        block = torch.zeros(1000)
        blocks.append(weakref.ref(block))
        raise torch.OutOfMemoryError(f"no room for {block.numel()}")

    monkeypatch.setattr(job, "read_contexts", failing)
    assert run(small(presses=SHARING, samples=2, batch_size=2), quiet).exit_code == 1
    assert len(alive) > 4
    assert set(alive) == {0}


def test_cells_of_another_process_are_left_to_it(small: Small, quiet: Console) -> None:
    config = small(presses=SHARING, samples=2)
    run(config, quiet)
    cells = sorted((config.out / "cells").iterdir())
    more = config.model_copy(update={"samples": 3})
    with CellStore(cells[0]).claim():
        result = run(more, quiet)
    assert result.exit_code == 5
    assert len(result.busy) == 1
    assert sorted(len(cell.rows) for cell in result.cells) == [2, 3, 3]
    assert run(more, quiet).exit_code == 0


def test_rows_record_the_prompt_and_the_held_bytes(small: Small, quiet: Console) -> None:
    config = small(presses=("none", "decoding(knorm):compression_interval=2,target_size=16"), max_new_tokens=16)
    none, decoding = run(config, quiet).cells
    for plain, pressed in zip(none.rows, decoding.rows, strict=True):
        assert plain["prompt_sha256"] == pressed["prompt_sha256"]
        assert plain["bytes"] == pressed["bytes"]
        assert pressed["end_bytes"] < plain["bytes"] < plain["end_bytes"]
    assert len({row["prompt_sha256"] for row in none.rows}) == 3


def test_a_record_names_its_software_and_hardware(finished: Any) -> None:
    config, result = finished
    assert {"code", "triton", "processor", "config_sha256", "prefills"} <= set(result.record)
    lines = [json.loads(line) for line in (config.out / "runs.jsonl").read_text().splitlines()]
    assert lines[-1] == result.record
    for cell in result.cells:
        assert (config.out / "cells" / hash_json(dict(cell.spec))[:16]).is_dir()
        assert {row["measured"]["run"] for row in cell.rows} == {result.record["run"]}
