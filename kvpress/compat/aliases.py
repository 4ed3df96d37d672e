# SPDX-License-Identifier: Apache-2.0
"""Module names of NVIDIA kvpress, as aliases that import the classes of this library."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from kvpress.core.registry import class_named

MODULES = (
    "adakv_press", "base_press", "block_press", "cam_press", "cap_press", "chunk_press", "chunkkv_press",
    "compactor_press", "composed_press", "compression_ratio_decoding_press", "criticalkv_press", "cur_press",
    "decoding_press", "dms_press", "duo_attention_press", "entropy_gated_chunkkv_press", "expected_attention_press",
    "expected_attention_with_stats",
    "fastkvzip_press", "finch_press", "key_rerotation_press", "keydiff_press", "knorm_press", "kvcompose_press",
    "kvgrad_press", "kvzap_press", "kvzip_press", "lagkv_press", "leverage_press", "lukv_press", "merging_press",
    "non_causal_attention_press", "observed_attention_press", "per_layer_compression_press", "prefill_decoding_press",
    "pyramidkv_press", "qfilter_press", "random_press", "restorekv_press", "scorer_press", "simlayerkv_press",
    "snapkv_press", "streaming_llm_press", "think_press", "tova_press",
)  # fmt: skip
"""Modules of `kvpress.presses` in NVIDIA kvpress whose methods this library has."""

NAMES = {
    "kvpress.compat.attention_patch": ("patch_attention_functions",),
    "kvpress.compat.networks": ("FastKVzipGate", "KVzapConfig", "KVzapModel"),
    "kvpress.compat.published": ("PATTERNS_DICT", "load_budget_curve"),
    "kvpress.compat.utils": (
        "SUPPORTED_MODELS", "compute_n_kept", "dequantize_layer", "extract_keys_and_values", "get_prerope_key_states",
        "get_prerope_query_states", "is_prefilling",
    ),
}  # fmt: skip
"""Names besides press classes that can be imported from the modules of NVIDIA kvpress, by the module that has them here."""

PLACES = {name: place for place, names in NAMES.items() for name in names}


def other_name(name: str) -> Any:
    """Return an object of `NAMES`.

    Raises:
        KeyError: there is none of this name.
    """
    return getattr(importlib.import_module(PLACES[name]), name)


class Alias(ModuleType):
    """Module without a file; its attributes are press classes and `NAMES`."""

    def __getattr__(self, name: str) -> Any:
        if name in PLACES:
            return other_name(name)
        return class_named(name, self.__name__)


def alias_modules(package: str) -> None:
    """Add the aliases of `MODULES` to a package."""
    for name in MODULES:
        alias = Alias(f"{package}.{name}", f"Alias for a module of NVIDIA kvpress; see `{package}`.")
        sys.modules.setdefault(alias.__name__, alias)
        setattr(sys.modules[package], name, alias)
