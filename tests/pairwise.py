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

    Rows are built greedily, and are the same every time. `allowed` returns whether a combination makes sense; it also
    gets incomplete rows, and a refused incomplete row stays refused with any completion.
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
        for name in sorted(values, key=lambda name: name not in row):  # the first two are fixed
            chosen = {dimension: values[dimension][at] for dimension, at in row.items() if dimension != name}
            candidates = [row[name]] if name in row else range(len(values[name]))
            fitting = [at for at in candidates if allowed({**chosen, name: values[name][at]})]
            if not fitting:
                break
            # Among equally good values, take a different one each time, so that rows vary once all pairs are covered.
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
    """Parametrize a test by the rows of `pairwise`; the keys of a dimension that is a dict name its values."""
    cases = []
    for row in pairwise(allowed, **dimensions):
        values = [dimensions[name][at] if isinstance(dimensions[name], dict) else at for name, at in row.items()]
        cases.append(pytest.param(*values, id="-".join(map(str, row.values()))))
    return pytest.mark.parametrize(tuple(dimensions), cases)
