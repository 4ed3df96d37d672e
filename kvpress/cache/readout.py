# SPDX-License-Identifier: Apache-2.0
"""Dense tensors of all pairs of a store, for models without a press."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore


def dense_pairs(store: KVStore) -> tuple[Tensor, Tensor]:
    """Return all keys `[B, H, n, D]` and values `[B, H, n, Dv]`: copies, unless nothing is sealed yet.

    Raises:
        ValueError: heads or rows hold different numbers of pairs.
    """
    window = store.window
    if not store.sealed:
        return window.filled_keys, window.filled_values
    if not all(part.layout.uniform for part in store.sealed):
        raise ValueError("heads hold different numbers of pairs: see kvpress.kept_positions and the layer's store")
    shape = (store.batch, store.heads, -1)
    keys, values = zip(*(part.read(slice(None)) for part in store.sealed), strict=True)
    return (
        torch.cat([*(part.unflatten(0, shape) for part in keys), window.filled_keys], dim=2),
        torch.cat([*(part.unflatten(0, shape) for part in values), window.filled_values], dim=2),
    )


def merge_heads(vectors: Tensor) -> Tensor:
    """Return the vectors `[B, H, n, D]` of all heads side by side, `[B, 1, n, H * D]`."""
    return vectors.transpose(1, 2).flatten(2)[:, None]


def split_heads(vectors: Tensor, heads: int) -> Tensor:
    """Undo `merge_heads`."""
    split: Tensor = vectors[:, 0].unflatten(-1, (heads, -1))
    return split.transpose(1, 2)


def pairs_in_columns(store: KVStore, latent: bool = False) -> tuple[Tensor, Tensor]:
    """Return keys `[B, H, seen, D]` and values `[B, H, seen, Dv]` with every stored pair in its column, evicted ones marked.

    An evicted pair has a key of NaN and a value of zero; with `latent`, a key of zero and a value of NaN.
    """
    window = store.window
    if not store.sealed:
        return window.filled_keys.contiguous(), window.filled_values.contiguous()
    arrays = []
    for which, like in enumerate((window.keys, window.values)):
        mark = float("nan") if which == int(latent) else 0.0
        arrays.append(like.new_full((store.batch * store.heads * store.seen, like.shape[3]), mark))
    for segment in store.sealed:
        columns = _columns(segment, store.seen)
        for dense, stored in zip(arrays, segment.read(slice(None)), strict=True):
            dense.index_copy_(0, columns, stored.to(dense.dtype))
    keys, values = (dense.unflatten(0, (store.batch, store.heads, store.seen)) for dense in arrays)
    keys[:, :, window.first : window.first + window.length] = window.filled_keys
    values[:, :, window.first : window.first + window.length] = window.filled_values
    return keys, values


def evicted_columns(store: KVStore) -> Tensor:
    """Return which columns hold no pair any more, bool `[B, H, seen]`."""
    window = store.window
    evicted = torch.ones(store.batch * store.heads * store.seen, dtype=torch.bool, device=window.keys.device)
    for segment in store.sealed:
        evicted[_columns(segment, store.seen).to(evicted.device)] = False
    evicted = evicted.view(store.batch, store.heads, store.seen)
    evicted[:, :, window.first : window.first + window.length] = False
    return evicted


def _columns(segment: Segment, seen: int) -> Tensor:
    """Return the index of each pair of a segment in flat `[B * H * seen]` columns."""
    rows = torch.arange(segment.layout.total, device=segment.device)
    return segment.layout.streams_of(rows) * seen + segment.slots().to(segment.device)


def why_unreadable(stores: Sequence[KVStore]) -> str:
    """Return the reason why a model without a press cannot read the layers of a cache; empty if it can.

    Transformers makes one mask for all layers and rows, from the number of pairs in the first layer.
    """
    for store in stores:
        weighted = store.window.log_weight is not None or any(part.log_weight is not None for part in store.sealed)
        if store.segments or weighted:
            return "they are encoded, weighted or chosen from by a selector"
        if len(set(store.stored())) > 1:
            return "heads or rows hold different numbers of them"
        if store.sealed and any(count != store.window.first for count in store.sealed_tokens or []):
            return "rows were padded, and masks would be read in the wrong places"
    if len({store.stored()[0] for store in stores}) > 1:
        return "layers hold different numbers of them"
    return ""
