# SPDX-License-Identifier: Apache-2.0
"""Branches of a conversation: caches that hold what they have in common once."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor
from transformers.cache_utils import Cache

from kvpress.cache.guard import between_passes
from kvpress.hf.cache.layer import PressLayer

CacheT = TypeVar("CacheT", bound=Cache)


def branch(cache: CacheT, attention_mask: Tensor | None = None) -> CacheT:
    """Return a copy of a cache that shares with it everything that was read so far; both go on by themselves.

    That is for another answer to the same turn, or another turn after the same answers: branch where they part. A plain copy
    (`copy.deepcopy`) shares what is sealed, and has its own of the newest pairs, of all pairs where nothing was compressed;
    these are sealed here as they are, in both. `attention_mask [B, seen]` marks real tokens, where rows are padded. What one
    evicts or encodes later it has no longer in common with the other. Layers that grow no further, such as sliding windows, and
    caches that no press has read are copied.

    `kvpress.memory_report(cache, branch)` counts what is shared once.

    Raises:
        TypeError, ValueError: this is no cache, or the mask is missing or of another shape; nothing has changed then.
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
                    "rows of this cache were padded, so a branch needs attention_mask=, which marks the real ones of all "
                    f"{store.seen} tokens"
                )
        elif tuple(mask.shape) != (store.batch, store.seen):
            raise ValueError(
                f"attention_mask must mark all tokens that the cache has seen, {(store.batch, store.seen)}, got "
                f"{tuple(mask.shape)}"
            )
