# SPDX-License-Identifier: Apache-2.0
"""The page of a run: offline, escaped, with its files beside it, and the command that writes it."""

from __future__ import annotations

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from kvpress_eval.common.errors import DataError, OutputError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.report.write import write_outputs
from kvpress_eval.results.read import read_run
from kvpress_eval.run.runner import RunResult
from pyarrow import parquet

from tests.eval.commands import invoke
from tests.eval.reports import ATTACK, Tags, page

FILES = {"report.html", "frontier.png", "frontier.svg", "frontier.pdf", "table.tex"} | {
    f"{name}.{kind}" for name in ("table", "pairs", "samples") for kind in ("csv", "parquet")
}
DOCS = Path(__file__).parents[3] / "docs" / "report.md"


def test_the_report_is_one_offline_file(finished: tuple[RunConfig, RunResult]) -> None:
    tags = Tags(page(read_run(finished[0].out)))
    assert tags.tags.count("svg") == 4  # of both frontiers, for screens and for phones
    assert tags.tags.count("script") == 1
    assert "link" not in tags.tags
    assert {link for link in tags.links if not link.startswith("#")} == set()
    assert {link.removeprefix("#") for link in tags.links} <= set(tags.names)
    assert len(tags.names) == len(set(tags.names))
    assert tags.tags.count("details") == 3


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
    (pair,) = parquet.read_table(copied / "page" / "pairs.parquet").to_pylist()
    assert (pair["press"], pair["other"]) == ("none", "random:0.5")
    assert pair["difference"] == pytest.approx(-half["difference"])
    assert pair["p_value"] == pytest.approx(half["p_value"])


def test_how_it_was_measured_is_for_people(finished: tuple[RunConfig, RunResult]) -> None:
    text = page(read_run(finished[0].out))
    footer = text[text.index('<section id="measured">') :]
    assert "<dt>samples</dt>" in footer
    assert "<dd>no" in footer  # question aware
    assert "None" not in footer
    values = re.sub(r"<dt>(kvpress|torch|transformers|python|triton)</dt> <dd>.*?</dd>", "", footer)
    assert not re.search(r"\d\.\d{6}", values)


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


def test_the_command_skips_folders_without_a_run(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    out = tmp_path / "both.html"
    code, output = invoke("report", copied, tmp_path / "notes", "--out", out)
    assert code == 0, output
    assert "skipped" in output
    assert out.exists()
    assert invoke("report", copied)[0] == 0
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
        got, output = invoke("report", *arguments)
        assert (got, message in output) == (code, True), output
    with pytest.raises(DataError, match="not the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(OutputError):
        write_outputs([copied], tmp_path)


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
