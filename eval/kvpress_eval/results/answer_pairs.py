# SPDX-License-Identifier: Apache-2.0
"""Answers of two presses to the same samples, and the samples on which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpress.core.spec import get_press, to_spec
from kvpress_eval.common.errors import DataError
from kvpress_eval.common.files import hash_json
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.store import CODE, Row


@dataclass(frozen=True)
class AnswerPair:
    """Answers of two presses to one sample."""

    model: str
    """Model that answered."""
    place: str
    """Task, length and depth in words."""
    sample: str
    """Identifier of the sample."""
    expected: tuple[str, ...]
    """Right answers."""
    texts: tuple[str | None, str | None]
    """Answer of each press; None after a timeout."""
    scores: tuple[float | None, float | None]
    """Score of each answer; None after a timeout."""

    @property
    def change(self) -> float:
        """Score of the first press minus that of the second one; an answer without a score counts as 0."""
        return (self.scores[0] or 0.0) - (self.scores[1] or 0.0)

    @property
    def differs(self) -> bool:
        """Whether the texts of the answers differ."""
        return self.texts[0] != self.texts[1]


@dataclass(frozen=True)
class AnswerComparison:
    """Answers of two presses to the samples that both answered."""

    pairs: Sequence[AnswerPair]
    """All pairs, in the order of the results."""

    @property
    def differing(self) -> list[AnswerPair]:
        """Pairs with different texts: those with the largest change of the score first."""
        return sorted((pair for pair in self.pairs if pair.differs), key=lambda pair: -abs(pair.change))

    @property
    def better(self) -> tuple[int, int]:
        """Number of samples with a higher score of the first press, and of the second one."""
        return sum(pair.change > 0 for pair in self.pairs), sum(pair.change < 0 for pair in self.pairs)


def compare_answers(cells: Sequence[CellResult], first: str, second: str) -> AnswerComparison:
    """Return the answers of two presses to the same samples under the same conditions.

    Raises:
        DataError: a press was not measured, or both were never measured under the same conditions.
    """
    names = {cell.press: canonical(cell.press) for cell in cells}
    by_press = []
    for press in (first, second):
        chosen = [cell for cell in cells if names[cell.press] == canonical(press)]
        if not chosen:
            raise DataError(f"press {press!r} was not measured; the runs have {', '.join(sorted(names))}")
        by_press.append({_conditions(cell.spec): cell for cell in chosen})
    ours, theirs = by_press
    common = [key for key in ours if key in theirs]
    if not common:
        raise DataError(
            f"{first!r} and {second!r} were never measured under the same conditions: the model, the tasks, the lengths and "
            "all settings of a run must be equal; `kvpress report` lists them"
        )
    return AnswerComparison([pair for key in common for pair in _pairs(ours[key], theirs[key])])


def canonical(press: str) -> str:
    """Return the spec of a press with all its arguments in one order; a press that is not registered keeps its spec."""
    try:
        return to_spec(get_press(press))
    except (KeyError, ValueError, TypeError):
        return " ".join(press.split())


def _conditions(spec: Mapping[str, Any]) -> str:
    return hash_json({key: value for key, value in spec.items() if key not in ("press", CODE)})


def _pairs(ours: CellResult, theirs: CellResult) -> list[AnswerPair]:
    rows: dict[str, Row] = {row["sample"]: row for row in theirs.rows}
    return [
        AnswerPair(
            str(ours.spec["model"]),
            ours.label,
            row["sample"],
            tuple(map(str, row["expected"])),
            (row["prediction"], rows[row["sample"]]["prediction"]),
            (row["score"], rows[row["sample"]]["score"]),
        )
        for row in ours.rows
        if row["sample"] in rows
    ]
