# SPDX-License-Identifier: Apache-2.0
"""Result of one cell of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpress_eval.results.stats import pool
from kvpress_eval.results.store import CellStore, Row, read_rows


@dataclass(frozen=True)
class CellResult:
    """Finished samples of a cell, and the reason for missing ones."""

    spec: Mapping[str, Any]
    """Everything that decides the result."""
    samples: int | None
    """Number of requested samples; None if the cell was never finished and the number is unknown."""
    rows: Sequence[Row]
    """One row per finished sample."""
    failure: dict[str, str] | None
    """Status and message of a failed cell."""
    kept: dict[str, Any] | None
    """Kept tokens of one context, if recorded."""
    damaged: int = 0
    """Number of damaged rows."""

    @property
    def press(self) -> str:
        """The spec of the press."""
        return str(self.spec["press"])

    @property
    def task(self) -> str:
        """The name of the task."""
        return str(self.spec["task"])

    @property
    def length(self) -> int:
        """Requested tokens of the context; 0 if the task decides its length."""
        return int(self.spec["length"])

    @property
    def depth(self) -> float | None:
        """Position of the answer as a fraction of the context, if configured."""
        return self.spec.get("depth")

    @property
    def label(self) -> str:
        """The task, the length and the depth in words."""
        length = f" {self.length}" if self.length else ""
        return f"{self.task}{length}{'' if self.depth is None else f', depth {self.depth:g}'}"

    @property
    def complete(self) -> bool:
        """Whether every requested sample has a score."""
        return self.samples is not None and 0 < self.samples <= len(self.scores)

    @property
    def scores(self) -> dict[str, float]:
        """The score of each sample that has one."""
        return {row["sample"]: row["score"] for row in self.rows if row["score"] is not None}

    @property
    def documents(self) -> dict[str, str]:
        """The document of each sample that has a score; rows of earlier versions count as documents of their own."""
        return {row["sample"]: str(row.get("document", row["sample"])) for row in self.rows if row["score"] is not None}

    @property
    def independent_scores(self) -> list[float]:
        """One value for each document, with the mean of the scores."""
        return pool(list(self.scores.values()), list(self.documents.values()))

    @property
    def problem(self) -> str | None:
        """Short reason for a missing result; None if the cell is complete."""
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


def read_result(spec: Mapping[str, Any], store: CellStore, ids: Sequence[str]) -> CellResult:
    """Return the result of a cell with the rows of the samples `ids`, in this order."""
    by_sample = {row["sample"]: row for row in read_rows(store.rows_path)[0]}
    rows = [by_sample[name] for name in ids if name in by_sample]
    return CellResult(spec, len(ids), rows, store.failure(), store.kept())


def flatten(result: CellResult) -> list[dict[str, Any]]:
    """Return the rows of a cell, each with press, task, length and depth; a failed cell adds one row with the reason."""
    place = {"press": result.press, "task": result.task, "length": result.length, "depth": result.depth}
    rows = []
    for row in result.rows:
        values = {key: value for key, value in row.items() if key not in ("cell", "measured", "sha256")}
        rows.append({**place, **values, **row["measured"]})
    if result.failure and not result.complete:
        rows.append({**place, "status": result.failure["status"], "message": result.failure["message"]})
    return rows
