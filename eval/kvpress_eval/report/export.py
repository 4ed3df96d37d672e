# SPDX-License-Identifier: Apache-2.0
"""Records as CSV and Parquet, for other programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import parquet


def to_csv(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return records as CSV: lists are JSON, an empty field is a value that a record does not have."""
    out = io.StringIO()
    columns = _columns(records)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([json.dumps(value) if isinstance(value, (list, dict)) else value for value in row])
    return out.getvalue().encode()


def to_parquet(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return records as Parquet."""
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({name: _array(values) for name, values in _columns(records).items()}), sink)
    return sink.getvalue().to_pybytes()


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values by name; every name of any record is a column."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [_clean(record.get(name)) for record in records] for name in names}


def _array(values: list[Any]) -> Any:
    """Return a column; values of different types, such as two sorts of settings, are JSON, and so are empty mappings."""
    try:
        array = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        array = None
    if array is None or (pa.types.is_struct(array.type) and not array.type.num_fields):
        return pa.array([None if value is None else json.dumps(value) for value in values])
    return array


def _clean(value: Any) -> Any:
    """Replace halves of surrogate pairs, which a model can write and no file can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
