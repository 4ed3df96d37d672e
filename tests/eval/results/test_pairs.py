# SPDX-License-Identifier: Apache-2.0
"""Comparisons of every two presses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.pairs import compare_all
from kvpress_eval.results.stats import holm, paired_difference, paired_p_value

TASKS = ("vt", "cwe")
SCORES = np.random.default_rng(0).integers(0, 2, (3, len(TASKS), 40)).astype(float)
ORDER = ("a", "b", "c")


def cell(press: str, task: str, scores: list[float]) -> CellResult:
    rows = [{"sample": f"{task}-{number}", "score": score} for number, score in enumerate(scores)]
    return CellResult({"press": press, "task": task, "length": 64, "depth": None}, len(rows), rows, None, None)


CELLS = [
    cell(press, task, SCORES[number, column].tolist())
    for number, press in enumerate(ORDER)
    for column, task in enumerate(TASKS)
]


def test_every_pair_is_compared_on_the_same_samples() -> None:
    pairs = compare_all(CELLS, ORDER)
    assert [(pair.press, pair.other) for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    for pair in pairs:
        ours, theirs = SCORES[ORDER.index(pair.press)], SCORES[ORDER.index(pair.other)]
        groups = [list(zip(*rows, strict=True)) for rows in zip(ours.tolist(), theirs.tolist(), strict=True)]
        assert pair.difference == paired_difference(groups)
        assert pair.difference.mean == pytest.approx((ours - theirs).mean())
        assert pair.p_value == paired_p_value(groups)
    assert [pair.adjusted for pair in pairs] == holm([pair.p_value for pair in pairs])


def test_the_first_in_the_order_comes_first() -> None:
    ca_pair, *_ = compare_all(CELLS, ("c", "a"))
    ac_pair, *_ = compare_all(CELLS, ("a", "c"))
    assert ca_pair.difference.mean == -ac_pair.difference.mean
    assert ca_pair.p_value == pytest.approx(ac_pair.p_value, abs=0.015)  # drawn anew: three standard errors


def test_a_press_with_an_unfinished_cell_is_in_no_pair() -> None:
    cells = [
        replace(result, rows=result.rows[:5]) if (result.press, result.task) == ("b", "vt") else result
        for result in CELLS
    ]
    assert [(pair.press, pair.other) for pair in compare_all(cells, ORDER)] == [("a", "c")]
    assert compare_all(CELLS[:2], ("a",)) == []
