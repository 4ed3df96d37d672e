"""What is known about each cell of a run, read back from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpress_eval.cells import Cell
from kvpress_eval.store import CellStore, Row, read_rows


@dataclass(frozen=True)
class CellResult:
    """The finished samples of a cell out of those that were asked for, and what went wrong if anything."""

    cell: Cell
    samples: int
    rows: Sequence[Row]
    failure: dict[str, str] | None
    kept: dict[str, Any] | None

    @property
    def complete(self) -> bool:
        """Whether every sample has a score."""
        return len(self.scores) == self.samples

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
        timeouts = sum(row["status"] == "timeout" for row in self.rows)
        return f"{timeouts} timed out" if timeouts else f"{len(self.rows)} of {self.samples} samples"


def read_result(cell: Cell, store: CellStore, ids: Sequence[str]) -> CellResult:
    """Return the rows of the samples asked for, in their order."""
    found = {row["sample"]: row for row in read_rows(store.rows_path)[0]}
    rows = [found[name] for name in ids if name in found]
    return CellResult(cell, len(ids), rows, store.failure(), store.kept())
