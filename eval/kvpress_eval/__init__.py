"""Measures what KV-cache compression does to accuracy, memory and speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["evaluate"]


def evaluate(model: str, presses: Sequence[str], tasks: Sequence[str], **fields: Any) -> Any:
    """Run presses on tasks and return one row per sample, as a DataFrame if pandas is installed.

    `fields` are those of `RunConfig`: `lengths`, `samples`, `seed`, `out` and so on. A run that was stopped
    continues when called again with the same `out`.

        rows = evaluate("reference", ["none", "snapkv:0.5"], ["niah_single"], lengths=[512], samples=10)
    """
    from kvpress_eval.api import run_rows

    return run_rows(model=model, presses=presses, tasks=tasks, **fields)
