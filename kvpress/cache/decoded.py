# SPDX-License-Identifier: Apache-2.0
"""All pairs of a layer as dense tensors, and stores that hold such tensors in place of encoded pairs."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.cache.layout import Layout, interleave
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.store import KVStore


@dataclass(frozen=True)
class DecodedPairs:
    """Pairs of all streams of a layer in any float dtype, flat and in ascending order of slot within each stream."""

    keys: Tensor
    """Keys `[total, D]`."""
    values: Tensor
    """Values `[total, Dv]`."""
    log_weight: Tensor | None
    """Log-weights `[total]`, float32; None where no pair has one."""
    slots: Tensor
    """Slots `[total]`."""
    side: dict[str, Tensor]
    """Per-pair arrays `[total]` by name."""
    layout: Layout
    """Pairs of each stream."""


def decode_pairs(store: KVStore, mask: Tensor | None = None) -> DecodedPairs:
    """Return all pairs of a layer, decoded, the window included; `mask [B, seen]` marks real tokens, None for all."""
    parts: list[Segment] = [*store.segments, store.open_segment(mask)]
    rows, layout = interleave([part.layout for part in parts])

    def joined(arrays: list[Tensor]) -> Tensor:
        return torch.cat(arrays).index_select(0, rows.to(store.device))

    keys, values = (joined(list(arrays)) for arrays in zip(*(part.read(slice(None)) for part in parts), strict=True))
    weights = [part.log_weight for part in parts]
    zeros = [torch.zeros(part.layout.total, device=store.device) for part in parts]
    log_weight = None
    if any(weight is not None for weight in weights):
        log_weight = joined(
            [zero if weight is None else weight.float() for weight, zero in zip(weights, zeros, strict=True)]
        )
    names = {name for part in parts for name in part.side}
    side = {name: joined([part.side_array(name) for part in parts]) for name in sorted(names)}
    return DecodedPairs(keys, values, log_weight, joined([part.slots() for part in parts]), side, layout)


def dense_twin(store: KVStore, pairs: DecodedPairs, mask: Tensor | None = None) -> KVStore:
    """Return a copy of a store that holds `pairs` densely, as after an eviction and before its codec; it shares observers."""
    twin = copy.copy(store)
    twin.segments, twin.settled, twin.index, twin.codec_state = [], [], {}, {}
    dense = DenseSegment(pairs.keys, pairs.values, pairs.layout, side=dict(pairs.side))
    dense._set_slots(pairs.slots)
    dense.log_weight = pairs.log_weight
    twin.seal(dense, mask)
    return twin
