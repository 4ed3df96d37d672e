# SPDX-License-Identifier: Apache-2.0
"""Small data files: one JSON object per line, as most data sets are published."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def to_lines(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_lines(path: Path, *rows: Any) -> Path:
    """Write rows to a file, whose folder is made where there is none; returns its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(to_lines(rows), encoding="utf-8")
    return path
