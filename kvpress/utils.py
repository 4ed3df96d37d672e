# SPDX-License-Identifier: Apache-2.0
"""What presses that users write ask of a model and its cache, under the names of NVIDIA kvpress."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvpress.hf.attention.functions import AskedError, asked
from kvpress.hf.models import find_rotary, listed_models

__all__ = [
    "compute_n_kept",
    "extract_keys_and_values",
    "get_prerope_key_states",
    "get_prerope_query_states",
    "is_prefilling",
    "set_keys_and_values",
]


def __getattr__(name: str) -> Any:
    if name == "SUPPORTED_MODELS":
        return listed_models()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def compute_n_kept(k_len: int, compression_ratio: float) -> int:
    """Return how many of `k_len` pairs a ratio leaves: at least one, and none for a ratio of 1."""
    return 0 if compression_ratio >= 1 else max(1, int(k_len * (1 - compression_ratio)))


def is_prefilling(cache_position: Tensor, q_len: int) -> bool:
    """Whether a pass reads `q_len` tokens at `cache_position [q_len]` into an empty cache."""
    return int(cache_position[-1]) + 1 == q_len


def get_prerope_query_states(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """Return the queries `[B, Hq, n, D]` of an attention module for its input `[B, n, hidden]`, before the rotary embedding.

    They are the module's own, with whatever projections and norms it has.
    """
    return _unrotated(module, hidden_states).queries


def get_prerope_key_states(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """Return the keys `[B, H, n, D]` of an attention module for its input, before the rotary embedding; see the queries."""
    return _unrotated(module, hidden_states).keys


def extract_keys_and_values(cache: Any, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Return the keys `[B, H, n, D]` and values that a layer of a cache stores.

    Raises:
        ValueError: heads hold different numbers of pairs.
    """
    return cache.layers[layer_idx].keys, cache.layers[layer_idx].values


def set_keys_and_values(cache: Any, layer_idx: int, keys: Tensor, values: Tensor) -> None:
    """Put keys `[B, H, n, D]` and values in the place of all that a layer of a cache stores."""
    cache.layers[layer_idx].keys, cache.layers[layer_idx].values = keys, values


def _unrotated(module: nn.Module, hidden_states: Tensor) -> AskedError:
    """Ask an attention module with angles of 0."""
    embedding = find_rotary(module, module)
    positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
    like = hidden_states.new_empty(1, hidden_states.shape[1], int(getattr(module, "head_dim")))  # noqa: B009 - for type checkers
    cos = like if embedding is None else embedding(hidden_states, positions)[0]
    return asked(module, hidden_states, {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(cos))})
