# SPDX-License-Identifier: Apache-2.0
"""Rows of presses: stored rows are not measured again, and a press that has used its time is not measured further."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.common.errors import BusyError, ConfigError, OutputError
from kvpress_eval.run.press_rows import ContextBatch, PressRows, open_rows
from kvpress_eval.run.progress import RunProgress
from rich.console import Console

BATCHES = [ContextBatch("a", 1, 100), ContextBatch("b", 1, 100), ContextBatch("c", 2, 600)]
PRESSES = ("none", "knorm:0.5", "random:0.5")
IDENTITY = {"seed": 0}


def progress() -> RunProgress:
    return RunProgress(Console(quiet=True), len(BATCHES) * len(PRESSES))


def measure(rows: PressRows, seconds: dict[str, float], stop_after: int = 100) -> list[tuple[str, str]]:
    """Measure what is missing, each press in its seconds; return batches and presses in the order of measuring."""
    measured: list[tuple[str, str]] = []
    for number, presses in rows.unmeasured(progress()):
        for press in presses:
            if len(measured) == stop_after:
                raise KeyboardInterrupt
            batch = rows.batches[number]
            rows.add(batch, press, {"value": f"{press} on {batch.id}", "seconds": seconds.get(press, 1.0)})
            measured.append((batch.id, press))
    return measured


def opened(folder: Path, limit: float | None = None, **identity: Any) -> Any:
    return open_rows(folder, {**IDENTITY, **identity}, BATCHES, PRESSES, limit)


def test_stored_rows_are_not_measured_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), opened(tmp_path) as rows:
        measure(rows, {}, stop_after=4)
    assert not (tmp_path / "done.json").exists()
    with opened(tmp_path) as rows:
        assert measure(rows, {}) == [("b", "knorm:0.5"), ("b", "random:0.5"), *(("c", press) for press in PRESSES)]
        assert [row["sample"] for row in rows.measured] == rows.names
        assert rows.complete(BATCHES)["knorm:0.5"][2]["value"] == "knorm:0.5 on c"
    assert json.loads((tmp_path / "done.json").read_text()) == {"samples": 9}
    with opened(tmp_path) as rows:
        assert measure(rows, {}) == []
        with pytest.raises(BusyError, match="another process"), opened(tmp_path):
            pass
    with pytest.raises(OutputError, match=r"rows of another measurement \(seed 0, not 1\)"), opened(tmp_path, seed=1):
        pass


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_rows_whose_settings_are_lost_are_not_mixed_with_others(tmp_path: Path, content: str | None) -> None:
    with opened(tmp_path) as rows:
        measure(rows, {})
    path = tmp_path / "cell.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(OutputError, match="cannot be read: use another --out"), opened(tmp_path, seed=1):
        pass


def test_a_press_that_has_used_its_time_is_skipped(tmp_path: Path) -> None:
    slow = {"none": 500.0, "random:0.5": 124.0}
    with opened(tmp_path, limit=120) as rows:
        measured = measure(rows, slow)
        assert [batch for batch, press in measured if press == "random:0.5"] == ["a"]
        assert len(measured) == 7  # the full cache, which all are compared with, has no limit
        (stopped,) = rows.stopped
        assert stopped.sentence == (
            "random:0.5: stopped after 124 s, 1 of 4 contexts; 120 s are the limit (--press-seconds); at this speed it "
            "needs about 17 minutes"
        )
        assert stopped.row()["estimate"] == 8 * 124  # c has six times the tokens of a and b
        assert list(rows.complete(BATCHES)) == ["none", "knorm:0.5"]
        assert list(rows.complete(BATCHES[:1])) == list(PRESSES)
    assert not (tmp_path / "done.json").exists()
    with opened(tmp_path, limit=120) as rows:
        assert measure(rows, slow) == []
        assert rows.stopped == [stopped]
    with opened(tmp_path, limit=240) as rows:  # the time of the earlier measurement counts
        assert measure(rows, slow) == [("b", "random:0.5")]
        assert rows.stopped[0].measured == 2
    with opened(tmp_path) as rows:
        assert measure(rows, slow) == [("c", "random:0.5")]
        assert rows.stopped == []


def test_the_last_context_cannot_be_skipped() -> None:
    with open_rows(None, IDENTITY, BATCHES, PRESSES, 2.5) as rows:
        assert len(measure(rows, {})) == 9
        assert rows.stopped == []


@pytest.mark.parametrize(
    ("seconds", "further_tokens", "shown"),
    [(0.25, 0, "0.25 s"), (30.0, 20, "40 s"), (60.0, 420, "8 minutes"), (3600.0, 420, "8 hours")],
)
def test_times_are_in_the_unit_of_a_reader(seconds: float, further_tokens: int, shown: str) -> None:
    rows = PressRows([ContextBatch("a", 1, 60), ContextBatch("b", 1, further_tokens)], ("random:0.5",), 0.1)
    measure(rows, {"random:0.5": seconds})
    assert rows.stopped[0].sentence.endswith(f"it needs about {shown}")


@pytest.mark.parametrize("limit", [0, -3.0, float("nan"), float("inf"), "soon"])
def test_a_limit_is_a_number_of_seconds(limit: Any, tmp_path: Path) -> None:
    message = "press_seconds must be a number of seconds above 0, such as 120, got .*; without a limit, leave it out"
    with pytest.raises(ConfigError, match=message), opened(tmp_path, limit=limit):
        pass
