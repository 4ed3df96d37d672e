# SPDX-License-Identifier: Apache-2.0
"""Convert records to CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import parquet


def to_csv(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return records as CSV; lists and mappings are JSON, a missing value is an empty field."""
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
    """Return the values of each column, one per record; the columns are all keys of all records."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [_clean(record.get(name)) for record in records] for name in names}


def _array(values: list[Any]) -> Any:
    """Return a column; values of mixed types become JSON, and so do empty mappings, which Parquet cannot store."""
    try:
        array = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        array = None
    if array is None or (pa.types.is_struct(array.type) and not array.type.num_fields):
        return pa.array([None if value is None else json.dumps(value) for value in values])
    return array


def _clean(value: Any) -> Any:
    """Replace lone surrogates, which a model can generate and UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
