# SPDX-License-Identifier: Apache-2.0
"""Smaller methods that presses of NVIDIA kvpress have, which its users call, and override in classes of their own.

Presses of this library work from what they watched, and so without them; a user's override is asked in its place.
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
"""Methods there whose work is divided up in another way here, so that nothing would ask an override."""


def helper(function: FunctionT) -> FunctionT:
    """Mark a method that is here to be called and overridden: the press itself only asks overrides of it."""
    setattr(function, MARK, True)
    return function


def override_of(press: Any, name: str) -> Callable[..., Any] | None:
    """Return the method that a user has put in the place of a helper; None where there is none."""
    found: Callable[..., Any] = getattr(press, name)
    return None if getattr(found, MARK, False) else found


def overrides_helper_of_hidden_states(press: Any) -> bool:
    """Whether a user has overridden a helper that gets hidden states, which have to be kept for it then."""
    helpers = {
        name: function
        for kind in type(press).__mro__
        for name, found in vars(kind).items()
        if hasattr(function := getattr(found, "__func__", found), MARK)
    }
    return any(
        override_of(press, name) and "hidden_states" in inspect.signature(each).parameters
        for name, each in helpers.items()
    )


def check_overrides(kind: type) -> None:
    """Refuse a class that overrides what nothing asks: it would go unnoticed.

    Raises:
        TypeError: with the name of the method.
    """
    for base in kind.__mro__[1:]:
        for name in UNASKED.get(base.__name__, ()):
            if name in vars(kind) and "compress" not in vars(kind) and base.__module__.startswith("kvpress."):
                raise TypeError(
                    f"{kind.__name__} overrides {name!r}, which {base.__name__} has in NVIDIA kvpress and never calls here: "
                    "override `compress`, or `score` of a ScorerPress, or give the method another name"
                )


def arguments_of(view: View) -> tuple[nn.Module, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return module, hidden states, keys `[b, H, n, D]` and position embeddings for a helper that looks at a whole layer.

    In the place of kv heads that the view does not show, it gets the keys of the one that it shows.
    """
    module, hidden, keys, _, _, kwargs = score_arguments(view)
    return module, hidden, keys.expand(-1, view.call.store.heads, -1, -1), kwargs["position_embeddings"]


def of_heads(view: View, found: Tensor) -> Tensor:
    """Return the query heads of a view from what a helper says `[b, Hq, ...]` of all."""
    return found.unflatten(1, (view.call.store.heads, -1))[:, view.heads].flatten(1, 2)
