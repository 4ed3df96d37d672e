# SPDX-License-Identifier: Apache-2.0
"""Layers of stock caches, whose place ours take."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionAndFullAttentionLayer

from kvpress.hf.cache.layer import HybridPressLayer, PressLayer

ADOPTED: tuple[type[CacheLayerMixin], ...] = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
"""Stock layers that ours can take the place of; classes that derive from them may store pairs in another way."""


def check_adopted(layer: Any, index: int) -> None:
    """Refuse a cache layer that stores pairs in a way of its own, so that a press would not act on it."""
    if isinstance(layer, PressLayer) or type(layer) in ADOPTED:
        return
    raise NotImplementedError(
        f"layer {index} of the cache is a {type(layer).__name__}, which stores pairs in a way of its own, so a press would not "
        "act on it; use the default dynamic cache: leave past_key_values out, or pass DynamicCache(config=model.config)"
    )


def adopt_layer(cache: Cache, index: int) -> PressLayer | None:
    """Return our layer of the cache at `index`, put in place of a stock one; None where the layer is not one to replace."""
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(layer, PressLayer):
        layer.belong_to(cache)
        return layer
    if type(layer) not in ADOPTED:
        return None
    ours = PressLayer() if type(layer) is DynamicLayer else HybridPressLayer(layer)
    if layer.is_initialized and layer.get_seq_length():
        ours.update(layer.keys, layer.values)
    ours.belong_to(cache)
    cache.layers[index] = ours
    return ours
