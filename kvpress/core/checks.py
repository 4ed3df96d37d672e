"""Checks of arguments; each error names the value, what is allowed and the fix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_ratio(name: str, value: Any) -> None:
    """Check that a compression ratio is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number in [0, 1), got {value!r} of type {type(value).__name__}")
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Check that a size is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number >= {least}, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


def check_finite(keys: Tensor, values: Tensor, layer: int) -> None:
    """Refuse NaN in what a layer is about to compress, naming the place."""
    for name, tensor in (("keys", keys), ("values", values)):
        bad = torch.isnan(tensor)
        if bool(bad.any()):
            row, head, slot = bad.any(dim=-1).nonzero()[0].tolist()
            raise FloatingPointError(f"NaN in {name} of layer {layer}, row {row}, head {head}, token {slot}")
