from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kvpress_eval.config import RunConfig
from kvpress_eval.frontier import MEMORY, Point, frontier, frontier_svg, write_frontier_png
from kvpress_eval.report import pieces, write_report
from kvpress_eval.results import CellResult
from kvpress_eval.runner import RunResult, run
from kvpress_eval.summary import PressSummary, summarise
from kvpress_eval.table import print_table, to_csv, to_markdown
from matplotlib import image
from rich.console import Console

ATTACK = "<script>alert('x')</script> & \ud800 \u202e"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


@pytest.fixture
def summaries(finished: tuple[RunConfig, RunResult]) -> list[PressSummary]:
    return summarise(finished[1].cells)


def with_rows(cells: Sequence[CellResult], **fields: object) -> list[CellResult]:
    return [replace(cell, rows=[{**row, **fields} for row in cell.rows]) for cell in cells]


def test_the_report_is_one_offline_file(finished: tuple[RunConfig, RunResult], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(finished[1], path)
    page = Tags(path.read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 2
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert page.tags.count("details") == 2


def test_model_output_is_escaped(finished: tuple[RunConfig, RunResult], tmp_path: Path) -> None:
    _, result = finished
    cells = with_rows(result.cells, prediction=ATTACK)
    cells = [
        replace(cell, kept=cell.kept and {**cell.kept, "question": ATTACK, "text": ATTACK + cell.kept["text"]})
        for cell in cells
    ]
    cells[0] = replace(cells[0], rows=[], failure={"status": "error", "message": ATTACK, "details": ""})
    path = tmp_path / "report.html"
    write_report(replace(result, cells=cells), path)
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "script" not in Tags(text).tags


def test_press_names_are_escaped_in_plots() -> None:
    assert "<script" not in frontier_svg([Point("<script>", 50, 90, 80, 95)], MEMORY)


def test_a_missing_result_is_never_a_number(finished: tuple[RunConfig, RunResult], tmp_path: Path) -> None:
    _, result = finished
    failure = {"status": "oom", "message": "out of memory", "details": ""}
    cells = [replace(cell, rows=[], failure=failure) if cell.cell.press != "none" else cell for cell in result.cells]
    none, half = summarise(cells)
    assert none.accuracy is not None
    assert (half.accuracy, half.bytes, half.factor, half.milliseconds_per_token) == (None,) * 4
    assert half.tasks == {"niah_single": None, "vt": None}
    assert half.problems == ("niah_single 256: oom: out of memory", "vt 256: oom: out of memory")
    line = next(line for line in to_markdown([none, half]).splitlines() if line.startswith("| random"))
    assert set(line.split("|")[2:-1]) == {" - "}
    write_report(replace(result, cells=cells), tmp_path / "report.html")
    write_frontier_png([half], tmp_path / "empty.png")


def test_summaries_compare_with_none(summaries: list[PressSummary]) -> None:
    none, half = summaries
    assert none.difference is None
    assert none.accuracy is not None
    assert half.accuracy is not None
    assert half.difference is not None
    assert half.difference.mean == pytest.approx(half.accuracy.mean - none.accuracy.mean)
    assert half.factor == pytest.approx(2, abs=0.3)
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
    table = list(csv.DictReader(io.StringIO(to_csv(summaries))))
    assert [line["press"] for line in table] == ["none", "random:0.5"]
    assert float(table[1]["factor"]) == summaries[1].factor


def test_the_frontier_is_what_nothing_beats() -> None:
    points = [Point(name, cost, accuracy, 0, 0) for name, cost, accuracy in (
        ("full", 100, 90), ("beaten", 60, 50), ("half", 50, 80), ("worse half", 50, 70), ("tiny", 10, 20),
    )]  # fmt: skip
    assert [point.label for point in frontier(points)] == ["tiny", "half", "full"]


def test_png(summaries: list[PressSummary], tmp_path: Path) -> None:
    path = tmp_path / "frontier.png"
    write_frontier_png(summaries, path)
    assert image.imread(path).shape[:2] == (750, 1950)


def test_pieces_merge_what_looks_alike() -> None:
    text, offsets = "abc def.", [(0, 0), (0, 3), (3, 7), (7, 8)]
    assert pieces(text, offsets, "ff0f", [(4, 8)]) == [("abc", 15, False), (" def", 0, True), (".", 15, True)]
    assert "".join(piece for piece, _, _ in pieces(text, offsets, "0000", [])) == text


def test_a_grid_of_depths_is_a_heat_map(tmp_path: Path) -> None:
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
    _, line = csv.DictReader(io.StringIO(to_csv([none, recent])))
    assert float(line["niah_single 256, depth 0.1"]) == 0
    assert float(line["niah_single 256, depth 1"]) == 1
    path = tmp_path / "report.html"
    write_report(result, path)
    text = path.read_text(encoding="utf-8")
    heading = "Accuracy by depth and length"
    assert text.count("<caption>") == 2
    section = text[text.index(heading) : text.index("What was kept")]
    assert section.count("<td style=") == 8
    failed = replace(result, cells=[replace(cell, rows=[]) for cell in result.cells])
    write_report(failed, path)
    assert heading in path.read_text(encoding="utf-8")
    assert set(summarise(failed.cells)[0].grid.values()) == {None}
