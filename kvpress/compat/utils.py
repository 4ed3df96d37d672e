# SPDX-License-Identifier: Apache-2.0
"""Functions of `kvpress.utils` of NVIDIA kvpress, for presses that users write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import QuantizedLayer

from kvpress.hf.attention.queries import intercept
from kvpress.hf.models import find_rotary, listed_models
from kvpress.hf.session.requests import InterceptedError

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
        return listed_models()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def compute_n_kept(k_len: int, compression_ratio: float) -> int:
    """Return the number of `k_len` pairs that a ratio keeps: at least one, but none for a ratio of 1."""
    return 0 if compression_ratio >= 1 else max(1, int(k_len * (1 - compression_ratio)))


def is_prefilling(cache_position: Tensor, q_len: int) -> bool:
    """Whether a pass reads `q_len` tokens at `cache_position [q_len]` into an empty cache."""
    return int(cache_position[-1]) + 1 == q_len


def get_prerope_query_states(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """Return the queries `[B, Hq, n, D]` of an attention module for its input `[B, n, hidden]`, before the rotary embedding.

    The module's own forward computes them, with its projections and norms.
    """
    return _unrotated(module, hidden_states).queries


def get_prerope_key_states(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """Return the keys `[B, H, n, D]` of an attention module for its input, before the rotary embedding; see the queries."""
    return _unrotated(module, hidden_states).keys


def dequantize_layer(cache_layer: Any) -> tuple[Tensor, Tensor]:
    """Return the keys and values `[B, H, n, D]` that a layer of a `QuantizedCache` of transformers stores as codes.

    The newest pairs, which such a layer keeps beside its codes, are not part of the result. Layers of this library decode
    all of their pairs.

    Raises:
        ValueError: heads of a layer of this library store different numbers of pairs.
    """
    if not isinstance(cache_layer, QuantizedLayer):
        return cache_layer.keys, cache_layer.values
    return cache_layer._dequantize(cache_layer._quantized_keys), cache_layer._dequantize(cache_layer._quantized_values)


def extract_keys_and_values(cache: Any, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Return the keys `[B, H, n, D]` and values that a layer of a cache stores; see `dequantize_layer`.

    Raises:
        ValueError: heads store different numbers of pairs.
    """
    return dequantize_layer(cache.layers[layer_idx])


def set_keys_and_values(cache: Any, layer_idx: int, keys: Tensor, values: Tensor) -> None:
    """Replace all pairs of a layer of a cache by keys and values `[B, H, n, D]`."""
    cache.layers[layer_idx].keys, cache.layers[layer_idx].values = keys, values


def _unrotated(module: nn.Module, hidden_states: Tensor) -> InterceptedError:
    """Return queries and keys of an attention module, computed with a rotation of angle 0."""
    embedding = find_rotary(module, module)
    positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
    like = hidden_states.new_empty(1, hidden_states.shape[1], int(getattr(module, "head_dim")))  # noqa: B009 - for type checkers
    cos = like if embedding is None else embedding(hidden_states, positions)[0]
    return intercept(module, hidden_states, {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(cos))})
