# SPDX-License-Identifier: Apache-2.0
"""Measurements of fidelity: a stopped one continues to the record of an uninterrupted one, and slow presses are left out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.common.errors import OutputError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity import comparison, continuation
from kvpress_eval.fidelity.measure import measure
from kvpress_eval.report.comparison_tables import make_sheets
from kvpress_eval.results.records import Records
from kvpress_eval.results.store import read_rows, rows_folder
from rich.console import Console

from kvpress.hf.generation import shared_prefill
from tests.eval import commands

CONTEXT, TOKENS = 64, 20
PRESSES = ("knorm:0.5", "none", "random:0.5", "snapkv:0.5,window_size=8", "kvzip:0.5,repeat_prompt=")
SLOW = "random:0.5"


def config(**fields: Any) -> RunConfig:
    defaults = {"presses": PRESSES, "lengths": (CONTEXT,), "samples": 3, "batch_size": 2, "threads": 1}
    return RunConfig(**{**defaults, **fields})


def measured(
    folder: Path | None = None, *, layers: bool = False, press_seconds: float | None = None, **fields: Any
) -> dict[str, Any]:
    console = Console(file=io.StringIO())
    return measure(config(**fields), TOKENS, None, console, layers=layers, folder=folder, press_seconds=press_seconds)


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the run, its date, and times."""
    rows = [{**row, "seconds": None} for row in record["rows"]]
    return {**record, "run": None, "date": None, "rows": rows}


@pytest.fixture
def continued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The press of every continuation that is read; Ctrl-C comes when the list is full, at 100."""
    presses: list[str] = []

    def counted(model: Any, press: str, *arguments: Any) -> continuation.ContinuationLogits:
        if len(presses) == 100:
            raise KeyboardInterrupt
        presses.append(press)
        return continuation.continue_reading(model, press, *arguments)

    monkeypatch.setattr(comparison, "continue_reading", counted)
    return presses


@pytest.mark.parametrize("layers", [False, True])
def test_a_stopped_measurement_continues_to_the_same_record(layers: bool, tmp_path: Path, continued: list[str]) -> None:
    expected = measured(layers=layers)
    each = 2 if layers else 1
    folder = tmp_path / "rows"
    continued[:] = ["before"] * (100 - (1 + 5 * each) - (1 + 2 * each))
    with pytest.raises(KeyboardInterrupt):
        measured(folder, layers=layers)  # after the first batch, and two presses of the second one
    rows, damaged, torn = read_rows(folder / "rows.jsonl")
    assert (len(rows), damaged, torn) == (7, [], False)
    continued.clear()
    record = measured(folder, layers=layers)
    assert len(continued) == 1 + 3 * each  # the full cache, as the reference, and three presses
    assert comparable(record) == comparable(expected)
    assert json.loads(json.dumps(record)) == record
    continued.clear()
    assert comparable(measured(folder, layers=layers)) == comparable(expected)
    assert continued == []


def test_further_presses_and_texts_are_added(tmp_path: Path, continued: list[str]) -> None:
    folder = tmp_path / "rows"
    measured(folder, samples=2)
    continued.clear()
    measured(folder, samples=2, presses=(*PRESSES, "tova:0.5"))
    assert continued == ["none", "tova:0.5"]
    continued.clear()
    more = measured(folder, samples=4)
    assert sorted(continued) == sorted(["none", *PRESSES])  # the second batch alone
    assert comparable(more) == comparable(measured(samples=4))


def test_rows_of_other_settings_are_refused(tmp_path: Path) -> None:
    measured(tmp_path, presses=("none",), samples=1)
    for fields, difference in (
        ({"seed": 1}, "seed 0, not 1"),
        ({"layers": True}, "layers False, not True"),
        ({"batch_size": 3}, "batch_size 2, not 3"),
        ({"lengths": (65,)}, "context 64, not 65"),
    ):
        with pytest.raises(OutputError, match=f"rows of another measurement \\({difference}\\): use another --out"):
            measured(tmp_path, presses=("none",), samples=1, **fields)


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which a continuation takes a quarter of a second, that of SLOW a minute, and reading nothing."""
    time = 0.0

    def timed(model: Any, press: str, *arguments: Any) -> continuation.ContinuationLogits:
        nonlocal time
        time += 60 if press == SLOW else 0.25
        return continuation.continue_reading(model, press, *arguments)

    for module in (comparison, continuation, shared_prefill):
        monkeypatch.setattr(module, "now", lambda device: time)
    monkeypatch.setattr(comparison, "continue_reading", timed)


