# SPDX-License-Identifier: Apache-2.0
"""Rows of several caches as one batch: requests join a running batch after their prompts, and leave it when they are done.

A joined store is that of a left-padded batch. The slots of each row move so that all rows end at the same slot, and no pair is
copied: each sealed segment is placed among the streams of the batch by a `CommonSegment`. Rows whose caches begin with the same
segments, as branches of one document do, read these once together. `KVStore.select_rows` takes rows out again.

Encoding and eviction of a row depend on that row alone (`KVStore.settle`, `since_eviction`), so each row goes on as it would
have gone on by itself.

Paper: Yu et al., Orca, OSDI 2022: requests join and leave a batch between two iterations.
Differs from the paper: rows store different numbers of pairs per head, in any storage format.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from kvpress.cache.common import CommonSegment
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.cache.window import left_padding


def padding_of(store: KVStore, mask: torch.Tensor | None) -> list[int]:
    """Return the left padding of each row of a store; `mask [B, seen]` marks real tokens, None for all.

    Raises:
        ValueError: the mask has another shape, or padding after a real token.
    """
    if mask is None:
        return [0] * store.batch
    if tuple(mask.shape) != (store.batch, store.seen):
        raise ValueError(
            f"the mask must mark all tokens of the cache, {(store.batch, store.seen)}, got {tuple(mask.shape)}"
        )
    pads = left_padding(mask.bool())
    if pads is None:
        raise ValueError("caches with padding after a real token cannot be joined; read their rows separately")
    return pads.tolist()


def join_rows(stores: Sequence[KVStore], pads: Sequence[Sequence[int]]) -> KVStore:
    """Return a store with the rows of all `stores` in order; these do not change, and share their sealed pairs with it.

    `pads[i]` is the left padding of each row of store i. In the result, row r has as much left padding as it has fewer real
    tokens than the longest row. Its tokens cannot be taken back.

    Raises:
        ValueError: the stores differ in heads, head dim, dtype or device, or only some have encoded pairs before.
        NotImplementedError: an observer or the state of a codec cannot be joined; the message names it.
    """
    first = stores[0]
    _check_alike(stores)
    seen = max(store.seen - pad for store, row_pads in zip(stores, pads, strict=True) for pad in row_pads)
    batch = sum(store.batch for store in stores)
    joined = KVStore(*(_rows_of(array, batch) for array in (first.window.keys, first.window.values)))
    joined.window.first = joined.seen = joined.counted = joined.fixed_at = seen
    joined.fetched = sum(store.fetched for store in stores)
    joined.since_eviction = [count for store in stores for count in store.since_eviction]
    joined.targets = [target for store in stores for target in store.targets]
    joined.sealed_tokens = [store.seen - pad for store, row_pads in zip(stores, pads, strict=True) for pad in row_pads]
    if first.settled_at is not None:
        joined.settled_at = seen
        joined.settle_lags = tuple(tokens for store in stores for tokens in store.tokens_since_settled())
    joined.observers = _joined_observers(stores, seen)
    joined.codec_state = _joined_codec_state(stores)

    arrangement = _Arrangement(stores, seen)
    joined.segments = arrangement.join([store.segments for store in stores])
    windows = [_window_segment(store, row_pads) for store, row_pads in zip(stores, pads, strict=True)]
    joined.hold_dense(
        arrangement.join([[*store.dense_parts(), *window] for store, window in zip(stores, windows, strict=True)])
    )
    sides = {name for observer in joined.observers.values() for name in observer.sides}
    if sides:
        joined.window.side = {name: torch.zeros(batch, first.heads, 0, device=first.device) for name in sides}
    return joined


class _Arrangement:
    """Places segments of several stores among the streams of one batch."""

    def __init__(self, stores: Sequence[KVStore], seen: int) -> None:
        self.streams = sum(store.batch * store.heads for store in stores)
        self.moves = [seen - store.seen for store in stores]
        counts = [store.batch * store.heads for store in stores]
        self.begins = [sum(counts[:i]) for i in range(len(counts))]

    def join(self, lists: Sequence[Sequence[Segment]]) -> list[Segment]:
        """Return the segments of all lists; segments that the lists have in common at their beginning are joined."""
        groups: list[list[tuple[int, Segment]]] = []
        for index, segments in enumerate(lists):
            place = 0
            for segment in segments:
                same = next((g for g in range(place, len(groups)) if _share_pairs(groups[g][0][1], segment)), None)
                if same is None:
                    place = len(groups)
                    groups.append([])
                else:
                    place = same
                groups[place].append((index, segment))
                place += 1
        return [joined for group in groups if (joined := self._placed(group)).layout.total]

    def _placed(self, group: Sequence[tuple[int, Segment]]) -> Segment:
        """Return one segment with the pairs of all stores of a group."""
        if group[0][1].side:  # of one store
            group = [(index, segment.own()) for index, segment in group]
        base, _ = CommonSegment.parts_of(group[0][1])
        origin, first = [-1] * self.streams, [0] * self.streams
        for index, segment in group:
            begin = self.begins[index]
            _, streams = CommonSegment.parts_of(segment)
            origin[begin : begin + len(streams)] = streams
            first[begin : begin + len(streams)] = [slot + self.moves[index] for slot in segment.first]
        placed = CommonSegment.arranged(base, origin, first)
        return copy.deepcopy(placed) if placed is base else placed  # shares tensors, but no per-pair arrays


def _share_pairs(one: Segment, other: Segment) -> bool:
    """Return whether two segments store their pairs in the same tensors, with the same weights."""
    if one.side or other.side:
        return False
    (base, _), (other_base, _) = CommonSegment.parts_of(one), CommonSegment.parts_of(other)
    return base is other_base or (
        type(base) is type(other_base)
        and base.layout.lengths == other_base.layout.lengths
        and base.first == other_base.first
        and _tensor_ids(base) == _tensor_ids(other_base)
    )


def _tensor_ids(segment: Segment) -> list[int]:
    names = [*segment.stored_names(), "key_offset", "_log_weight"]
    return [id(tensor) for tensors in segment.tensors(names).values() for tensor in tensors]


def _window_segment(store: KVStore, pads: Sequence[int]) -> list[Segment]:
    """Return the window of a store as a dense segment, in a list that is empty if the window is."""
    if not store.window.length:
        return []
    if not any(pads):
        return [store.window.segment(None)]
    real = torch.arange(store.seen) >= torch.tensor(pads)[:, None]
    return [store.window.segment(real)]


def _rows_of(array: torch.Tensor, batch: int) -> torch.Tensor:
    """Return an empty tensor `[batch, H, 0, D]` like `array [B, H, n, D]`."""
    return array.new_empty(batch, array.shape[1], 0, array.shape[3])


def _check_alike(stores: Sequence[KVStore]) -> None:
    shapes = {
        (store.heads, store.window.keys.shape[3], store.window.values.shape[3], store.dtype, store.device)
        for store in stores
    }
    if len(shapes) > 1:
        raise ValueError(
            "only caches of one model can be joined, but these differ in (KV heads, key dim, value dim, dtype, device): "
            f"{sorted(map(str, shapes))}"
        )
    if len({store.settled_at is None for store in stores}) > 1:
        raise ValueError(
            "only caches of one press can be joined, but a codec has encoded pairs of some and not of others"
        )


def _joined_observers(stores: Sequence[KVStore], seen: int) -> dict[Any, Any]:
    """Join the observers of all stores."""
    if len({frozenset(store.observers) for store in stores}) > 1:
        raise ValueError("only caches of one press can be joined, but these have different observers")
    names = stores[0].observers
    return {name: names[name].joined([store.observers[name] for store in stores], seen) for name in names}


def _joined_codec_state(stores: Sequence[KVStore]) -> dict[str, Any]:
    """Join the states of the codecs of all stores, which a store without encoded pairs may lack.

    A state without `select_rows` does not depend on the rows, so that of one store serves all.
    """
    joined = {}
    for name in {name: None for store in stores for name in store.codec_state}:
        states = [store.codec_state.get(name) for store in stores]
        state = next(state for state in states if state is not None)
        if not hasattr(state, "select_rows"):
            joined[name] = state
        elif not hasattr(state, "joined"):
            raise NotImplementedError(f"the state of {type(state).__name__} cannot be joined: run its rows separately")
        else:
            joined[name] = state.joined(states, [store.batch for store in stores])
    return joined
