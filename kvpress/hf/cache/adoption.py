# SPDX-License-Identifier: Apache-2.0
"""Replace layers of transformers caches by `PressLayer`."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionAndFullAttentionLayer

from kvpress.hf.cache.layer import HybridPressLayer, PressLayer
from kvpress.observe.call import AttentionLayer

ADOPTED: tuple[type[CacheLayerMixin], ...] = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
"""Classes of replaceable layers. Subclasses are excluded, since they may store pairs differently."""


def check_adopted(layer: Any, index: int) -> None:
    """Refuse a cache layer with its own storage of pairs, on which a press could not act."""
    if isinstance(layer, PressLayer) or type(layer) in ADOPTED:
        return
    raise NotImplementedError(
        f"layer {index} of the cache is a {type(layer).__name__}, which stores pairs in its own way, so a press would not "
        "act on it; use the default dynamic cache: leave past_key_values out, or pass DynamicCache(config=model.config)"
    )


def adopt_layer(cache: Cache, index: int, reader: AttentionLayer | None = None) -> PressLayer | None:
    """Return the `PressLayer` at `index`, which replaces a layer of transformers; None if the layer is not replaceable.

    It stores pairs in the form that `reader` needs; without a reader, as the keys and values of each head.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(layer, PressLayer):
        layer.belong_to(cache)
        if reader is not None:
            layer.serve(reader)
        return layer
    if type(layer) not in ADOPTED:
        return None
    press_layer = PressLayer() if type(layer) is DynamicLayer else HybridPressLayer(layer)
    if reader is not None:
        press_layer.serve(reader)
    if layer.is_initialized and layer.get_seq_length():
        press_layer.update(layer.keys, layer.values)
    press_layer.belong_to(cache)
    cache.layers[index] = press_layer
    return press_layer
