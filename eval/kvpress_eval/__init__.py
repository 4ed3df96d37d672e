"""Measures what KV-cache compression does to accuracy, memory and speed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

__all__ = ["evaluate"]


def evaluate(model: Any, presses: Sequence[Any], tasks: Sequence[str], *, tokenizer: Any = None, **fields: Any) -> Any:
    """Run presses on tasks and return one row per sample, as a DataFrame if pandas is installed.

    `model` is a name, or a model that is loaded already, with its `tokenizer`; `presses` are specs or presses. `fields` are
    those of `RunConfig`: `lengths`, `samples`, `seed`, `out` and so on. A run that was stopped continues when called again
    with the same `out`; a cell that failed is one row with the reason.

        rows = evaluate("reference", ["none", "snapkv:0.5"], ["niah_single"], lengths=[512], samples=10)

    Raises:
        ConfigError: a field is wrong, or a press does not suit the model.
        DataError: the model or the data of a task cannot be read.
        OutputError: `out` cannot be written.
    """
    from rich.console import Console

    from kvpress.core.spec import to_spec
    from kvpress_eval.common.errors import ConfigError
    from kvpress_eval.config.load import load_config
    from kvpress_eval.results.cells import flatten
    from kvpress_eval.run.models import engine_of, name_of
    from kvpress_eval.run.runner import run

    named = isinstance(model, str)
    placed = sorted({"device", "device_map", "dtype"} & fields.keys())
    if placed and not named:
        raise ConfigError(
            f"{', '.join(placed)} cannot be chosen for a model that is loaded already; give its name instead"
        )
    specs = [press if isinstance(press, str) else to_spec(press) for press in presses]
    engine = None if named else engine_of(model, tokenizer)
    name = model if named else name_of(model)
    result = run(load_config(None, {**fields, "model": name, "presses": specs, "tasks": tasks}), Console(), engine)
    rows = [row for cell in result.cells for row in flatten(cell)]
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas

    return pandas.DataFrame(rows)
