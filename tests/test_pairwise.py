# SPDX-License-Identifier: Apache-2.0
"""Grids of pairs cover every pair in few rows, and are the same every time."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import every_pair, pairwise

DIMENSIONS = {"a": range(5), "b": "xyz", "c": [True, False], "d": [None, 1.5, "x", ()]}


def test_every_two_values_share_a_row() -> None:
    rows = pairwise(**DIMENSIONS)
    for first, second in itertools.combinations(DIMENSIONS, 2):
        assert {(row[first], row[second]) for row in rows} == set(
            itertools.product(DIMENSIONS[first], DIMENSIONS[second])
        )
    assert 20 <= len(rows) <= 24
    assert rows == pairwise(**DIMENSIONS)
    assert all(list(row) == list(DIMENSIONS) for row in rows)


def test_only_refused_combinations_are_missing() -> None:
    def allowed(row: dict) -> bool:
        return not (row.get("b") == "x" and row.get("a", 0) > 2)

    rows = pairwise(allowed, **DIMENSIONS)
    assert all(map(allowed, rows))
    met = {(row["a"], row["b"]) for row in rows}
    assert met == set(itertools.product(range(5), "xyz")) - {(3, "x"), (4, "x")}


@pytest.mark.parametrize("values", [{"a": [1, 2]}, {"a": [1, 2], "b": [3]}])
def test_few_dimensions(values: dict) -> None:
    assert [row["a"] for row in pairwise(**values)] == [1, 2]


def test_dicts_name_their_values() -> None:
    mark = every_pair(kind={"small": [1], "large": [2]}, other=[3])
    assert [(case.id, case.values) for case in mark.args[1]] == [("small-3", ([1], 3)), ("large-3", ([2], 3))]
