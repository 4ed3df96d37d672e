# SPDX-License-Identifier: Apache-2.0
"""What is known about one cell of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpress_eval.results.store import CellStore, Row, read_rows


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


def read_result(spec: Mapping[str, Any], store: CellStore, ids: Sequence[str]) -> CellResult:
    """Return the rows of the samples asked for, in their order."""
    found = {row["sample"]: row for row in read_rows(store.rows_path)[0]}
    rows = [found[name] for name in ids if name in found]
    return CellResult(spec, len(ids), rows, store.failure(), store.kept())


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
