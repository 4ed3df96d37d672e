"""Results as rows for notebooks and scripts."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from kvpress.spec import to_spec
from kvpress_eval.errors import ConfigError
from kvpress_eval.models import engine_of, name_of
from kvpress_eval.results import flatten
from kvpress_eval.runner import run
from kvpress_eval.yaml_config import load_config


def run_rows(
    model: str | PreTrainedModel, presses: Sequence[Any], tasks: Sequence[str], tokenizer: Any, fields: dict[str, Any]
) -> Any:
    """Run a configuration and return its rows; a cell that failed is one row with the reason."""
    placed = sorted({"device", "device_map", "dtype"} & fields.keys())
    if placed and not isinstance(model, str):
        raise ConfigError(
            f"{', '.join(placed)} cannot be chosen for a model that is loaded already; give its name instead"
        )
    specs = [press if isinstance(press, str) else to_spec(press) for press in presses]
    engine = None if isinstance(model, str) else engine_of(model, tokenizer)
    name = model if isinstance(model, str) else name_of(model)
    config = load_config(None, {**fields, "model": name, "presses": specs, "tasks": tasks})
    result = run(config, Console(), engine)
    rows = [row for cell in result.cells for row in flatten(cell)]
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas

    return pandas.DataFrame(rows)
