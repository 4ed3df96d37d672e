"""What is known about each cell of a run, read back from disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpress_eval.cells import SCHEMA, Cell, hash_json
from kvpress_eval.errors import DataError
from kvpress_eval.store import CellStore, Row, read_object, read_rows


@dataclass(frozen=True)
class CellResult:
    """The finished samples of a cell out of those that were asked for, and what went wrong if anything.

    `spec` is all that decides the result. `samples` is None for a cell that was never finished: nobody knows how many rows
    there should be.
    """

    spec: Mapping[str, Any]
    samples: int | None
    rows: Sequence[Row]
    failure: dict[str, str] | None
    kept: dict[str, Any] | None
    damaged: int = 0

    @property
    def press(self) -> str:
        """The press as it was given."""
        return str(self.spec["press"])

    @property
    def task(self) -> str:
        """The name of the task."""
        return str(self.spec["task"])

    @property
    def length(self) -> int:
        """The tokens of the context that were asked for; 0 where the task says how long it is."""
        return int(self.spec["length"])

    @property
    def depth(self) -> float | None:
        """Where the answer is hidden, if the run says so."""
        return self.spec.get("depth")

    @property
    def label(self) -> str:
        """The task, the length and the depth in words."""
        length = f" {self.length}" if self.length else ""
        return f"{self.task}{length}{'' if self.depth is None else f', depth {self.depth:g}'}"

    @property
    def complete(self) -> bool:
        """Whether every sample that was asked for has a score."""
        return self.samples is not None and 0 < self.samples <= len(self.scores)

    @property
    def scores(self) -> dict[str, float]:
        """The score of each sample that has one."""
        return {row["sample"]: row["score"] for row in self.rows if row["score"] is not None}

    @property
    def problem(self) -> str | None:
        """Why there is no result, in a few words."""
        if self.complete:
            return None
        if self.failure:
            return f"{self.failure['status']}: {self.failure['message']}"
        if self.damaged:
            return f"{self.damaged} damaged rows; run it again"
        timeouts = sum(row["status"] == "timeout" for row in self.rows)
        if timeouts:
            return f"{timeouts} timed out"
        return (
            f"{len(self.rows)} of {self.samples} samples" if self.samples else f"unfinished, {len(self.rows)} samples"
        )


@dataclass(frozen=True)
class Results:
    """The cells of one or more runs, by id the records of the invocations that measured them, and what was left out."""

    cells: Sequence[CellResult]
    records: Mapping[str, dict[str, Any]]
    problems: Sequence[str] = ()


def read_result(cell: Cell, store: CellStore, ids: Sequence[str]) -> CellResult:
    """Return the rows of the samples asked for, in their order."""
    found = {row["sample"]: row for row in read_rows(store.rows_path)[0]}
    rows = [found[name] for name in ids if name in found]
    return CellResult(cell.spec, len(ids), rows, store.failure(), store.kept())


def is_run(folder: Path) -> bool:
    """Whether a folder is the output of a run."""
    return (folder / "cells").is_dir()


def read_run(out: Path) -> Results:
    """Return all cells in the folder of a run, of every configuration that wrote there.

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
    """Return the cells of several runs; of a cell in more than one of them, the copy with the most results.

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


def flatten(result: CellResult) -> list[dict[str, Any]]:
    """Return the rows of a cell with the press, task and length in each; a cell that failed has one row with the reason."""
    place = {"press": result.press, "task": result.task, "length": result.length, "depth": result.depth}
    rows = []
    for row in result.rows:
        values = {key: value for key, value in row.items() if key not in ("cell", "measured", "sha256")}
        rows.append({**place, **values, **row["measured"]})
    if result.failure and not result.complete:
        rows.append({**place, "status": result.failure["status"], "message": result.failure["message"]})
    return rows


def _read_cell(folder: Path, spec: Mapping[str, Any]) -> CellResult:
    """Return what the folder of a cell holds; a file that is damaged counts as missing."""
    rows, bad, _ = read_rows(folder / "rows.jsonl")
    done, kept = read_object(folder / "done.json"), read_object(folder / "kept.json")
    samples = done.get("samples") if done else None
    return CellResult(spec, samples, rows, read_object(folder / "failed.json"), kept, damaged=len(bad))


def _read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of `runs.jsonl` that are whole, by the id of the run."""
    records = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            records[record["run"]] = record
        except (ValueError, TypeError, KeyError):
            continue
    return records
