from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from kvpress_eval.boards import Board, make_boards
from kvpress_eval.commands.report import report_command
from kvpress_eval.config import RunConfig
from kvpress_eval.errors import DataError, OutputError
from kvpress_eval.export import to_csv, to_parquet
from kvpress_eval.frontier import MEMORY, Point, frontier, frontier_svg, write_frontier_png
from kvpress_eval.report import to_html, write_outputs
from kvpress_eval.results import CellResult, Results, read_run, read_runs
from kvpress_eval.runner import RunResult, run
from kvpress_eval.store import encode_row
from kvpress_eval.summary import PressSummary, summarise
from kvpress_eval.table import print_table, records, to_markdown
from matplotlib import image
from pyarrow import parquet
from rich.console import Console
from typer.testing import CliRunner

ATTACK = "<script>alert('x')</script> & \ud800 \u202e"
FILES = {"report.html", "frontier.png"} | {
    f"{name}.{kind}" for name in ("table", "samples") for kind in ("csv", "parquet")
}

DOCS = Path(__file__).parents[2] / "docs" / "report.md"

app = typer.Typer()
app.command()(report_command)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.names: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.names += [value or "" for name, value in attrs if name == "id"]


@pytest.fixture
def summaries(finished: tuple[RunConfig, RunResult]) -> list[PressSummary]:
    return summarise(finished[1].cells)


@pytest.fixture
def copied(finished: tuple[RunConfig, RunResult], tmp_path: Path) -> Path:
    """The folder of a finished run, to be changed."""
    return Path(shutil.copytree(finished[0].out, tmp_path / "copied"))


def page(results: Results) -> str:
    return to_html(results, make_boards(results), ["here"])


def folder_of(out: Path, press: str, task: str) -> Path:
    specs = {path.parent: json.loads(path.read_text()) for path in out.glob("cells/*/cell.json")}
    return next(folder for folder, spec in specs.items() if (spec["press"], spec["task"]) == (press, task))


def changed(cell: CellResult, **spec: Any) -> CellResult:
    return replace(cell, spec={**cell.spec, **spec})


def covers(board: Board) -> dict[str, set[str]]:
    return {s.press: set(s.tasks) for s in board.summaries}


def test_what_is_read_back_is_what_was_measured(finished: tuple[RunConfig, RunResult]) -> None:
    config, result = finished
    (board,) = make_boards(read_run(config.out))
    assert {s.press: s for s in board.summaries} == {s.press: s for s in summarise(result.cells)}
    assert not board.left_out
    assert board.comparable_times


def test_the_report_is_one_offline_file(finished: tuple[RunConfig, RunResult]) -> None:
    tags = Tags(page(read_run(finished[0].out)))
    assert tags.tags.count("svg") == 2
    assert tags.tags.count("script") == 1
    assert "link" not in tags.tags
    assert {link for link in tags.links if not link.startswith("#")} == set()
    assert {link.removeprefix("#") for link in tags.links} <= set(tags.names)
    assert len(tags.names) == len(set(tags.names))
    assert tags.tags.count("details") == 2


def test_all_files_are_written(copied: Path) -> None:
    written = write_outputs([copied], copied / "page" / "report.html")
    assert {path.name for path in written} == FILES | {"table.md"}
    assert all(path.stat().st_size for path in written)
    samples = parquet.read_table(copied / "page" / "samples.parquet").to_pylist()
    assert len(samples) == 12
    assert {row["press"] for row in samples} == {"none", "random:0.5"}
    assert all(row["dtype"] and row["expected"] and row["prefill_seconds"] for row in samples)
    (_, half) = parquet.read_table(copied / "page" / "table.parquet").to_pylist()
    (_, same) = csv.DictReader((copied / "page" / "table.csv").open())
    assert float(same["factor"]) == half["factor"]
    assert (half["board"], half["model"], half["press"]) == (1, "reference", "random:0.5")


def test_model_output_is_escaped(finished: tuple[RunConfig, RunResult]) -> None:
    results = read_run(finished[0].out)
    cells = [
        replace(
            cell,
            rows=[{**row, "prediction": ATTACK} for row in cell.rows],
            kept=cell.kept and {**cell.kept, "question": ATTACK, "tokens": [ATTACK, *cell.kept["tokens"][1:]]},
        )
        for cell in results.cells
    ]
    cells[0] = replace(cells[0], rows=[], failure={"status": "error", "message": ATTACK, "details": ""})
    text = page(replace(results, cells=cells, problems=[ATTACK]))
    assert text.count("&lt;script&gt;") >= 4
    assert Tags(text).tags.count("script") == 1
    assert "<script>alert" not in text


