# SPDX-License-Identifier: Apache-2.0
"""Results on disk: one JSON line per sample, synced; readable after a kill at any byte.

- `OUT/runs.jsonl`: one line per invocation: versions, machine, configuration
- `OUT/cells/ID/.lock`: locked by the process that works on the cell
- `OUT/cells/ID/cell.json`: everything that decides the result of the cell
- `OUT/cells/ID/rows.jsonl`: one line per sample, each with its checksum
- `OUT/cells/ID/kept.json`: kept tokens of one context (some cells)
- `OUT/cells/ID/done.json`: written last; or `failed.json` with the reason
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from kvpress_eval.common.errors import OutputError, translated_os_errors
from kvpress_eval.common.files import hash_json, read_object, replace_file, write_json

Row = dict[str, Any]

SCHEMA = 3
"""Increased when the meaning of a configuration changes, so that old rows are not mixed with new ones."""
CODE = "code"
"""Key in the spec of a cell whose press has code or files of the user: a digest of them."""


class ResultSink(Protocol):
    """Destination of the results of a cell: its folder, or the process that owns the folder (`run/worker.py`)."""

    def claim(self) -> AbstractContextManager[bool]:
        """Lock the cell for this job; yields False if another job has it."""

    def open(self, cell: Mapping[str, Any], ids: Sequence[str]) -> dict[str, Row]:
        """Return the existing rows of the claimed cell by sample id."""

    def append(self, row: Row) -> None:
        """Add one row."""

    def finish(self, samples: int) -> None:
        """Mark the cell as complete."""

    def fail(self, status: str, message: str, details: str, peak_bytes: int) -> None:
        """Record why the cell could not be completed."""

    def record_kept(self, kept: Mapping[str, Any]) -> None:
        """Store the kept tokens of the first sample for reports."""


@dataclass(frozen=True)
class CellStore:
    """The folder of one cell."""

    path: Path

    @property
    def rows_path(self) -> Path:
        """The results, one line per sample."""
        return self.path / "rows.jsonl"

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Make the folder and lock it for this process; yields False if another process has it.

        The operating system releases the lock when the process ends, even after a crash.
        """
        with translated_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            try:
                lock.acquire(blocking=False)
            except Timeout:
                free = False
            else:
                free = True
        try:
            yield free
        finally:
            lock.release()

    def open(self, cell: Mapping[str, Any], ids: Sequence[str]) -> dict[str, Row]:
        """Prepare the claimed folder of `cell` for new rows; return the existing rows by sample id.

        A cell that lacks a sample of `ids` is no longer marked as complete.
        """
        spec = read_object(self.path / "cell.json", set_aside=True)
        if spec is None:
            write_json(self.path / "cell.json", dict(cell))
        elif spec != dict(cell):
            raise OutputError(f"{self.path / 'cell.json'} describes another cell; use a new output folder")
        rows, bad, torn = read_rows(self.rows_path)
        if torn:
            warnings.warn(f"{self.rows_path}: dropped an unfinished last line", stacklevel=2)
        if bad:
            warnings.warn(f"{self.rows_path}: moved {len(bad)} damaged rows to *.corrupt", stacklevel=2)
            aside = self.rows_path.with_suffix(".jsonl.corrupt")
            with translated_os_errors(aside), aside.open("ab") as file:
                file.writelines(line + b"\n" for line in bad)
        if torn or bad:
            replace_file(self.rows_path, b"".join(encode_row(row) for row in rows))
        if not {row["sample"] for row in rows}.issuperset(ids):
            with translated_os_errors(self.path):
                (self.path / "done.json").unlink(missing_ok=True)
        return {row["sample"]: row for row in rows}

    def append(self, row: Row) -> None:
        """Add one row; after the return it survives a power cut."""
        with translated_os_errors(self.rows_path), self.rows_path.open("ab") as file:
            file.write(encode_row(row))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, samples: int) -> None:
        """Mark the cell as complete."""
        with translated_os_errors(self.path):
            (self.path / "failed.json").unlink(missing_ok=True)
        write_json(self.path / "done.json", {"samples": samples})

    def fail(self, status: str, message: str, details: str, peak_bytes: int) -> None:
        """Record the reason of a failure, and the peak memory until then."""
        with translated_os_errors(self.path):
            (self.path / "done.json").unlink(missing_ok=True)
        failure = {"status": status, "message": message, "details": details, "peak_bytes": peak_bytes}
        write_json(self.path / "failed.json", failure)

    def failure(self) -> dict[str, Any] | None:
        """Return the record of `fail`, or None."""
        return read_object(self.path / "failed.json", set_aside=True)

    def record_kept(self, kept: Mapping[str, Any]) -> None:
        """Store the kept tokens of the first sample for reports."""
        write_json(self.path / "kept.json", kept)

    def kept(self) -> dict[str, Any] | None:
        """Return the tokens of one context and the share of each layer that kept them, or None."""
        return read_object(self.path / "kept.json", set_aside=True)


def store_of(out: Path, cell: str) -> CellStore:
    """Return the store of a cell in the output folder of a run."""
    return CellStore(out / "cells" / cell)


def rows_folder(out: Path) -> Path:
    """Return the folder of the rows that a measurement stores beside the file of its figures."""
    return out.with_name(f"{out.name}.rows")


def log_run(out: Path, record: Mapping[str, Any]) -> None:
    """Append the record of this invocation to `runs.jsonl`; of two records with the same `run`, the later one counts."""
    with translated_os_errors(out), (out / "runs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Return the line of a row: JSON with a checksum of all other fields."""
    body = {key: value for key, value in row.items() if key != "sha256"}
    return json.dumps({**body, "sha256": hash_json(body)[:16]}, allow_nan=False).encode() + b"\n"


def decode_row(line: bytes) -> Row | None:
    """Return the row of a line, or None if its checksum does not match."""
    try:
        row = json.loads(line)
        body = {key: value for key, value in row.items() if key != "sha256"}
        return row if row["sha256"] == hash_json(body)[:16] and isinstance(row["sample"], str) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read_rows(path: Path) -> tuple[list[Row], list[bytes], bool]:
    """Return the valid rows of a file, its damaged lines, and whether the last line was cut off."""
    if not path.exists():
        return [], [], False
    *lines, tail = path.read_bytes().split(b"\n")
    rows: dict[str, Row] = {}
    bad: list[bytes] = []
    for line in lines:
        row = decode_row(line)
        if row is None:
            bad.append(line)
        else:
            rows.setdefault(row["sample"], row)
    return list(rows.values()), bad, bool(tail)
