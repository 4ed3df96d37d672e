"""Operators over flat storage: decode attention on dense, quantised and coded rows, and scores of stored rows.

Each operator runs a compiled CPU kernel where one is available and a plain torch reference everywhere else.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "dense_decode": "dense",
    "dense_select": "dense",
    "uniform_decode": "uniform",
    "uniform_select": "uniform",
    "lookup_decode": "lookup",
    "lookup_select": "lookup",
    "column_mass": "columns",
    "column_max": "columns",
    "page_bounds": "pages",
    "label_scores": "pages",
    "top_rows": "select",
    "serves": "serving",
    "available": "cpu.launch",
    "counters": "counting",
    "reset_counters": "counting",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