def test_press_names_are_escaped_in_plots() -> None:
    assert "<script" not in frontier_svg([Point("<script>", 50, 90, 80, 95)], MEMORY)


def test_a_missing_result_is_never_a_number(finished: tuple[RunConfig, RunResult], tmp_path: Path) -> None:
    results = read_run(finished[0].out)
    failure = {"status": "oom", "message": "out of memory", "details": ""}
    cells = [replace(cell, rows=[], failure=failure) if cell.press != "none" else cell for cell in results.cells]
    none, half = summarise(sorted(cells, key=lambda cell: (cell.press, cell.task)))
    assert none.accuracy is not None
    assert (half.accuracy, half.p_value, half.bytes, half.factor, half.milliseconds_per_token) == (None,) * 5
    assert half.tasks == {"niah_single": None, "vt": None}
    assert half.problems == ("niah_single 256: oom: out of memory", "vt 256: oom: out of memory")
    line = next(line for line in to_markdown([none, half]).splitlines() if line.startswith("| random"))
    assert set(line.split("|")[2:-1]) == {" - "}
    assert "oom: out of memory" in page(replace(results, cells=cells))
    write_frontier_png([half], tmp_path / "empty.png")


def test_damaged_and_unfinished_cells_are_told_and_not_averaged(copied: Path) -> None:
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
    """The copy with more results counts, whichever comes first."""
    whole = read_run(finished[0].out)
    (folder_of(copied, "none", "vt") / "done.json").unlink()
    for folders in ([copied, finished[0].out], [finished[0].out, copied]):
        results = read_runs(folders)
        assert len(results.cells) == 4
        assert all(cell.complete for cell in results.cells)
        assert results.records == whole.records


def test_presses_are_ranked_on_the_same_places_only(finished: tuple[RunConfig, RunResult]) -> None:
    results = read_run(finished[0].out)
    extra = [changed(cell, press="tova:0.5") for cell in results.cells if (cell.press, cell.task) == ("none", "vt")]
    both, one = make_boards(replace(results, cells=[*results.cells, *extra]))
    assert covers(both) == {"none": {"niah_single", "vt"}, "random:0.5": {"niah_single", "vt"}}
    assert covers(one) == {"none": {"vt"}, "random:0.5": {"vt"}, "tova:0.5": {"vt"}}
    assert all(board.summaries[1].difference for board in (both, one))


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


def test_a_task_asked_in_two_ways_has_two_names(finished: tuple[RunConfig, RunResult]) -> None:
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
    assert Tags(text).tags.count("svg") == 1
    assert "Times were not taken on the same kind of machine" in text


def test_summaries_compare_with_none(summaries: list[PressSummary]) -> None:
    none, half = summaries
    assert none.difference is none.p_value is None
    assert none.accuracy is not None
    assert half.accuracy is not None
    assert half.difference is not None
    assert half.difference.mean == pytest.approx(half.accuracy.mean - none.accuracy.mean)
    assert half.factor == pytest.approx(2, abs=0.3)
    assert half.end_factor is not None
    assert 1 < half.end_factor < 2
    assert none.samples == half.samples == 6


def test_tables(summaries: list[PressSummary]) -> None:
    for width in (80, 120):
        console = Console(file=io.StringIO(), width=width)
        print_table(summaries, console)
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert any(line.startswith("random:0.5") for line in lines)
    assert to_markdown(summaries).count("\n| ") == 3
    table = list(csv.DictReader(io.StringIO(to_csv(records(summaries)).decode())))
    assert [line["press"] for line in table] == ["none", "random:0.5"]
    assert float(table[1]["factor"]) == summaries[1].factor


