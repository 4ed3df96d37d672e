# SPDX-License-Identifier: Apache-2.0
"""Records of other commands than `kvpress eval` in reports: one table for equal conditions, bad records are named."""

from __future__ import annotations

import copy
import csv
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvpress_eval.common.errors import DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.measure import measure
from kvpress_eval.recall.facts import FactSettings
from kvpress_eval.recall.figures import Margins
from kvpress_eval.recall.measure import measure as measure_recall
from kvpress_eval.report import recall_plot
from kvpress_eval.report.comparison_tables import Sheet, make_sheets
from kvpress_eval.report.html import to_html
from kvpress_eval.report.write import find_sources, read_report, write_outputs
from kvpress_eval.results.records import FIDELITY, LM_EVAL, RECALL, Records, check_records, find_records
from kvpress_eval.results.verdict import nats, points
from kvpress_eval.run.runner import RunResult
from playwright import sync_api as playwright
from pyarrow import parquet
from rich.console import Console

from tests.eval.commands import invoke
from tests.eval.reports import Tags

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PRESSES = ("snapkv:0.5", "none", "kivi:bits=2,group_size=16,residual_length=0")


@pytest.fixture(scope="module")
def fidelity_record() -> dict[str, Any]:
    config = RunConfig(presses=PRESSES, lengths=(64,), samples=2, batch_size=2, threads=1)
    return measure(config, tokens=4, text=None, console=Console(quiet=True), layers=True)


