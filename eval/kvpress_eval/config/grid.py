# SPDX-License-Identifier: Apache-2.0
"""A grid of models x presses x ratios x tasks x lengths: one file or command, one validated run for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvpress
from kvpress.core.effect import check_acts
from kvpress.core.press import BudgetPress
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.config.load import read_values, validate
from kvpress_eval.config.schema import RunConfig

RATIO = "{ratio}"
"""Placeholder in the spec of a press, replaced by each ratio of a grid."""
KEYS = ("models", "ratios")
"""Keys of a grid that are not fields of a run."""


def load_grid(path: Path | None, overrides: dict[str, Any]) -> list[RunConfig]:
    """Return one run per model of a file (or of the defaults) with some keys replaced.

    `models` replaces `model`. Each ratio of `ratios` replaces `{ratio}` in a press, or becomes the argument of a budget press
    that is given by its name alone. Presses without a ratio appear once.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or no press takes the ratios.
    """
    values, lines = read_values(path, KEYS)
    if "model" in overrides or "models" in overrides:
        values.pop("model", None), values.pop("models", None)
    values = {**values, **overrides}
    models, ratios = _sequence(values, "models"), _sequence(values, "ratios")
    if models is not None and "model" in values:
        raise ConfigError("give model or models, not both")
    if ratios is not None:
        values["presses"] = expand_ratios(_sequence(values, "presses") or (), ratios)
    if models is None:
        return [validate(values, path, lines, overrides)]
    return [validate({**values, "model": model}, path, lines, overrides) for model in dict.fromkeys(models)]


def expand_ratios(presses: Sequence[str], ratios: Sequence[Any]) -> list[str]:
    """Return the presses of a grid; a press that takes a ratio appears once per ratio."""
    expanded, used = [], False
    for spec in presses:
        template = f"{spec}:{RATIO}" if _is_budget(spec) else str(spec)
        varies = RATIO in template
        if not varies:
            _check_takes_no_ratio(template)
        expanded += [template.replace(RATIO, str(ratio)) for ratio in ratios] if varies else [template]
        used |= varies
    if not used:
        raise ConfigError(
            f"ratios {list(ratios)} go to no press: name an evicting press alone, as in `snapkv`, or write {RATIO} where "
            f"its ratio stands, as in `adakv(snapkv:{RATIO})`"
        )
    return expanded


def _check_takes_no_ratio(spec: str) -> None:
    """Raise ConfigError for a press that takes no ratio of the grid and compresses nothing without one."""
    try:
        press = kvpress.get_press(spec)
    except (KeyError, ValueError, TypeError):
        return  # `validate` reports this error with the line of the file
    try:
        check_acts(press)
    except ValueError as error:
        raise ConfigError(f"{error}. Ratios go to presses that are only named, or where {RATIO} stands") from error


def _is_budget(spec: Any) -> bool:
    """Whether a spec is the bare name of a press with a budget."""
    if not isinstance(spec, str) or not spec.strip().isidentifier():
        return False
    try:
        return isinstance(kvpress.get_press(spec), BudgetPress)
    except (KeyError, ValueError, TypeError):
        return False


def _sequence(values: dict[str, Any], key: str) -> Sequence[Any] | None:
    """Return a list by its key, None if it is absent; keys of `KEYS` are removed from `values`."""
    items = values.pop(key, None) if key in KEYS else values.get(key)
    if items is None:
        return None
    if isinstance(items, str) or not isinstance(items, Sequence) or not items:
        raise ConfigError(f"{key}: expected a list with at least one item, got {items!r}")
    return items
