"""Cutting a layer down: from the pairs a press chooses to storage that holds only them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.checks import check_finite
from kvpress.context import LayerCall, View, score_arguments, view_groups


class Evictor(Protocol):
    """What eviction asks of a press."""

    def keep(self, group: list[View], kept: int) -> list[Tensor]:
        """Return a mask `[b, h, n]` of pairs to keep for every view of a group."""

    def moved(self, view: View, mask: Tensor) -> Moved | None:
        """Return the keys of a view turned to new positions, or None to leave them."""


@dataclass
class Moved:
    """Keys `[b, h, n, D]` turned away from their original positions by `shift [b, h, n]` in all."""

    keys: Tensor
    shift: Tensor


def top(scores: Tensor, count: int | Tensor) -> Tensor:
    """Mark the `count` largest scores of the last axis; of equal ones the newest. NaN counts as smallest.

    As a tensor, `count` has the shape of `scores` without the last axis.
    """
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    length = scores.shape[-1]
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(length, device=scores.device) < (count if isinstance(count, int) else count[..., None])
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, length - 1 - order, first.expand_as(order))


def evict(call: LayerCall, press: Evictor, kept: Callable[[View], int]) -> None:
    """Cut one layer down to `kept(view)` pairs per head, on average over its heads, chosen by the press."""
    store = call.store
    window = store.window
    check_finite(window.filled_keys, window.filled_values, call.layer)
    masks: list[Tensor] = [torch.empty(0)] * (store.batch * store.heads)
    targets = [0] * store.batch
    moves: list[tuple[View, Tensor, Moved]] = []
    everything = True
    opened = None if not store.sealed and call.columns is None else store.open_segment(call.columns)
    for group in view_groups(call, opened):
        count = kept(group[0])
        for row in group[0].rows:
            targets[row] = count
        if all(view.length <= count for view in group):
            chosen = [torch.ones(view.shape, dtype=torch.bool, device=view.positions.device) for view in group]
        else:
            everything = False
            chosen = press.keep(group, count)
        for view, mask in zip(group, chosen, strict=True):
            moved = None if everything else press.moved(view, mask)
            if moved is not None:
                moves.append((view, mask, moved))
            heads = range(*view.heads.indices(store.heads))
            streams = [row * store.heads + head for row in view.rows for head in heads]
            for stream, marked in zip(streams, mask.flatten(0, 1).unbind(), strict=True):
                masks[stream] = marked
    store.targets = targets
    store.since_eviction = 0
    if not everything:
        store.evict(masks, call.columns, opened)
    for view, mask, moved in moves:
        _move(store.dense, view, mask, moved)


def _move(dense: DenseSegment | None, view: View, mask: Tensor, moved: Moved) -> None:
    if dense is None or view.call.store.segments:
        raise ValueError("re-indexed positions need dense storage: they cannot be combined with a codec")
    shifts = dense.side.setdefault("shift", torch.zeros(dense.layout.total, device=dense.device))
    start = view.heads.indices(view.call.store.heads)[0]
    for i, row in enumerate(view.rows):
        for j in range(mask.shape[1]):
            rows = dense.layout.rows(row * view.call.store.heads + start + j)
            dense.keys[rows] = moved.keys[i, j][mask[i, j]].to(dense.keys.dtype)
            shifts[rows] = moved.shift[i, j][mask[i, j]].float()


def close_gaps(view: View, mask: Tensor) -> Moved | None:
    """Turn keys so that, once only the marked pairs stay, their distances to the next query have no gaps.

    Heads may keep different numbers of pairs. Layers without rotary embedding know no distances and are left as they are.

    Rotary attention depends on distances only, so moving keys up behind the newest token equals numbering the cache
    from 0, while queries keep their true positions.
    """
    call = view.call
    if not call.rotates:
        return None
    before = view.side.get("shift", torch.zeros_like(view.positions)).to(view.positions.dtype)
    rank = mask.long().cumsum(dim=-1).clamp_min(1) - 1
    kept = mask.sum(dim=-1, keepdim=True)
    shift = torch.where(mask, view.seen - kept + rank - view.positions, before)
    keys = view.keys.clone()
    for i in range(mask.shape[0]):
        for j in range(mask.shape[1]):
            cos, sin = call.angles((shift - before)[i, j][None])
            scale = (cos.float() ** 2 + sin.float() ** 2).mean().sqrt().to(cos.dtype)
            keys[i, j] = call.turn(view.keys[i : i + 1, j : j + 1], cos / scale, sin / scale)[0, 0]
    return Moved(keys, shift)


def rewrite(call: LayerCall, compress: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Replace what a layer stores by what a user's `compress` returns; positions are found again by their values."""
    store = call.store
    check_finite(store.window.filled_keys, store.window.filled_values, call.layer)
    if store.segments:
        raise ValueError("a press with its own `compress` cannot change pairs that a codec has already encoded")
    streams = store.batch * store.heads
    keys: list[Tensor] = [torch.empty(0)] * streams
    values, columns = list(keys), list(keys)
    changed = False
    for group in view_groups(call):
        for view in group:
            new_keys, new_values = compress(*score_arguments(view))
            if new_keys.shape[:3] != new_values.shape[:3] or new_keys.shape[:2] != view.keys.shape[:2]:
                raise ValueError(
                    f"compress returned keys {tuple(new_keys.shape)} and values {tuple(new_values.shape)} for keys "
                    f"{tuple(view.keys.shape)}; batch and head counts must stay, lengths must agree"
                )
            changed |= new_keys is not view.keys or new_values is not view.values
            start = view.heads.indices(store.heads)[0]
            for i, row in enumerate(view.rows):
                pads = store.seen - view.seen
                for j in range(new_keys.shape[1]):
                    n = row * store.heads + start + j
                    order, found = _positions(view, new_values, i, j)
                    keys[n], values[n] = new_keys[i, j][order], new_values[i, j][order]
                    columns[n] = torch.where(found >= 0, found + pads, found)
    if not changed:
        return
    layout = Layout(len(stream) for stream in keys)
    sealed = DenseSegment(torch.cat(keys), torch.cat(values), layout)
    sealed._set_positions(torch.cat(columns))
    store.seal(sealed, call.columns)
    store.since_eviction = 0


def _positions(view: View, values: Tensor, row: int, head: int) -> tuple[Tensor, Tensor]:
    """Original position of every returned pair, by equal values; -1 where values were rewritten. Ascending."""
    old, new = view.values[row, head].double(), values[row, head].double()
    probe = torch.linspace(0.5, 1.5, old.shape[-1], dtype=torch.float64, device=old.device)
    ranked, order = (_project(old, probe)).sort(stable=True)
    at = torch.searchsorted(ranked, _project(new, probe)).clamp_max(len(ranked) - 1)
    found = order[at]
    same = (old[found] == new).all(dim=-1)
    positions = torch.where(same, view.positions[row, head][found], -1)
    sorted_positions, index = positions.sort(stable=True)
    return index, sorted_positions


def _project(vectors: Tensor, probe: Tensor) -> Tensor:
    # Row by row: a matrix product may round equal rows differently.
    return (vectors * probe).sum(dim=-1)
