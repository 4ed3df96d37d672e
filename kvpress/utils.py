# SPDX-License-Identifier: Apache-2.0
"""Module name of NVIDIA kvpress for the functions of `kvpress.compat.utils`."""

from typing import Any

from kvpress.compat import utils
from kvpress.compat.utils import (
    compute_n_kept,
    dequantize_layer,
    extract_keys_and_values,
    get_prerope_key_states,
    get_prerope_query_states,
    is_prefilling,
    set_keys_and_values,
)

__all__ = [
    "compute_n_kept",
    "dequantize_layer",
    "extract_keys_and_values",
    "get_prerope_key_states",
    "get_prerope_query_states",
    "is_prefilling",
    "set_keys_and_values",
]


def __getattr__(name: str) -> Any:
    if name == "SUPPORTED_MODELS":
        return utils.SUPPORTED_MODELS
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
