# SPDX-License-Identifier: Apache-2.0
"""Executes the notebooks of this folder, each in a fresh kernel; as a script it stores their outputs.

python notebooks/run.py [quickstart.ipynb ...]

Outputs that differ from run to run, those of cells tagged `volatile`, and whatever libraries write to stderr are not stored.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
VOLATILE = "volatile"


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Give the notebook fresh outputs; what its cells write goes to `folder`. A cell that fails raises."""
    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(
        notebook, resources=resources, timeout=300, record_timing=False, coalesce_streams=True
    ).execute()


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Return the notebook with the outputs that are stored, and no metadata of the machine that ran it."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kept = [] if VOLATILE in cell.metadata.get("tags", []) else cell.outputs
            cell.outputs = [output for output in kept if output.get("name") != "stderr"]
    return notebook


def main(names: list[str]) -> None:
    """Execute the named notebooks, or all, and store their outputs."""
    for path in [FOLDER / name for name in names] or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = nbformat.read(path, as_version=4)
            nbformat.write(cleaned(execute(notebook, Path(folder))), path)


if __name__ == "__main__":
    main(sys.argv[1:])
