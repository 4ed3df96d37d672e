# SPDX-License-Identifier: Apache-2.0
"""Helper methods of presses of NVIDIA kvpress, which users call or override in subclasses.

Presses of this library read observers and do not call the helpers; an override in a user's class is called instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from kvpress.observe.view import View, score_arguments

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
MARK = "_kvpress_helper"

UNASKED = {
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
"""Methods of NVIDIA kvpress that have no counterpart here, so an override would never be called."""


def helper(function: FunctionT) -> FunctionT:
    """Mark a method as a helper: the press calls it only if a user overrides it."""
    setattr(function, MARK, True)
    return function


def override_of(press: Any, name: str) -> Callable[..., Any] | None:
    """Return the override of a helper in a user's class; None without one."""
    function: Callable[..., Any] = getattr(press, name)
    return None if getattr(function, MARK, False) else function


def overrides_helper_of_hidden_states(press: Any) -> bool:
    """Whether a user's class overrides a helper with hidden states as an argument, for which they must be stored."""
    helpers = {
        name: function
        for kind in type(press).__mro__
        for name, value in vars(kind).items()
        if hasattr(function := getattr(value, "__func__", value), MARK)
    }
    return any(
        override_of(press, name) and "hidden_states" in inspect.signature(function).parameters
        for name, function in helpers.items()
    )


def check_overrides(kind: type) -> None:
    """Check that a class overrides only methods that this library calls.

    Raises:
        TypeError: the class overrides a method that is never called; the message names it.
    """
    for base in kind.__mro__[1:]:
        for name in UNASKED.get(base.__name__, ()):
            if name in vars(kind) and "compress" not in vars(kind) and base.__module__.startswith("kvpress."):
                raise TypeError(
                    f"{kind.__name__} overrides {name!r}, which {base.__name__} has in NVIDIA kvpress and never calls here: "
                    "override `compress`, or `score` of a ScorerPress, or give the method another name"
                )


def arguments_of(view: View) -> tuple[nn.Module, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return module, hidden states, keys `[b, H, n, D]` and position embeddings for a helper that reads all heads of a layer.

    A view of one KV head is expanded: its keys stand for those of all H heads.
    """
    module, hidden, keys, _, _, kwargs = score_arguments(view)
    return module, hidden, keys.expand(-1, view.call.store.heads, -1, -1), kwargs["position_embeddings"]


def of_heads(view: View, result: Tensor) -> Tensor:
    """Return the query heads of a view, taken from the `result [b, Hq, ...]` of a helper for all heads."""
    return result.unflatten(1, (view.call.store.heads, -1))[:, view.heads].flatten(1, 2)
