# SPDX-License-Identifier: Apache-2.0
"""Results are read back as measured; damaged and unfinished ones and those of another version are reported."""

from __future__ import annotations

import json
from pathlib import Path

from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.leaderboards import make_boards
from kvpress_eval.results.read import read_run, read_runs
from kvpress_eval.results.summary import summarise
from kvpress_eval.run.runner import RunResult

from tests.eval.reports import folder_of, page


def test_results_are_read_back_as_measured(finished: tuple[RunConfig, RunResult]) -> None:
    config, result = finished
    (board,) = make_boards(read_run(config.out))
    assert {s.press: s for s in board.summaries} == {s.press: s for s in summarise(result.cells)}
    assert not board.left_out
    assert board.comparable_times


def test_damaged_and_unfinished_cells_are_reported_and_not_averaged(copied: Path) -> None:
    damaged, unfinished = (folder_of(copied, "random:0.5", task) for task in ("niah_single", "vt"))
    lines = (damaged / "rows.jsonl").read_bytes()
    (damaged / "rows.jsonl").write_bytes(lines.replace(b'"score"', b'"scare"', 1))
    (unfinished / "done.json").unlink()
    (board,) = make_boards(read_run(copied))
    none, half = board.summaries
    assert none.accuracy is not None
    assert half.accuracy is None
    assert half.problems == ("niah_single 256: 1 damaged rows; run it again", "vt 256: unfinished, 3 samples")


def test_broken_files_do_not_stop_a_report(copied: Path) -> None:
    spec = folder_of(copied, "random:0.5", "vt") / "cell.json"
    spec.write_text("{")
    for folder in copied.glob("cells/*"):
        (folder / "kept.json").write_bytes(b"\xff")
    with (copied / "runs.jsonl").open("a") as file:
        file.write('{"run": "torn')
    results = read_run(copied)
    assert len(results.cells) == 3
    assert results.problems == [f"{spec.parent}: cell.json is damaged; remove the folder and run the cell again"]
    text = page(results)
    assert "cell.json is damaged" in text
    assert "What was kept" not in text


def test_results_of_another_version_are_left_out(copied: Path) -> None:
    path = folder_of(copied, "random:0.5", "vt") / "cell.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 1}))
    assert "written by another version" in read_run(copied).problems[0]


def test_several_runs_are_merged(copied: Path, finished: tuple[RunConfig, RunResult], tmp_path: Path) -> None:
    """The copy with more results counts, in either order."""
    first_run = read_run(finished[0].out)
    (folder_of(copied, "none", "vt") / "done.json").unlink()
    for folders in ([copied, finished[0].out], [finished[0].out, copied]):
        results = read_runs(folders)
        assert len(results.cells) == 4
        assert all(cell.complete for cell in results.cells)
        assert results.records == first_run.records
