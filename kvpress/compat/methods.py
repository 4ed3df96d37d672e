# SPDX-License-Identifier: Apache-2.0
"""Methods of the press classes of NVIDIA kvpress: those that can be called here, and those that presses never call."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import MethodType
from typing import Any

MODULE = "kvpress.compat.helpers"
"""Module of the functions that press classes have as helpers."""


@dataclass(frozen=True)
class Helper:
    """Method of a press class, implemented by a function of `kvpress.compat.helpers` that is imported at first use."""

    name: str
    """Name of the method, and of the function unless `function` is given."""
    static: bool = False
    """Whether the function gets no press."""
    callers: tuple[str, ...] = ()
    """Methods besides `compress` that a user may override to call an own version of the helper."""
    function: str = ""
    """Name of the function, where it differs."""
    overridable: bool = False
    """Whether presses call a user's override."""

    def __get__(self, press: Any, kind: type | None = None) -> Any:
        function = getattr(importlib.import_module(MODULE), self.function or self.name)
        return function if self.static or press is None else MethodType(function, press)


SCORES = ("score", "scores")

HELPERS = {
    "CriticalKVPress": (
        Helper("score", function="two_stage_scores", overridable=True),
        Helper("vwl1norm", static=True, callers=SCORES),
    ),
    "DuoAttentionPress": (Helper("load_attention_pattern", static=True, overridable=True),),
    "ExpectedAttentionPress": (
        Helper("get_query_statistics", callers=SCORES),
        Helper("apply_avg_rope", callers=SCORES),
    ),
    "KeyRerotationPress": (Helper("rerotate_keys", static=True),),
    "LeverageScorePress": (Helper("compute_leverage_scores", static=True, callers=SCORES),),
    "PyramidKVPress": (Helper("get_layer_budget"),),
    "SimLayerKVPress": (Helper("is_lazy"),),
    "SnapKVPress": (Helper("compute_window_attention", static=True, callers=SCORES),),
}
"""Methods of NVIDIA kvpress that can be called on a press class, by its name."""

UNUSED = {
    "CAMPress": ("_compute_current_token_attention", "_aggregate_attention_per_kv_head"),
    "DecodingPress": ("_find_target_compression_ratio", "_resolve_target_size"),
    "ExpectedAttentionStatsPress": ("_maybe_load_stats_from_hub",),
    "FastKVzipPress": ("compress_post",),
    "FinchPress": ("embed_token_forward_hook",),
    "KVComposePress": (
        "compress_cache", "compress_structured", "compress_unstructured", "compute_composite_scores",
        "compute_important_per_layer", "compute_scores", "enhance_scores", "prepare_important_masks", "register_context_ids",
        "register_prompt_ids",
    ),
    "KVzipPress": (
        "_chunk_fn", "_compute_cross_attention", "_compute_value_output_norm", "_make_mask", "_mask_causal",
        "_perform_kvzip_compression", "_reset_internal_parameters", "compress_post", "prepare", "score_kvzip",
    ),
    "KeyRerotationPress": ("_rerotate_cos_sin",),
    "LeverageScorePress": ("chol_with_jitter",),
    "MergingPress": ("merge",),
    "NonCausalAttnPress": ("non_causal_chunked_attn",),
    "QFilterPress": ("available_qfilters", "load_q_filters"),
    "ThinKPress": ("compute_window_queries",),
}  # fmt: skip
"""Other methods of NVIDIA kvpress that presses never call here, by the name of the class."""
