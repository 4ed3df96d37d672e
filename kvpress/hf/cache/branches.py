# SPDX-License-Identifier: Apache-2.0
"""Branches of a conversation: copies of a cache that share their common pairs."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor
from transformers.cache_utils import Cache

from kvpress.cache.guard import between_passes
from kvpress.hf.cache.layer import PressLayer

CacheT = TypeVar("CacheT", bound=Cache)


def branch(cache: CacheT, attention_mask: Tensor | None = None) -> CacheT:
    """Return a copy of a cache that shares all pairs read so far; both continue independently.

    Use it for several answers to one turn, or several turns after the same answer. `copy.deepcopy` shares only sealed pairs;
    `branch` first seals the newest pairs, unencoded, in both caches. Pairs that one cache evicts or encodes later are no longer
    shared. Layers that do not grow, such as sliding windows, and caches that no press has read are copied.

    `kvpress.memory_report(cache, branch)` counts shared pairs once.

    Args:
        cache: the cache to branch from.
        attention_mask: real tokens `[B, seen]`, needed if rows are padded.

    Raises:
        TypeError, ValueError: not a cache, or the mask is missing or has another shape. Nothing has changed then.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"branch needs a cache, such as `outputs.past_key_values`, got {type(cache).__name__}")
    with between_passes(cache):
        layers = [layer for layer in cache.layers if isinstance(layer, PressLayer) and layer.store is not None]
        _check_mask(layers, attention_mask)
        mask = None if attention_mask is None else attention_mask.bool()
        for layer in layers:
            layer.check_whole()
        for layer in layers:
            if layer.store is not None and layer.store.window.length:
                layer.store.close(None if mask is None or bool(mask.all()) else mask)
        return copy.deepcopy(cache)


def _check_mask(layers: list[PressLayer], mask: Tensor | None) -> None:
    for layer in layers:
        store = layer.store
        if store is None:
            continue
        if mask is None:
            if layer.padded and store.window.length:
                raise ValueError(
                    "rows of this cache were padded, so a branch needs attention_mask=, which marks the real tokens among all "
                    f"{store.seen} tokens"
                )
        elif tuple(mask.shape) != (store.batch, store.seen):
            raise ValueError(
                f"attention_mask must mark all tokens that the cache has seen, {(store.batch, store.seen)}, got "
                f"{tuple(mask.shape)}"
            )
