# SPDX-License-Identifier: Apache-2.0
"""Presses of the user's own: from a module that the command line imports, or from an installed package."""

from __future__ import annotations

import importlib
import linecache
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.leaderboards import make_boards
from kvpress_eval.results.read import read_run
from kvpress_eval.run.cells import make_cells
from kvpress_eval.run.press_rows import ContextBatch, PressRows
from kvpress_eval.tasks.catalogue import expand_tasks

from kvpress import AdaKVPress, KnormPress, get_press
from kvpress.core import registry, spec
from tests.eval.commands import invoke

SOURCE = """
from dataclasses import dataclass
from kvpress import ScorerPress, register

@register("value_norm", "evict")
@dataclass
class ValueNormPress(ScorerPress):
    \"\"\"Keep the pairs with the longest values.\"\"\"

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return values.norm(dim=-1)
"""


def kvpress(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvpress_eval.console import app; app()", *words]
    return subprocess.run(  # noqa: S603 - our own text
        command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path


def test_edited_code_is_measured_again_and_the_newest_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions within a second look the same
    words = [
        "--import", "mine", "eval", "--press", "none", "--press", "adakv(value_norm:0.9)", "--tasks", "niah_single",
        "--lengths", "128", "--samples", "2", "--threads", "1", "--out", "run",
    ]  # fmt: skip
    registered, printed = dict(registry._entries), []
    for source in (SOURCE, SOURCE.replace("return values", "return -values")):
        (folder / "mine.py").write_text(source)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        monkeypatch.setattr(registry, "_entries", dict(registered))
        linecache.clearcache()
        importlib.invalidate_caches()
        code, output = invoke(*words)
        assert code == 0, output
        printed.append(output)
        time.sleep(1.0)  # runs note the second
    assert all("adakv(value_norm:0.9) on niah_single at 128: 2 samples" in output for output in printed)
    results = read_run(folder / "run")
    codes = {cell.spec.get("code"): cell for cell in results.cells}
    assert len(results.cells) == len(codes) == 3
    (board,) = make_boards(results)
    assert [summary.press for summary in board.summaries] == ["none", "adakv(value_norm:0.9)"]
    newest = max(results.records, key=lambda run: str(results.records[run]["date"]))
    assert {row["measured"]["run"] for cell in board.cells if cell.press != "none" for row in cell.rows} == {newest}


def test_a_module_that_cannot_be_imported_is_named(folder: Path) -> None:
    (folder / "mine.py").write_text("1 / 0")
    for module, message in (("mine", "ZeroDivisionError: division by zero"), ("other", "No module named 'other'")):
        done = kvpress(folder, "--import", module, "list")
        assert done.returncode == 2
        assert f"error: --import {module}: " in done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_installed_packages_add_presses_and_a_broken_one_costs_only_its_own(folder: Path) -> None:
    about = folder / "own-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[kvpress.presses]\nmine = mine\nbroken = not_there\n")
    code = "import kvpress; print(kvpress.get_press('value_norm:0.5'), kvpress.ScorerPress)"
    done = subprocess.run(  # noqa: S603 - our own text
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ValueNormPress(")
    assert "cannot import the presses of 'not_there' (kvpress.presses, entry point 'broken')" in done.stderr


def test_only_code_of_ones_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Mine(KnormPress):
        pass

    assert spec.own_code(get_press("adakv(snapkv:0.5) + kivi:bits=4")) == ""
    code = spec.own_code(AdaKVPress(Mine(0.5)) + get_press("kivi:bits=4"))
    assert code == spec.own_code(Mine(0.9))
    monkeypatch.setattr(spec, "_source_of", lambda module: f"{module}, edited")
    assert spec.own_code(Mine(0.5)) not in ("", code)


def test_files_of_a_press_count_too(tmp_path: Path) -> None:
    file, folder = tmp_path / "levels.safetensors", tmp_path / "networks"
    folder.mkdir()
    for text, place in ((f"kvquant:calibration='{file}'", file), (f"kvzap:0.5,weights='{folder}'", folder / "a.json")):
        press = AdaKVPress(get_press("snapkv:0.5")) + get_press(text) if "kvquant" in text else get_press(text)
        digests = [spec.own_digest(press)]
        for content in ("one", "two", "one"):
            place.write_text(content)
            digests.append(spec.own_digest(press))
        assert digests[0] == ""
        assert digests[1] == digests[3] not in digests[:1] + digests[2:3]
    assert spec.own_digest(get_press("snapkv:0.5 + kivi:bits=4")) == ""


def test_a_recalibrated_press_has_cells_of_its_own(tmp_path: Path) -> None:
    """A run that resumes after `kvpress calibrate --force` must not mix answers under the old file and the new one."""
    file = tmp_path / "levels.safetensors"
    config = RunConfig(presses=("none", f"kvquant:calibration='{file}'"), tasks=("niah_single",), lengths=(128,))
    names = []
    for content in ("one", "two"):
        file.write_text(content)
        names.append([cell.id for cell in make_cells(config, expand_tasks(config), "weights", "cpu", "float32")])
    assert names[0][0] == names[1][0]
    assert names[0][1] != names[1][1]
    batch = ContextBatch("text", 1, 128)
    labels = []
    for content in ("one", "two"):
        file.write_text(content)
        labels.append(PressRows([batch], config.presses).names)
    assert labels[0][0] == labels[1][0]
    assert labels[0][1] != labels[1][1]
