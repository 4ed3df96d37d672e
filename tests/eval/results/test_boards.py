# SPDX-License-Identifier: Apache-2.0
"""Leaderboards compare presses on the same samples, under the same conditions, and every two presses with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.leaderboards import Board, compare_all, make_boards
from kvpress_eval.results.read import Results, read_run
from kvpress_eval.results.stats import holm, paired_difference, paired_p_value
from kvpress_eval.results.store import encode_row
from kvpress_eval.run.runner import RunResult

from tests.eval.reports import Tags, folder_of, page

TASKS = ("vt", "cwe")
SCORES = np.random.default_rng(0).integers(0, 2, (3, len(TASKS), 40)).astype(float)
ORDER = ("a", "b", "c")


def cell(press: str, task: str, scores: list[float]) -> CellResult:
    rows = [{"sample": f"{task}-{number}", "score": score} for number, score in enumerate(scores)]
    return CellResult({"press": press, "task": task, "length": 64, "depth": None}, len(rows), rows, None, None)


CELLS = [
    cell(press, task, SCORES[number, column].tolist())
    for number, press in enumerate(ORDER)
    for column, task in enumerate(TASKS)
]


def changed(cell: CellResult, **spec: Any) -> CellResult:
    return replace(cell, spec={**cell.spec, **spec})


def covers(board: Board) -> dict[str, set[str]]:
    return {s.press: set(s.tasks) for s in board.summaries}


def test_presses_are_ranked_on_the_same_places_only(finished: tuple[RunConfig, RunResult]) -> None:
    results = read_run(finished[0].out)
    extra = [changed(cell, press="tova:0.5") for cell in results.cells if (cell.press, cell.task) == ("none", "vt")]
    board_of_both_tasks, board_of_vt = make_boards(replace(results, cells=[*results.cells, *extra]))
    assert covers(board_of_both_tasks) == {"none": {"niah_single", "vt"}, "random:0.5": {"niah_single", "vt"}}
    assert covers(board_of_vt) == {"none": {"vt"}, "random:0.5": {"vt"}, "tova:0.5": {"vt"}}
    assert all(board.summaries[1].difference for board in (board_of_both_tasks, board_of_vt))


def test_a_failed_cell_does_not_shrink_the_ranking(finished: tuple[RunConfig, RunResult]) -> None:
    results = read_run(finished[0].out)
    cells = [
        replace(cell, rows=[], samples=None) if (cell.press, cell.task) == ("random:0.5", "vt") else cell
        for cell in results.cells
    ]
    (board,) = make_boards(replace(results, cells=cells))
    none, half = board.summaries
    assert none.accuracy is not None
    assert half.tasks["niah_single"] is not None
    assert half.accuracy is half.tasks["vt"] is None


def test_other_conditions_are_another_leaderboard(finished: tuple[RunConfig, RunResult]) -> None:
    results = read_run(finished[0].out)
    others = [changed(cell, dtype="float64", kvpress="0.9") for cell in results.cells if cell.press != "none"]
    boards = make_boards(replace(results, cells=[*results.cells, *others]))
    assert [len(board.summaries) for board in boards] == [2, 1]
    assert boards[1].summaries[0].difference is None
    text = page(replace(results, cells=[*results.cells, *others]))
    assert "for each kvpress, dtype" in text
    assert "kvpress: 0.9." in text


def test_only_samples_that_all_presses_answered_count(finished: tuple[RunConfig, RunResult]) -> None:
    results = read_run(finished[0].out)
    cells = [replace(cell, rows=cell.rows[:2], samples=2) if cell.press != "none" else cell for cell in results.cells]
    (board,) = make_boards(replace(results, cells=cells))
    assert [s.samples for s in board.summaries] == [4, 4]
    assert board.left_out == 2
    assert "2 others were left out" in page(replace(results, cells=cells))


def test_a_task_under_two_conditions_has_two_names(finished: tuple[RunConfig, RunResult]) -> None:
    results = read_run(finished[0].out)
    again = [changed(cell, filler="repeat") for cell in results.cells if cell.task == "vt"]
    (board,) = make_boards(replace(results, cells=[*results.cells, *again]))
    assert set(board.tasks) == {"niah_single", "vt (filler noise)", "vt (filler repeat)"}
    assert all(summary.difference or summary.press == "none" for summary in board.summaries)


def test_times_of_different_machines_are_not_compared(finished: tuple[RunConfig, RunResult]) -> None:
    results = read_run(finished[0].out)
    ((name, record),) = results.records.items()
    moved = [
        replace(cell, rows=[{**row, "measured": {**row["measured"], "run": "b"}} for row in cell.rows])
        if cell.press != "none"
        else cell
        for cell in results.cells
    ]
    elsewhere = Results(moved, {name: record, "b": {**record, "run": "b", "threads": 64}})
    text = page(elsewhere)
    assert Tags(text).tags.count("svg") == 2  # accuracy against memory, for screens and for phones
    assert "Times were not taken on the same kind of machine" in text


def test_a_row_that_is_valid_elsewhere_is_not_needed(copied: Path) -> None:
    """A row appended after the cell was done, as by a longer run that was stopped, is an additional sample."""
    folder = folder_of(copied, "none", "vt")
    row = json.loads((folder / "rows.jsonl").read_bytes().splitlines()[0])
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(encode_row({**row, "sample": "vt-256-0-99"}))
    (board,) = make_boards(read_run(copied))
    assert board.left_out == 1
    assert board.summaries[0].samples == 6


def test_every_pair_is_compared_on_the_same_samples() -> None:
    pairs = compare_all(CELLS, ORDER)
    assert [(pair.press, pair.other) for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    for pair in pairs:
        ours, theirs = SCORES[ORDER.index(pair.press)], SCORES[ORDER.index(pair.other)]
        groups = [list(zip(*rows, strict=True)) for rows in zip(ours.tolist(), theirs.tolist(), strict=True)]
        assert pair.difference == paired_difference(groups)
        assert pair.difference.mean == pytest.approx((ours - theirs).mean())
        assert pair.p_value == paired_p_value(groups)
    assert [pair.adjusted for pair in pairs] == holm([pair.p_value for pair in pairs])


def test_the_first_in_the_order_comes_first() -> None:
    ca_pair, *_ = compare_all(CELLS, ("c", "a"))
    ac_pair, *_ = compare_all(CELLS, ("a", "c"))
    assert ca_pair.difference.mean == -ac_pair.difference.mean
    assert ca_pair.p_value == pytest.approx(ac_pair.p_value, abs=0.015)  # drawn anew: three standard errors


def test_a_press_with_an_unfinished_cell_is_in_no_pair() -> None:
    cells = [
        replace(result, rows=result.rows[:5]) if (result.press, result.task) == ("b", "vt") else result
        for result in CELLS
    ]
    assert [(pair.press, pair.other) for pair in compare_all(cells, ORDER)] == [("a", "c")]
    assert compare_all(CELLS[:2], ("a",)) == []
