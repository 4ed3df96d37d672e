"""The output folder of a run: checked and claimed before anything expensive starts."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpress_eval.cells import Cell
from kvpress_eval.errors import BusyError, translated_os_errors
from kvpress_eval.store import CellStore


@contextmanager
def claim(out: Path) -> Iterator[None]:
    """Hold the folder for this process; the lock goes with the process, however it ends."""
    with translated_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("wb")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(f"another process is writing to {out}") from error
        yield


def cell_store(out: Path, cell: Cell) -> CellStore:
    """Return where the results of a cell are."""
    return CellStore(out / "cells" / cell.id)


def log_run(out: Path, record: dict[str, Any]) -> None:
    """Add a line about this invocation to `runs.jsonl`."""
    with translated_os_errors(out), (out / "runs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
