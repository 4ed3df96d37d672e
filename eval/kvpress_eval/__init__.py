"""Measures what KV-cache compression does to accuracy, memory and speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["evaluate"]


def evaluate(model: Any, presses: Sequence[Any], tasks: Sequence[str], *, tokenizer: Any = None, **fields: Any) -> Any:
    """Run presses on tasks and return one row per sample, as a DataFrame if pandas is installed.

    `model` is a name, or a model that is loaded already, with its `tokenizer`; `presses` are specs or presses. `fields` are
    those of `RunConfig`: `lengths`, `samples`, `seed`, `out` and so on. A run that was stopped continues when called again
    with the same `out`.

        rows = evaluate("reference", ["none", "snapkv:0.5"], ["niah_single"], lengths=[512], samples=10)

    Raises:
        ConfigError: a field is wrong, or a press does not suit the model.
        DataError: the model or the data of a task cannot be read.
        OutputError: `out` cannot be written.
    """
    from kvpress_eval.api import run_rows

    return run_rows(model, presses, tasks, tokenizer, fields)
