# SPDX-License-Identifier: Apache-2.0
"""The figures of each press, as tables, exported records, plots and heat maps."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.report.frontier import MEMORY, Point, frontier, frontier_files, frontier_svg
from kvpress_eval.report.lines import AccuracyLine, length_lines, line_files, ratio_lines, split_ratio
from kvpress_eval.report.table import escaped, markdown, print_table, records, to_latex, to_markdown
from kvpress_eval.report.write import to_csv, to_parquet
from kvpress_eval.results.read import read_run
from kvpress_eval.results.stats import ScoreInterval
from kvpress_eval.results.summary import PressSummary, conclusion, summarise
from kvpress_eval.results.verdict import judge, points
from kvpress_eval.run.runner import RunResult, run
from matplotlib import image
from pyarrow import parquet
from rich.console import Console

from tests.eval.reports import ATTACK, page


@pytest.fixture
def summaries(finished: tuple[RunConfig, RunResult]) -> list[PressSummary]:
    return summarise(finished[1].cells)


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
    assert frontier_files([half])["frontier.png"]


def test_the_conclusion_names_the_smallest_press_within_the_margin(summaries: list[PressSummary]) -> None:
    none, half = summaries
    assert half.verdict is not None
    assert half.verdict.change.mean == pytest.approx(half.difference and half.difference.mean)
    assert half.verdict.samples == 6

    def press(name: str, factor: float, change: float) -> PressSummary:
        verdict = judge(name, factor, [[change - 0.01, change, change + 0.01] * 20], points())
        return replace(half, press=name, verdict=verdict)

    lossy, small, smaller = press("a", 50, -0.2), press("b", 4, 0.0), press("c", 9.96, -0.02)
    text = conclusion([none, lossy, small, smaller])
    assert text == (
        "Smallest cache that loses at most 3 points: c: 10.0 times smaller; loses at most 3 points (95% interval -2.2 to -1.8, "
        "60 samples)."
    )
    assert str(conclusion([none, lossy])).startswith("Every press that holds less loses more than 3 points here")
    assert conclusion([none, press("larger", 0.9, 0.0)]) is None
    assert conclusion([lossy, small]) is None
    assert conclusion([none]) is None
    nothing = replace(none, accuracy=ScoreInterval(0.0, 0.0, 0.3))
    assert str(conclusion([nothing, small])).startswith("No ranking: the full cache answers 0.0%")


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


def test_answers_are_compared_with_those_of_none(finished: tuple[RunConfig, RunResult]) -> None:
    cells = [cell for cell in finished[1].cells if cell.press == "none"]
    copies = [replace(cell, spec={**cell.spec, "press": "copy"}) for cell in cells]
    none, copy = summarise([*cells, *copies])
    assert (none.same_answers, copy.same_answers) == (None, 1.0)
    first, *others = copies
    rows = [{**row, "prediction": "something else"} for row in first.rows]
    total = sum(len(cell.rows) for cell in copies)
    (_, changed) = summarise([*cells, replace(first, rows=rows), *others])
    assert changed.same_answers == pytest.approx(1 - len(rows) / total)


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
    rows = parquet.read_table(path).to_pylist()
    assert [row["a"] for row in rows] == [1, 1.5, None]
    assert [row["d"] for row in rows] == [None, '"text"', '{"e": 1}']
    assert rows[0]["b"][0] == "x"
    assert next(csv.DictReader(io.StringIO(to_csv(mixed).decode())))["b"].startswith('["x"')


def test_the_frontier_has_the_presses_that_no_other_beats() -> None:
    points = [Point(name, cost, accuracy, 0, 0) for name, cost, accuracy in (
        ("full", 100, 90), ("beaten", 60, 50), ("half", 50, 80), ("worse half", 50, 70), ("tiny", 10, 20),
    )]  # fmt: skip
    assert [point.label for point in frontier(points)] == ["tiny", "half", "full"]


def test_plots_are_files_of_three_formats(summaries: list[PressSummary], tmp_path: Path) -> None:
    files = frontier_files(summaries)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert image.imread(tmp_path / "frontier.png").shape[:2] == (750, 1950)
    assert ElementTree.parse(tmp_path / "frontier.svg").getroot().tag.endswith("svg")  # noqa: S314 - our own text
    assert files["frontier.pdf"].startswith(b"%PDF")
    assert frontier_files(summaries) == files


@pytest.mark.parametrize(
    ("press", "family", "ratio"),
    [
        ("snapkv:0.5", "snapkv:{ratio}", 0.5),
        ("adakv(expected_attention:.25,epsilon=0.02)", "adakv(expected_attention:{ratio},epsilon=0.02)", 0.25),
        ("knorm:0", "knorm:{ratio}", 0.0),
        ("snapkv:compression_ratio=0.75", "snapkv:compression_ratio={ratio}", 0.75),
        ("snapkv:window_size=8,compression_ratio=0.75", "snapkv:window_size=8,compression_ratio={ratio}", 0.75),
        ("snapkv:0.5 + kivi:bits=4", "snapkv:{ratio} + kivi:bits=4", 0.5),
        ("snapkv:0.5 + knorm:0.5", "snapkv:0.5 + knorm:0.5", None),
        ("kivi:4", "kivi:4", None),
        ("none", "none", None),
        ("snapkv", "snapkv", None),
    ],
)
def test_ratios_in_the_names_of_presses(press: str, family: str, ratio: float | None) -> None:
    assert split_ratio(press) == (family, ratio)


def test_lines_over_lengths_and_ratios(summaries: list[PressSummary]) -> None:
    none, half = summaries
    assert none.accuracy is not None
    assert length_lines(summaries) == ratio_lines(summaries) == []  # one length, one ratio
    assert line_files(summaries) == {}
    long = replace(half, lengths={512: 0.25, 128: 0.5, 256: None})
    assert length_lines([long]) == [AccuracyLine("random:0.5", {128: 0.5, 512: 0.25})]
    less = replace(half, press="random:0.75", accuracy=ScoreInterval(0.1, 0.0, 0.2))
    (line,) = ratio_lines([less, none, half])
    assert half.accuracy is not None
    assert line == AccuracyLine("random:{ratio}", {0.0: none.accuracy.mean, 0.5: half.accuracy.mean, 0.75: 0.1})
    files = line_files([none, long, less])
    assert set(files) == {f"{name}.{kind}" for name in ("lengths", "ratios") for kind in ("png", "svg", "pdf")}
    assert line_files([none, long, less]) == files
    assert "random:{ratio}" in files["ratios.svg"].decode()


def test_latex(summaries: list[PressSummary]) -> None:
    none, half = summaries
    lines = to_latex([none, replace(half, press="a_b:50%")]).splitlines()
    assert lines[:2] == [r"\begin{tabular}{lrrrlrrrrrr}", r"\toprule"]
    assert lines[5].startswith(r"a\_b:50\% & ")
    assert {line.count(" & ") for line in lines if line.endswith(r"\\")} == {10}
    assert lines[-2] == r"\end{tabular}"


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [("niah_single", "niah_single"), ("a|b", r"a\|b"), ("[a](b)", r"\[a\](b)"), ("<b>", r"\<b\>"), ("a\nb", "a b"),
     ("`x`", r"\`x\`"),
     ("_x_ *y*", r"\_x\_ \*y\*"), ("+1.2*", "+1.2*"), ("a\\|b", r"a\\\|b")],
)  # fmt: skip
def test_names_mean_nothing_to_markdown(text: str, expected: str) -> None:
    assert escaped(text) == expected
    table = markdown(["press", text], ["---", "---:"], [[text, "1"]], "note")
    head, rule, row = table.splitlines()[:3]
    assert [head, rule, row] == [f"| press | {expected} |", "| --- | ---: |", f"| {expected} | 1 |"]
