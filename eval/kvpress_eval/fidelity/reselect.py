# SPDX-License-Identifier: Apache-2.0
"""Candidates for the layer in which TidalDecode selects again, compared on the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvpress.core.spec import to_spec
from kvpress.hf.models import layer_types, load_config
from kvpress.sparse import TidalDecodePress
from kvpress_eval.common.errors import ConfigError, DataError


def candidates(model: str, budget: float, skip_layers: int, heads: str) -> list[str]:
    """Return one press per layer that may select again: layers with a growing cache after the first that selects.

    Raises:
        ConfigError: an argument is out of range, or the model has no such layer.
        DataError: the model's configuration cannot be read.
    """
    try:
        kinds = layer_types(load_config(model).get_text_config(decoder=True))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the configuration of {model!r}: {error}") from error
    growing = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    layers = [layer for layer in growing if layer >= skip_layers][1:]
    if len(layers) < 2:
        raise ConfigError(
            f"{model!r} has {len(growing)} layers with a growing cache, {len(layers)} of them after the first that selects "
            f"with skip_layers={skip_layers}; a comparison needs 2, so use a smaller skip_layers"
        )
    try:
        first = TidalDecodePress(budget, skip_layers=skip_layers, heads=heads)
        return [to_spec(replace(first, reselect_layer=layer)) for layer in layers]
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def best(rows: Sequence[dict[str, Any]]) -> str:
    """Return the press whose next-token distributions stay closest to those of the full cache."""
    return str(min(rows, key=lambda row: row["kl_mean"])["press"])
