# SPDX-License-Identifier: Apache-2.0
"""Grids in which every two values of different dimensions meet, instead of full products."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Row = dict[str, Any]


def pairwise(allowed: Callable[[Row], bool] = lambda row: True, **dimensions: Iterable[Any]) -> list[Row]:
    """Return rows with a value of every dimension, so that every two values of different dimensions share a row.

    Rows are built greedily, the same ones every time. `allowed` refuses what makes no sense; it is also asked about rows in the
    making, which lack some dimensions, and what it refuses of those stays refused whatever is added.
    """
    values = {name: list(choices) for name, choices in dimensions.items()}
    missing = {
        frozenset({(first, i), (second, j)}): None
        for first, second in itertools.combinations(values, 2)
        for i, j in itertools.product(range(len(values[first])), range(len(values[second])))
    }
    if len(values) == 1:
        return [{name: value} for name, choices in values.items() for value in choices]
    rows = []
    while missing:
        start = next(iter(missing))
        row = dict(start)
        for name in sorted(values, key=lambda name: name not in row):  # the two given ones first
            chosen = {dimension: values[dimension][at] for dimension, at in row.items() if dimension != name}
            candidates = [row[name]] if name in row else range(len(values[name]))
            fitting = [at for at in candidates if allowed({**chosen, name: values[name][at]})]
            if not fitting:
                break
            # Of equally good values another one each time, so that rows differ where nothing is left to meet.
            row[name] = max(
                fitting,
                key=lambda at: (
                    sum(frozenset({(name, at), choice}) in missing for choice in row.items()),
                    (at + len(missing)) % len(values[name]),
                ),
            )
        else:
            rows.append({name: values[name][row[name]] for name in values})
            for pair in itertools.combinations(row.items(), 2):
                missing.pop(frozenset(pair), None)
        missing.pop(start, None)
    return rows


def every_pair(allowed: Callable[[Row], bool] = lambda row: True, **dimensions: Any) -> pytest.MarkDecorator:
    """Parametrize a test by the rows of `pairwise`; a dimension given as a dict names its values."""
    cases = []
    for row in pairwise(allowed, **dimensions):
        values = [dimensions[name][at] if isinstance(dimensions[name], dict) else at for name, at in row.items()]
        cases.append(pytest.param(*values, id="-".join(map(str, row.values()))))
    return pytest.mark.parametrize(tuple(dimensions), cases)
