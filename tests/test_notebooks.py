# SPDX-License-Identifier: Apache-2.0
"""Every notebook runs in a fresh kernel on the reference model, and stores what it then shows."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from notebooks.run import FOLDER, VOLATILE, cleaned, execute

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: NotebookNode) -> str:
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)


def words(cell: NotebookNode) -> list[str]:
    """Return what a cell shows without its numbers, which depend on the processor."""
    return re.findall(r"[A-Za-z_]{2,}", text_of(cell))


@pytest.mark.slow
@each
def test_runs_and_shows_what_is_stored(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stored, fresh = nbformat.read(path, as_version=4), cleaned(execute(path, tmp_path))
    for before, now in zip(code_cells(stored), code_cells(fresh), strict=True):
        alike = SequenceMatcher(None, words(before), words(now), autojunk=False).ratio()
        assert alike > 0.8, f"run notebooks/run.py: {before.id} shows\n{text_of(now)}\nand stores\n{text_of(before)}"


@each
def test_stores_nothing_of_the_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
        assert not re.search(r"/(home|work|root|tmp|Users|opt)/", str(cell.get("outputs", "")))
    for cell in code_cells(notebook):
        assert "error" not in [output.output_type for output in cell.outputs]
        assert not (VOLATILE in cell.metadata.get("tags", []) and cell.outputs)


def test_are_listed() -> None:
    index = (FOLDER / "README.md").read_text()
    assert len(NOTEBOOKS) == 6
    assert all(f"({path.name})" in index for path in NOTEBOOKS)
