# SPDX-License-Identifier: Apache-2.0
"""Pairs that someone puts in the place of all that a layer stores, or beside it.

Positions of those in the place of others are found again by equal values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.cache.store import KVStore

Pairs = tuple[Tensor, Tensor]
"""Keys `[n, D]` and values `[n, Dv]`."""


def positions_of(new: Pairs, old: Pairs, positions: Tensor) -> Tensor:
    """Position of every one of some `new` pairs among `old` ones at `positions [n]`; -1 where neither pair nor value is there.

    Tokens that are the same may have equal values, so pairs are looked up first.
    """
    found = _looked_up(torch.cat(new, dim=-1), torch.cat(old, dim=-1), positions)
    return torch.where(found < 0, _looked_up(new[1], old[1], positions), found)


def _looked_up(new: Tensor, old: Tensor, positions: Tensor) -> Tensor:
    new, old = new.double(), old.double()
    probe = torch.linspace(0.5, 1.5, old.shape[-1], dtype=torch.float64, device=old.device)
    ranked, order = _project(old, probe).sort(stable=True)
    at = torch.searchsorted(ranked, _project(new, probe)).clamp_max(len(ranked) - 1)
    found = order[at]
    return torch.where((old[found] == new).all(dim=-1), positions[found], -1)


def _project(vectors: Tensor, probe: Tensor) -> Tensor:
    # Row by row: a matrix product may round equal rows differently.
    return (vectors * probe).sum(dim=-1)


def seal_streams(
    store: KVStore, keys: Sequence[Tensor], values: Sequence[Tensor], slots: Sequence[Tensor], mask: Tensor | None
) -> None:
    """Store `keys[n] [m, D]` and `values[n]` of every stream at `slots[n] [m]`, in the order of the slots, and nothing else."""
    order = [found.argsort(stable=True) for found in slots]
    keys, values, slots = (
        [part[own] for part, own in zip(parts, order, strict=True)] for parts in (keys, values, slots)
    )
    sealed = DenseSegment(torch.cat(keys), torch.cat(values), Layout(len(stream) for stream in keys))
    sealed._set_slots(torch.cat(slots))
    store.seal(sealed, mask)
    store.since_eviction = 0


def replace_all(store: KVStore, new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> None:
    """Put new keys `[B, H, m, D]` and values in the place of all the old ones of a store without padding."""
    opened = store.open_segment(None)
    places = opened.slots().long().split(opened.layout.lengths)
    keys, values = (part.flatten(0, 1).unbind() for part in new)
    before = zip(*(part.flatten(0, 1).unbind() for part in old), strict=True)
    after = zip(keys, values, strict=True)
    found = [positions_of(*pairs) for pairs in zip(after, before, places, strict=True)]
    seal_streams(store, keys, values, found, None)


def put_before(store: KVStore, pairs: dict[int, Pairs], mask: Tensor | None) -> None:
    """Put pairs of no token, keys `[H, n, D]` and values by row, before the dense ones of these rows, and seal all of them.

    Their slot is -1. Copies of the cache do not get them. Call it right after `KVStore.evict`: `crop` cannot take them back.
    """
    counts = [pairs[row][0].shape[1] if row in pairs else 0 for row in range(store.batch)]
    keys, values = (torch.cat([pairs[row][side].flatten(0, 1) for row in sorted(pairs)]) for side in (0, 1))
    layout = Layout(count for count in counts for _ in range(store.heads))
    fresh = DenseSegment(keys.to(store.window.keys), values.to(store.window.values), layout)
    fresh._set_slots(torch.full((layout.total,), -1, device=keys.device))
    store.seal(DenseSegment.join([fresh, store.open_segment(mask)]), mask)
    store.fixed_at = store.seen
    store.window.cursor = None  # a recorded step must not read what was there
