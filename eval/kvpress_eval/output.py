"""The output folder of a run: checked before anything expensive starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvpress_eval.cells import Cell
from kvpress_eval.errors import OutputError, translated_os_errors
from kvpress_eval.store import CellStore


def make_folder(out: Path) -> None:
    """Make the folder for results, or say why nothing can be written there."""
    with translated_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {out}: no permission")


def cell_store(out: Path, cell: Cell) -> CellStore:
    """Return where the results of a cell are."""
    return CellStore(out / "cells" / cell.id)


def log_run(out: Path, record: dict[str, Any]) -> None:
    """Add a line about this invocation to `runs.jsonl`; of two with the same `run`, the later one counts."""
    with translated_os_errors(out), (out / "runs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
