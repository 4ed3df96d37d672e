# SPDX-License-Identifier: Apache-2.0
"""Batches of caches: rows that were read separately go on in one batch, and leave it again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvpress.cache.guard import between_passes
from kvpress.cache.join import join_rows, padding_of
from kvpress.cache.rotation import Angles
from kvpress.cache.store import KVStore
from kvpress.hf.cache.layer import HybridPressLayer, PressLayer


def join(caches: Sequence[Cache], attention_masks: Sequence[Tensor | None] | None = None) -> tuple[Cache, Tensor]:
    """Return one cache with the rows of all `caches`, and its mask of real tokens, bool `[B, seen]`.

    Each row then decodes as it would in its own cache: its evictions, its encoding and its selected pairs depend on that row
    alone. Use it for continuous batching: join the cache of a new prompt with that of the running batch, and take rows out with
    `cache.batch_select_indices`, followed by `join([cache], [mask])`, which drops padding that no row needs. No pair is copied;
    segments that caches share, as branches do (`kvpress.branch`), are read once for all rows.

    The caches do not change, and must not be continued: they share their pairs with the result. Pass the mask, extended by one
    column of ones per token, with every further pass, and continue under the press of the caches. Tokens read so far cannot be
    taken back from the result.

    Args:
        caches: caches of one model, read under one press, each with one or more rows.
        attention_masks: real tokens `[B, seen]` of each cache, None where nothing is padded; padding only on the left.

    Raises:
        ValueError: there is no cache, a mask does not fit, or the caches are not of one model and one press.
        NotImplementedError: a layer has states that do not grow, such as a sliding window, or the press keeps a record whose
            length depends on the tokens read; the message names it. Nothing has changed then.
    """
    masks = [None] * len(caches) if attention_masks is None else list(attention_masks)
    if not caches or len(masks) != len(caches):
        raise ValueError(
            f"join needs a cache or more, and a mask for each, got {len(caches)} caches, {len(masks)} masks"
        )
    with ExitStack() as stack:
        for cache in {id(cache): cache for cache in caches}.values():
            stack.enter_context(between_passes(cache))
        stores = [_stores(cache) for cache in caches]
        if len({len(of_cache) for of_cache in stores}) > 1:
            raise ValueError(f"only caches of one model can be joined, but they have {[len(s) for s in stores]} layers")
        bool_masks = [None if mask is None else mask.bool() for mask in masks]
        pads = [padding_of(of_cache[0], mask) for of_cache, mask in zip(stores, bool_masks, strict=True)]
        shared = _joined_shared([cache.__dict__.get("_kvpress_shared", {}) for cache in caches])
        joined_stores = [join_rows(list(layer), pads) for layer in zip(*stores, strict=True)]
        joined = DynamicCache()
        joined.__dict__["_kvpress_shared"] = shared
        if torch.is_inference_mode_enabled() or any("_kvpress_inference" in cache.__dict__ for cache in caches):
            joined.__dict__["_kvpress_inference"] = True
        joined.layers = [
            _layer_of(joined, layer, store) for layer, store in zip(caches[0].layers, joined_stores, strict=True)
        ]
    seen = joined_stores[0].seen
    lengths = [cache[0].seen - pad for cache, row_pads in zip(stores, pads, strict=True) for pad in row_pads]
    device = joined_stores[0].device
    mask = torch.arange(seen, device=device) >= seen - torch.tensor(lengths, device=device)[:, None]
    return joined, mask


def _stores(cache: Cache) -> list[KVStore]:
    stores = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is not PressLayer:
            kind = "recurrent states" if isinstance(layer, HybridPressLayer) else f"a {type(layer).__name__}"
            raise NotImplementedError(
                f"layer {index} of the cache has {kind}, whose rows cannot be joined with those of another length; caches "
                "can be joined where every layer has full attention and was read under a press"
            )
        layer.check_whole()
        if layer.store is None:
            raise ValueError(f"layer {index} of a cache has read no tokens; read the prompt before joining")
        stores.append(layer.store)
    if not stores:
        raise ValueError("a cache has read no tokens; read the prompt before joining")
    return stores


def _layer_of(cache: Cache, like: Any, store: KVStore) -> PressLayer:
    layer = PressLayer(cache).take_over(like)
    layer.store, layer.batch_size = store, store.batch
    return layer


def _joined_shared(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the state that all layers of each cache share: tables of angles, and marks of issued warnings.

    Raises:
        NotImplementedError: a selector keeps state of a pass in it.
    """
    joined: dict[str, Any] = {}
    for state in states:
        for name, value in state.items():
            if not isinstance(value, (Angles, bool)):
                raise NotImplementedError(f"the state {name!r} of a cache cannot be joined: run its rows separately")
            known = joined.get(name)
            if not (isinstance(value, Angles) and isinstance(known, Angles)) or len(value.coarse) > len(known.coarse):
                joined[name] = value
    return joined
