"""Results as rows for notebooks and scripts."""

from __future__ import annotations

import importlib.util
from typing import Any

from rich.console import Console

from kvpress_eval.results import CellResult
from kvpress_eval.runner import run
from kvpress_eval.yaml_config import load_config


def run_rows(**fields: Any) -> Any:
    """Run a configuration and return its rows; a cell that failed is one row with the reason."""
    result = run(load_config(None, fields), Console())
    rows = [row for cell in result.cells for row in flatten(cell)]
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas

    return pandas.DataFrame(rows)


def flatten(result: CellResult) -> list[dict[str, Any]]:
    """Return the rows of a cell with the press, task and length in each of them."""
    source, depth = result.cell.source, result.cell.depth
    place = {"press": result.cell.press, "task": source.task, "length": source.length, "depth": depth}
    rows = []
    for row in result.rows:
        values = {key: value for key, value in row.items() if key not in ("cell", "measured", "sha256")}
        rows.append({**place, **values, **row["measured"]})
    if result.failure and not result.complete:
        rows.append({**place, "status": result.failure["status"], "message": result.failure["message"]})
    return rows
