# SPDX-License-Identifier: Apache-2.0
"""Measure how KV-cache compression changes accuracy, memory and speed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["evaluate", "tune"]


def evaluate(
    model: Any,
    presses: Sequence[Any],
    tasks: Sequence[str],
    *,
    tokenizer: Any = None,
    report: str | Path | None = None,
    **fields: Any,
) -> Any:
    """Run presses on tasks and return one row per sample, as a DataFrame if pandas is installed.

    `model` is a name, or a loaded model together with its `tokenizer`; `presses` are specs or presses. `fields` are fields of
    `RunConfig`: `lengths`, `samples`, `seed`, `out` and so on. A stopped run continues when called again with the same `out`;
    a cell that failed is one row with the reason. With `report`, such as `report.html`, a report of all results in `out` is
    written to this page, with plots and tables beside it.

        rows = evaluate("reference", ["none", "snapkv:0.5"], ["niah_single"], lengths=[512], samples=10)

    Raises:
        ConfigError: a field is wrong, or a press does not suit the model.
        DataError: the model or the data of a task cannot be read.
        OutputError: `out` cannot be written.
    """
    from rich.console import Console

    from kvpress.core.spec import to_spec
    from kvpress_eval.config.load import load_config
    from kvpress_eval.results.cells import flatten
    from kvpress_eval.run.runner import run

    name, engine = _named(model, tokenizer, fields)
    specs = [press if isinstance(press, str) else to_spec(press) for press in presses]
    config = load_config(None, {**fields, "model": name, "presses": specs, "tasks": tasks})
    result = run(config, Console(), engine)
    if report is not None:
        from kvpress_eval.report.write import write_outputs

        write_outputs([config.out], Path(report))
    rows = [row for cell in result.cells for row in flatten(cell)]
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas

    return pandas.DataFrame(rows)


def tune(model: Any, *, tokenizer: Any = None, **wishes: Any) -> Any:
    """Find the press that fits a memory limit and loses least; return it with its figures on held-out samples.

    `model` is a name, or a loaded model together with its `tokenizer`. `wishes` are the options of `kvpress tune`: `smaller`
    or `memory`, `max_drop`, `confidence`, `data`, `context`, `batch`, `held_out`, `candidates`, `minutes`; and fields of
    `RunConfig` such as `tasks`, `lengths`, `samples`, `seed` and `out`. A stopped search continues when called again with the
    same `out`.

        result = tune("reference", smaller=10, lengths=[1024], out="best")
        press = kvpress.get_press(result.press)

    Raises:
        ConfigError: an option is wrong, no press fits the limit, or the model retrieves nothing.
        DataError: the model or the data cannot be read.
        OutputError: `out` cannot be written, or belongs to another search.
    """
    from dataclasses import fields

    from rich.console import Console

    from kvpress_eval.config.load import load_config
    from kvpress_eval.tuning.find import tune as find
    from kvpress_eval.tuning.wishes import Wishes

    name, engine = _named(model, tokenizer, wishes)
    options = {field.name for field in fields(Wishes)}
    settings = {"lengths": (1024,), "samples": 32, "out": "best", **wishes}
    config = load_config(None, {**{key: settings[key] for key in settings.keys() - options}, "model": name})
    return find(config, Wishes(**{key: settings[key] for key in settings.keys() & options}), Console(), engine)


def _named(model: Any, tokenizer: Any, fields: dict[str, Any]) -> tuple[str, Any]:
    """Return the name of a model, and an engine if it is loaded already."""
    from kvpress_eval.common.errors import ConfigError
    from kvpress_eval.run.models import engine_of, name_of

    if isinstance(model, str):
        return model, None
    placed = sorted({"device", "device_map", "dtype", "model_kwargs"} & fields.keys())
    if placed:
        raise ConfigError(
            f"{', '.join(placed)} cannot be chosen for a model that is loaded already; pass its name instead"
        )
    return name_of(model), engine_of(model, tokenizer)
