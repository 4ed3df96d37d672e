# SPDX-License-Identifier: Apache-2.0
"""The results of one or more runs, read back from disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpress_eval.common.errors import DataError
from kvpress_eval.common.files import hash_json, read_object
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.store import SCHEMA, read_rows


@dataclass(frozen=True)
class Results:
    """Cells of one or more runs."""

    cells: Sequence[CellResult]
    records: Mapping[str, dict[str, Any]]
    """Records of the invocations that measured the cells, by run id."""
    problems: Sequence[str] = ()
    """Messages about cells that could not be read."""


def is_run(folder: Path) -> bool:
    """Whether a folder is the output of a run."""
    return (folder / "cells").is_dir()


def read_run(out: Path) -> Results:
    """Return all cells in the folder of a run, from every configuration that wrote to it.

    Raises:
        DataError: this is not the folder of a run, or a file in it cannot be read.
    """
    if not is_run(out):
        raise DataError(f"{out} is not the folder of a run: it has no folder `cells`")
    cells, problems = [], []
    try:
        for folder in sorted(path.parent for path in out.glob("cells/*/cell.json")):
            spec = read_object(folder / "cell.json")
            if spec is None:
                problems.append(f"{folder}: cell.json is damaged; remove the folder and run the cell again")
            elif spec.get("schema") != SCHEMA:
                problems.append(f"{folder}: written by another version; run the cell again")
            else:
                cells.append(_read_cell(folder, spec))
        return Results(cells, _read_records(out / "runs.jsonl"), problems)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or out}: {error.strerror or error}") from error


def read_runs(folders: Sequence[Path]) -> Results:
    """Return the cells of several runs; of a cell in several runs, the copy with the most results.

    Raises:
        DataError: a folder is not that of a run or cannot be read, or there is no cell in any.
    """
    runs = [read_run(folder) for folder in folders]
    cells: dict[str, CellResult] = {}
    for cell in (cell for run in runs for cell in run.cells):
        key = hash_json(dict(cell.spec))
        cells[key] = max(cells.get(key, cell), cell, key=lambda copy: (copy.complete, len(copy.rows)))
    problems = [problem for run in runs for problem in run.problems]
    if not cells:
        reasons = "".join(f"\n{problem}" for problem in problems)
        raise DataError(f"no results in {', '.join(map(str, folders))}{reasons}")
    return Results(
        list(cells.values()), {name: record for run in runs for name, record in run.records.items()}, problems
    )


def _read_cell(folder: Path, spec: Mapping[str, Any]) -> CellResult:
    """Return the result in the folder of a cell; a damaged file counts as missing."""
    rows, bad, _ = read_rows(folder / "rows.jsonl")
    done, kept = read_object(folder / "done.json"), read_object(folder / "kept.json")
    samples = done.get("samples") if done else None
    return CellResult(spec, samples, rows, read_object(folder / "failed.json"), kept, damaged=len(bad))


def _read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Return the undamaged lines of `runs.jsonl` by run id."""
    records = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            records[record["run"]] = record
        except (ValueError, TypeError, KeyError):
            continue
    return records