def test_records_of_any_kind_become_files(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    mixed: Sequence[dict[str, Any]] = [
        {"a": 1, "b": ["x", ATTACK]},
        {"c": None, "a": 1.5, "d": "text"},
        {"d": {"e": 1}},
    ]
    path.write_bytes(to_parquet(mixed))
    found = parquet.read_table(path).to_pylist()
    assert [row["a"] for row in found] == [1, 1.5, None]
    assert [row["d"] for row in found] == [None, '"text"', '{"e": 1}']
    assert found[0]["b"][0] == "x"
    assert next(csv.DictReader(io.StringIO(to_csv(mixed).decode())))["b"].startswith('["x"')


def test_the_frontier_is_what_nothing_beats() -> None:
    points = [Point(name, cost, accuracy, 0, 0) for name, cost, accuracy in (
        ("full", 100, 90), ("beaten", 60, 50), ("half", 50, 80), ("worse half", 50, 70), ("tiny", 10, 20),
    )]  # fmt: skip
    assert [point.label for point in frontier(points)] == ["tiny", "half", "full"]


def test_png(summaries: list[PressSummary], tmp_path: Path) -> None:
    path = tmp_path / "frontier.png"
    write_frontier_png(summaries, path)
    assert image.imread(path).shape[:2] == (750, 1950)


def test_a_grid_of_depths_and_lengths_is_a_heat_map(tmp_path: Path) -> None:
    config = RunConfig(
        presses=("none", "streaming_llm:0.5"),
        tasks=("niah_single", "cwe"),
        lengths=(128, 256),
        depths=(0.1, 1.0),
        samples=2,
        threads=1,
        out=tmp_path,
    )
    result = run(config, Console(file=io.StringIO()))
    none, recent = summarise(result.cells)
    assert none.grid == {("niah_single", n, depth): 1.0 for n in (128, 256) for depth in (0.1, 1.0)}
    assert recent.grid["niah_single", 256, 1.0] == 1
    assert recent.grid["niah_single", 256, 0.1] == 0
    assert recent.samples == 2 * (4 + 2)
    assert set(recent.lengths) == {128, 256}
    _, line = records([none, recent])
    assert line["niah_single 256, depth 0.1"] == 0
    assert line["niah_single 256, depth 1"] == 1
    assert line["length 256"] == recent.lengths[256]
    results = read_run(tmp_path)
    text = page(results)
    section = text[text.index("Accuracy by depth and length") : text.rindex("What was kept")]
    assert section.count("<caption>") == 2
    assert section.count('<td style="--v:') == 8
    assert "Accuracy by length" in text
    lost = replace(results, cells=[replace(cell, rows=[]) for cell in results.cells])
    assert "Accuracy by depth and length" in page(lost)
    assert set(summarise(lost.cells)[0].grid.values()) == {None}


def test_the_command_skips_what_is_no_run(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    out = tmp_path / "both.html"
    done = CliRunner().invoke(app, [str(copied), str(tmp_path / "notes"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "skipped" in done.output
    assert out.exists()
    assert CliRunner().invoke(app, [str(copied)]).exit_code == 0
    assert (copied / "report.html").exists()


def test_mistakes_have_messages_and_exit_codes(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "empty" / "cells").mkdir(parents=True)
    (tmp_path / "file").touch()
    for arguments, code, message in (
        ([str(tmp_path / "nothing")], 3, "there is no"),
        ([str(tmp_path / "notes")], 3, "none of these is the folder of a run"),
        ([str(tmp_path / "empty")], 3, "no results in"),
        ([str(copied), "--out", str(tmp_path / "notes")], 4, "is a folder; name a file"),
        ([str(copied), "--out", str(tmp_path / "file" / "report.html")], 4, "cannot write"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, message in done.output) == (code, True), done.output
    with pytest.raises(DataError, match="not the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(OutputError):
        write_outputs([copied], tmp_path)


def test_a_row_that_is_valid_elsewhere_is_not_needed(copied: Path) -> None:
    """A row appended after the cell was done, as by a longer run that was stopped, is one more sample."""
    folder = folder_of(copied, "none", "vt")
    row = json.loads((folder / "rows.jsonl").read_bytes().splitlines()[0])
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(encode_row({**row, "sample": "vt-256-0-99"}))
    (board,) = make_boards(read_run(copied))
    assert board.left_out == 1
    assert board.summaries[0].samples == 6


def test_the_example_of_the_page_runs(
    finished: tuple[RunConfig, RunResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("evict", "quantise"):
        shutil.copytree(finished[0].out, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    exec(compile(block, "report.md", "exec"), {})  # noqa: S102 - our own text
    assert "random:0.5" in capsys.readouterr().out