@pytest.fixture
def fidelity(fidelity_record: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(fidelity_record)


@pytest.fixture(scope="module")
def recall_record() -> dict[str, Any]:
    config = RunConfig(presses=PRESSES, lengths=(128, 192), samples=2, threads=1)
    return measure_recall(config, FactSettings(2), Margins(points(), nats()), Console(quiet=True))


@pytest.fixture
def recall(recall_record: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(recall_record)


@pytest.fixture
def lm_eval(fidelity: dict[str, Any]) -> dict[str, Any]:
    """A record as `kvpress lm-eval` writes it, with two metrics and a group."""
    kept = {key: value for key, value in fidelity.items() if key not in ("rows", "context", "tokens", "chunk", "texts")}
    presses = [
        {
            "press": press,
            "held": {"prompts": 3, "bytes_per_prompt": 10.0, "bits_per_value": bits},
            "results": {"codes": {"alias": "codes", "acc,none": value, "acc_stderr,none": 0.125, "f1,strip": 0.5}},
            "groups": {"all": {"acc,none": value, "acc_stderr,none": "N/A"}},
            "n-samples": {"codes": {"original": 40, "effective": 3}},
        }
        for press, value, bits in (("none", 1.0, 16.0), ("snapkv:0.5", 0.25, 8.1))
    ]
    settings = {"model": "reference", "batch_size": 1, "tasks": ["codes"], "limit": 3, "metadata": {}}
    return {**kept, "run": "0123", "kind": LM_EVAL, "lm_eval": "0.4.13", "config": settings, "presses": presses}


def write(folder: Path, **records: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, record in records.items():
        (folder / f"{name}.json").write_text(record if isinstance(record, str) else json.dumps(record))
    return folder


def sheets(folder: Path) -> list[Sheet]:
    return make_sheets(read_records([folder]))


def read_records(paths: Sequence[Path]) -> Records:
    return check_records(find_sources(paths).records)


def changed(record: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A record of another invocation."""
    return {**copy.deepcopy(record), "run": f"{record['run']}-{sorted(fields)}", **fields}


def test_figures_of_a_record_are_a_table_closest_first(tmp_path: Path, fidelity: dict[str, Any]) -> None:
    (sheet,) = sheets(write(tmp_path, one=fidelity))
    rows = {row["press"]: row for row in fidelity["rows"]}
    assert [press for press, _ in sheet.rows] == sorted(rows, key=lambda press: rows[press]["kl_mean"])
    cells = dict(sheet.rows)["snapkv:0.5"]
    cell_of = {column: cell for column, cell in zip(sheet.columns, cells, strict=True)}
    assert cell_of["KL mean"] == (f"{rows['snapkv:0.5']['kl_mean']:.5f}", rows["snapkv:0.5"]["kl_mean"])
    assert cell_of["same top token %"][0] == f"{100 * rows['snapkv:0.5']['top1_agreement']:.1f}"
    assert cell_of["attention recall %"][1] == rows["snapkv:0.5"]["attention_recall"]
    assert f"{rows['none']['full_perplexity']:.3f}" in sheet.note
    assert [line["press"] for line in sheet.lines] == [press for press, _ in sheet.rows]
    assert not any(isinstance(value, list) for line in sheet.lines for value in line.values())


def test_scores_of_a_record_are_a_table(tmp_path: Path, lm_eval: dict[str, Any]) -> None:
    (sheet,) = sheets(write(tmp_path, one=lm_eval))
    assert sheet.columns == ["codes: acc", "codes: f1 (strip)", "all: acc", "bits/value"]
    assert dict(sheet.rows)["snapkv:0.5"] == [
        ("0.2500 ± 0.1250", 0.25),
        ("0.5000", 0.5),
        ("0.2500", 0.25),
        ("8.10", 8.1),
    ]
    assert len(sheet.lines) == 6
    assert sheet.lines[3] == {
        "press": "snapkv:0.5",
        "task": "codes",
        "metric": "acc",
        "value": 0.25,
        "standard_error": 0.125,
        "samples": 3,
        "bits_per_value": 8.1,
    }


def test_only_records_of_equal_conditions_share_a_table(tmp_path: Path, fidelity: dict[str, Any]) -> None:
    """Records with other texts, another length, another model or version are not compared."""
    others = {"texts": "0", "context": 65, "tokens": 5, "chunk": 2, "weights": "0", "kvpress": "0", "dtype": "float16"}
    records = {key: changed(fidelity, **{key: value}) for key, value in others.items()}
    records["batch"] = changed(fidelity, config={**fidelity["config"], "batch_size": 1})
    tables = sheets(write(tmp_path, first=fidelity, **records))
    assert len(tables) == 1 + len(records)
    assert all(len(sheet.rows) == len(PRESSES) for sheet in tables)
    conditions = {(sheet.name, json.dumps(sheet.details)) for sheet in tables}
    assert len(conditions) == len(tables)


def test_tasks_of_lm_eval_are_compared_under_the_same_settings(tmp_path: Path, lm_eval: dict[str, Any]) -> None:
    settings = [
        {"limit": 4},
        {"num_fewshot": 2},
        {"chat_template": True},
        {"metadata": {"a": 1}},
        {"tasks": ["codes", "b"]},
    ]
    others = {
        str(number): changed(lm_eval, config={**lm_eval["config"], **fields}, date=str(number)) | {"run": str(number)}
        for number, fields in enumerate(settings)
    }
    assert len(sheets(write(tmp_path, first=lm_eval, **others))) == 1 + len(settings)


def test_presses_of_several_records_stand_together_the_newer_figures_counting(
    tmp_path: Path, fidelity: dict[str, Any]
) -> None:
    row = next(row for row in fidelity["rows"] if row["press"] == "snapkv:0.5")
    without_layers = {
        key: value for key, value in row.items() if not key.startswith(("output_", "isolated_", "attention_"))
    }
    newer = changed(
        fidelity,
        date="2999-01-01T00:00:00+00:00",
        rows=[{**row, "kl_mean": 0.125}, {**without_layers, "press": "h2o:0.5", "kl_mean": 99.0}],
    )
    for names in (("a", "b"), ("b", "a")):
        folder = write(tmp_path / names[0], **dict(zip(names, (newer, fidelity), strict=True)))
        (sheet,) = sheets(folder)
        assert {press for press, _ in sheet.rows} == {*PRESSES, "h2o:0.5"}
        assert dict(sheet.rows)["snapkv:0.5"][0] == ("0.12500", 0.125)
        press, cells = sheet.rows[-1]
        assert press == "h2o:0.5"
        assert cells[-3:] == [("-", None)] * 3  # its layers were not measured
        assert len(sheet.records) == 2


def test_a_report_of_runs_and_records(
    finished: tuple[RunConfig, RunResult], tmp_path: Path, fidelity: dict[str, Any], lm_eval: dict[str, Any]
) -> None:
    run = Path(shutil.copytree(finished[0].out, tmp_path / "run"))
    write(run, scores=lm_eval)
    write(tmp_path, fidelity=fidelity)
    code, output = invoke("report", run, tmp_path / "fidelity.json", "--out", tmp_path / "page" / "report.html")
    assert code == 0, output
    assert "skipped" not in output
    for text_shown in (
        "random:0.5",
        "KL",
        "codes",
        "0.2500",
        f"perplexity of the full cache: {fidelity['rows'][0]['full_perplexity']:.3f}",
    ):
        assert text_shown in output
    text = (tmp_path / "page" / "report.html").read_text()
    tags = Tags(text)
    assert {"fidelity", "lm-eval", "measured", "board-1-leaderboard"} <= set(tags.names)
    assert {link.removeprefix("#") for link in tags.links} <= set(tags.names)
    assert len(tags.names) == len(set(tags.names))
    assert fidelity["run"] in text
    lines = list(csv.DictReader((tmp_path / "page" / "fidelity.csv").open()))
    assert [float(line["kl_mean"]) for line in lines] == sorted(row["kl_mean"] for row in fidelity["rows"])
    assert {line["texts"] for line in lines} == {fidelity["texts"]}
    assert len(parquet.read_table(tmp_path / "page" / "fidelity.parquet").to_pylist()) == 3
    scores = parquet.read_table(tmp_path / "page" / "lm-eval.parquet").to_pylist()
    assert [(row["press"], row["tasks"], row["value"]) for row in scores[:1]] == [("none", ["codes"], 1.0)]
    markdown = (tmp_path / "page" / "table.md").read_text()
    assert "| snapkv:0.5 | 0.2500 ± 0.1250 |" in markdown
    assert "| KL mean |" in markdown


def test_a_report_of_records_alone(tmp_path: Path, fidelity: dict[str, Any], lm_eval: dict[str, Any]) -> None:
    folder = write(tmp_path / "runs", fidelity=fidelity, scores=lm_eval)
    written = write_outputs([folder], folder / "report.html")
    names = {f"{name}.{kind}" for name in (FIDELITY, LM_EVAL) for kind in ("csv", "parquet")}
    assert {path.name for path in written} == {"report.html", "table.md"} | names
    tags = Tags(written[0].read_text())
    assert "svg" not in tags.tags
    assert {"fidelity", "lm-eval", "measured"} == set(tags.names)


def test_recall_is_a_table_and_a_plot_for_each_length(tmp_path: Path, recall: dict[str, Any]) -> None:
    tables = sheets(write(tmp_path, one=recall))
    assert [sheet.conditions["length"] for sheet in tables] == [128, 192]
    for sheet, cell in zip(tables, recall["cells"], strict=True):
        rows = {row["press"]: row for row in cell["rows"]}
        assert [press for press, _ in sheet.rows] == sorted(rows, key=lambda press: rows[press]["kl_mean"])
        cells = dict(zip(sheet.columns, dict(sheet.rows)["snapkv:0.5"], strict=True))
        assert cells["KL mean"] == (f"{rows['snapkv:0.5']['kl_mean']:.4f}", rows["snapkv:0.5"]["kl_mean"])
        assert cells["smaller"] == (f"{rows['snapkv:0.5']['factor']:.1f}x", rows["snapkv:0.5"]["factor"])
        assert all(sentence in sheet.note for sentence in cell["sentences"])
        assert "4 questions in 2 contexts" in sheet.name
        assert "question unseen" in sheet.name
        assert sheet.plot is not None
        assert ">snapkv:0.5</text>" in str(sheet.plot)
        assert ">none</text>" not in str(sheet.plot)
    code, output = invoke("report", tmp_path)
    assert code == 0, output
    assert "Recall of facts" in output
    tags = Tags((tmp_path / "report.html").read_text())
    assert RECALL in tags.names
    assert tags.tags.count("svg") == 4  # for each length, one for screens and one for phones
    lines = list(csv.DictReader((tmp_path / "recall.csv").open()))
    assert [line["length"] for line in lines] == ["128"] * 3 + ["192"] * 3
    assert "| KL worst context |" in (tmp_path / "table.md").read_text()


def test_recall_is_compared_on_the_same_questions(tmp_path: Path, recall: dict[str, Any]) -> None:
    """Sentences are of one record's presses, so a table of several records has none."""
    recall["cells"] = recall["cells"][:1]
    again = changed(recall, date="2999-01-01T00:00:00+00:00")
    again["cells"][0]["rows"] = [{**again["cells"][0]["rows"][1], "press": "tova:0.5"}]
    others = {"filler": "repeat", "seed": 1, "facts": 3, "question_aware": True, "values": ["words"], "weights": "0"}
    records = {key: changed(recall, **{key: value}) for key, value in others.items()}
    records["contexts"] = changed(recall, contexts=[*recall["contexts"], {"context": "128-0-9"}])
    tables = sheets(write(tmp_path, first=recall, again=again, **records))
    assert len(tables) == 1 + len(records)
    (joined,) = [sheet for sheet in tables if len(sheet.records) == 2]
    assert {press for press, _ in joined.rows} == {*PRESSES, "tova:0.5"}
    assert joined.note == ""
    assert len({(sheet.name, json.dumps(sheet.details)) for sheet in tables}) == len(tables)


def test_many_presses_of_recall_have_names_on_the_frontier_only() -> None:
    rows = [
        {"press": f"press{number}", "factor": 1 + number / 8, "kl_mean": 2.0**number, "kl_worst_context": 3.0**number}
        for number in range(-9, 10)
    ]
    rows += [{**row, "press": f"beaten{number}", "kl_mean": 999.0} for number, row in enumerate(rows)]
    plot = str(recall_plot.sizes_svg([row for row in rows if row["factor"] > 0], "sizes"))
    assert "press9" in plot
    assert "beaten" not in plot
    assert recall_plot.sizes_svg([{**rows[0], "press": "none"}], "sizes") is None


def test_results_of_lm_eval_are_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = pytest.importorskip("lm_eval.tasks", reason="the extra lm-eval is not installed")
    # Leaves out the thousands of tasks of lm-eval, which take long to read.
    monkeypatch.setattr(tasks.TaskManager.__init__, "__defaults__", (None, None, False, None))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": " The code for tiger is 4837." * 9, "choices": [" 4837", " 2"], "gold": 0}))
    task = {
        "task": "codes",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
    }
    (tmp_path / "codes.yaml").write_text(yaml.safe_dump(task))
    out = tmp_path / "run"
    arguments = ["--lm-eval", "codes", "--lm-eval-include", str(tmp_path), "--press", "none", "--press", "knorm:0.5"]
    code, output = invoke("eval", *arguments, "--threads", "1", "--out", out)
    assert code == 0, output
    code, output = invoke("report", out)
    assert code == 0, output
    assert "left out" not in output
    (sheet,) = sheets(out)
    assert [press for press, _ in sheet.rows] == ["none", "knorm:0.5"]
    assert sheet.columns[-1] == "bits/value"
    assert sheet.conditions["tasks"] == ["codes"]


DAMAGED = {
    "torn": ('{"kind": "fidelity", "rows"', "not readable as JSON"),
    "nothing": ('{"kind": "lm-eval"}', "run: Field required, and"),
    "list": ('{"kind": "fidelity", "run": [], "rows": {}}', "run: Input should be a valid string"),
    "recall": ('{"kind": "recall", "cells": []}', "run: Field required, and"),
}
WRONG: dict[str, dict[str, Any]] = {
    "rows": {"rows": []},
    "rows.0.kl_mean": {"rows": [{"press": "none", "kl_mean": "0.1"}]},
    "config.batch_size": {"config": {"model": "reference"}},
    "texts": {"texts": None},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_bad_records_are_named_and_left_out(tmp_path: Path, fidelity: dict[str, Any], name: str) -> None:
    content, message = DAMAGED[name]
    folder = write(tmp_path, **{name: content}, good=fidelity)
    code, output = invoke("report", folder)
    assert code == 0, output
    assert f"left out: {folder / name}.json: {message}" in output
    assert message in (folder / "report.html").read_text()
    (folder / "good.json").unlink()
    code, output = invoke("report", folder)
    assert code == 3, output
    assert message in output


@pytest.mark.parametrize("place", WRONG)
def test_a_record_with_wrong_figures_is_left_out(tmp_path: Path, fidelity: dict[str, Any], place: str) -> None:
    read = read_records([write(tmp_path, wrong=changed(fidelity, **WRONG[place]), good=fidelity)])
    assert [record["run"] for record in read.records] == [fidelity["run"]]
    (problem,) = read.problems
    assert problem.startswith(f"{tmp_path / 'wrong.json'}: {place}: ")
    assert problem.endswith("measure it again, or take the file away")


@pytest.mark.parametrize(
    "wrong",
    [
        {"results": {"codes": 1}},
        {"held": {}},
        {"held": {"bits_per_value": "8"}},
        {"n-samples": {"codes": {"effective": "3"}}},
        {"press": None},
    ],
)
def test_a_record_with_wrong_scores_is_left_out(tmp_path: Path, lm_eval: dict[str, Any], wrong: dict[str, Any]) -> None:
    lm_eval["presses"][1] |= wrong
    read = read_records([write(tmp_path, wrong=lm_eval)])
    assert not read.records
    assert f"presses.1.{next(iter(wrong))}" in read.problems[0]


def test_other_json_files_are_passed_over(tmp_path: Path, fidelity: dict[str, Any]) -> None:
    folder = write(tmp_path, list="[1]", other='{"kind": 1}', seconds="3.5")
    assert not find_records(folder)
    code, output = invoke("report", folder, folder / "other.json")
    assert code == 3
    assert f"skipped {folder / 'other.json'}" in output
    assert "none of these is the folder of a run, nor a record" in output
    write(folder, good=fidelity)
    read = read_records([folder, folder / "good.json"])
    assert (len(read.records), read.problems) == (1, [])


def test_a_record_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(DataError, match="cannot read"):
        read_records([tmp_path])


def test_texts_of_a_record_are_escaped(tmp_path: Path, fidelity: dict[str, Any], lm_eval: dict[str, Any]) -> None:
    attack = "<script>alert('x')</script>[/] & | \u202e"
    fidelity["rows"][0]["press"] = fidelity["text"] = attack
    lm_eval["presses"][0]["press"], lm_eval["config"]["tasks"] = attack, [attack]
    lm_eval["presses"][0]["results"][attack] = {"acc,none": float("nan")}
    code, output = invoke("report", write(tmp_path, one=fidelity, two=lm_eval))
    assert code == 0, output
    text = (tmp_path / "report.html").read_text()
    assert Tags(text).tags.count("script") == 1
    assert "<script>alert" not in text
    fidelity["rows"][0]["press"] = "\ud800"
    assert "text that no file can hold" in read_records([write(tmp_path, one=fidelity)]).problems[0]


@pytest.fixture
def opened(tmp_path: Path, fidelity: dict[str, Any], lm_eval: dict[str, Any]) -> Iterator[Any]:
    """Return a function that opens the page of two records in a browser of some width and colours."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    report = read_report(find_sources([write(tmp_path, one=fidelity, two=lm_eval)]))
    path = tmp_path / "report.html"
    path.write_text(to_html(report.results, report.boards, report.sources, report.sheets))
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def open_page(width: int, scheme: Any) -> playwright.Page:
            context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
            page = context.new_page()
            page.on("pageerror", lambda error: pytest.fail(str(error)))
            page.goto(path.as_uri())
            return page

        yield open_page
        browser.close()


def test_tables_of_records_sort_and_fit_any_screen(opened: Any) -> None:
    for width, scheme in ((400, "dark"), (1280, "light")):
        page = opened(width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        table = page.locator("#fidelity table.sortable")
        table.get_by_role("button", name="KL mean").click()
        values = [float(cell.get_attribute("data-v")) for cell in table.locator("tbody tr > :nth-child(2)").all()]
        assert values == sorted(values, reverse=True)
        for link in page.locator("nav a").all():
            link.click()
            assert page.locator(":target").evaluate("e => e.getBoundingClientRect().top < innerHeight")