@pytest.mark.usefixtures("slow_clock")
def test_a_press_over_its_time_is_left_out_and_named(tmp_path: Path) -> None:
    expected = measured()
    assert [row["seconds"] for row in expected["rows"]] == [0.5, 0.5, 120, 0.5, 0.5]
    record = measured(tmp_path, press_seconds=30)
    assert record["rows"] == [row for row in expected["rows"] if row["press"] != SLOW]
    (stopped,) = record["stopped"]
    sentence = (
        "random:0.5: stopped after 60 s, 2 of 3 contexts; 30 s are the limit (--press-seconds); at this speed it needs "
        "about 90 s"
    )
    assert stopped["sentence"] == sentence
    (sheet,) = make_sheets(Records([record]))
    assert sheet.note.endswith(f" {sentence}.")
    (joined,) = make_sheets(Records([expected, record]))
    assert "stopped" not in joined.note  # another record has its figures
    assert comparable(measured(tmp_path)) == comparable(expected)


@pytest.mark.usefixtures("slow_clock")
def test_the_command_names_a_press_over_its_time(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = ["--samples", "2", "--batch-size", "1", "--context", "64", "--tokens", "4", "--press-seconds", "59.5"]
    code, output = commands.invoke("fidelity", "--press", SLOW, "--press", "knorm:0.5", *options, "--out", out)
    assert code == 0, output
    assert (
        "random:0.5: stopped after 60 s, 1 of 2 contexts; 59.5 s are the limit (--press-seconds); at this speed it needs "
        "about 2 minutes\n"
    ) in output
    assert [row["press"] for row in json.loads(out.read_text())["rows"]] == ["knorm:0.5"]


def test_the_command_continues_after_an_interrupt(tmp_path: Path, continued: list[str]) -> None:
    out = tmp_path / "figures.json"
    command = (
        "fidelity",
        "--press",
        "knorm:0.5",
        "--press",
        SLOW,
        "--samples",
        "1",
        "--context",
        "64",
        "--tokens",
        "4",
    )
    continued[:] = ["before"] * 98
    code, output = commands.invoke(*command, "--out", out)
    assert (code, out.exists()) == (130, False)
    assert "interrupted; the same command continues where this one stopped" in output
    continued.clear()
    code, output = commands.invoke(*command, "--out", out)
    assert code == 0, output
    assert continued == ["none", SLOW]
    assert len(read_rows(rows_folder(out) / "rows.jsonl")[0]) == 2


def test_the_first_tokens_are_apart_from_later_ones() -> None:
    (row,) = measured(presses=("streaming_llm:budget=8,n_sink=0",))["rows"]
    by_token = row["kl_by_token"]
    assert row["kl_first"] == pytest.approx(sum(by_token[:16]) / 16, rel=1e-4)
    assert row["kl_later"] == pytest.approx(sum(by_token[16:]) / 4, rel=1e-4)
    assert row["kl_mean"] == pytest.approx((16 * row["kl_first"] + 4 * row["kl_later"]) / 20, rel=1e-4)


def test_a_prompt_that_is_held_as_it_is_is_named() -> None:
    rows = measured(presses=("kivi:bits=2,residual_length=128", "knorm:0.5"), samples=1)["rows"]
    assert [row["compressed"] for row in rows] == [False, True]
