# SPDX-License-Identifier: Apache-2.0
"""Replacement of all pairs of a layer, and insertion of further pairs.

Positions of new pairs are recovered by comparing them with the old ones.
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
    """Return the position of each of the `new` pairs among `old` ones at `positions [n]`; -1 if neither pair nor value occurs.

    Equal tokens may have equal values, so whole pairs are compared first.
    """
    of_pairs = _looked_up(torch.cat(new, dim=-1), torch.cat(old, dim=-1), positions)
    return torch.where(of_pairs < 0, _looked_up(new[1], old[1], positions), of_pairs)


def _looked_up(new: Tensor, old: Tensor, positions: Tensor) -> Tensor:
    new, old = new.double(), old.double()
    probe = torch.linspace(0.5, 1.5, old.shape[-1], dtype=torch.float64, device=old.device)
    ranked, order = _project(old, probe).sort(stable=True)
    ranks = torch.searchsorted(ranked, _project(new, probe)).clamp_max(len(ranked) - 1)
    candidates = order[ranks]
    return torch.where((old[candidates] == new).all(dim=-1), positions[candidates], -1)


def _project(vectors: Tensor, probe: Tensor) -> Tensor:
    # Not a matrix product, which may round equal rows differently.
    return (vectors * probe).sum(dim=-1)


def seal_streams(
    store: KVStore, keys: Sequence[Tensor], values: Sequence[Tensor], slots: Sequence[Tensor], mask: Tensor | None
) -> None:
    """Replace all pairs by `keys[n] [m, D]` and `values[n]` of every stream at `slots[n] [m]`, sorted by slot."""
    order = [stream_slots.argsort(stable=True) for stream_slots in slots]
    keys, values, slots = (
        [array[stream_order] for array, stream_order in zip(parts, order, strict=True)]
        for parts in (keys, values, slots)
    )
    sealed = DenseSegment(torch.cat(keys), torch.cat(values), Layout(len(stream) for stream in keys))
    sealed._set_slots(torch.cat(slots))
    store.seal(sealed, mask)


def replace_all(store: KVStore, new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> None:
    """Replace all old pairs of a store without padding by new keys `[B, H, m, D]` and values."""
    opened = store.open_segment(None)
    old_slots = opened.slots().long().split(opened.layout.lengths)
    keys, values = (part.flatten(0, 1).unbind() for part in new)
    before = zip(*(part.flatten(0, 1).unbind() for part in old), strict=True)
    after = zip(keys, values, strict=True)
    new_slots = [positions_of(*pairs) for pairs in zip(after, before, old_slots, strict=True)]
    seal_streams(store, keys, values, new_slots, None)
    store.restart_count(range(store.batch))


def put_before(store: KVStore, pairs: dict[int, Pairs], mask: Tensor | None) -> None:
    """Insert pairs without a token, keys `[H, n, D]` and values by row, before the dense pairs of these rows, and seal all.

    Their slot is -1. Copies of the cache do not change. Call it right after `KVStore.evict`, since `crop` cannot remove them.
    """
    counts = [pairs[row][0].shape[1] if row in pairs else 0 for row in range(store.batch)]
    keys, values = (torch.cat([pairs[row][side].flatten(0, 1) for row in sorted(pairs)]) for side in (0, 1))
    layout = Layout(count for count in counts for _ in range(store.heads))
    inserted = DenseSegment(keys.to(store.window.keys), values.to(store.window.values), layout)
    inserted._set_slots(torch.full((layout.total,), -1, device=keys.device))
    store.seal(DenseSegment.join([inserted, store.open_segment(mask)]), mask)
    store.fixed_at = store.seen
    store.window.cursor = None  # a recorded step must not read the old tensors
