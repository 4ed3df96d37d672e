# SPDX-License-Identifier: Apache-2.0
"""Eviction of pairs: how many pairs each head keeps, which ones, and their new tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.rewrite import put_before
from kvpress.core.checks import check_finite
from kvpress.core.gathered import gather_scored, own_counts
from kvpress.core.protection import warn
from kvpress.core.recipe import Eviction, Rewritten
from kvpress.core.refit import CodecAt, Target, refit, targets
from kvpress.core.scoring import Scored
from kvpress.observe.appended import BEHIND, waiting
from kvpress.observe.call import LayerCall
from kvpress.observe.shards import Shards
from kvpress.observe.view import View, view_groups

Mean = Callable[[View, float, float], tuple[int, int]]
"""Maps a view, the pairs that its heads store and those that may be evicted (means per head) to a target and its total.

The target is the number of pairs per head that stay, the total the number that a ratio of them applies to.
"""

Free = Callable[[View], Tensor]
"""Returns the mask `[b, h, n]` of the pairs of a view that may be evicted."""


def evict(
    calls: Sequence[LayerCall],
    step: Eviction,
    mean: Mean,
    free: Free | None,
    codec: CodecAt,
    rows: Sequence[int] | None = None,
) -> None:
    """Evict pairs from layers, down to the number per head that `mean` returns, on average over the heads that share it.

    Args:
        calls: the layers.
        step: the eviction.
        mean: computes the target of a view.
        free: marks the pairs that may be evicted, None for all. All others stay, even if they are more than the target.
        codec: maps a layer to the codec that seals its pairs afterwards.
        rows: rows to evict from, None for all.
    """
    shards = calls[0].layer.shards
    # Rows that hold equally many pairs on one rank may differ on another, so ranks take rows one by one.
    row_by_row = step.allocator.scope == "cache" or shards.is_divided
    cuts = [Cut(call, step, row_by_row, free, rows) for call in calls]
    for layers in zip(*(cut.views for cut in cuts), strict=True):
        groups = [Group(views, mean, step, free) for views in layers]
        if len({len(group.views) for group in groups}) > 1 or (shards.is_divided and not _all_even(shards, groups)):
            # Layers that share a budget are compared view by view, so view i must cover equally many heads in each layer.
            heads = [[head for view in views for head in view.per_head()] for views in layers]
            groups = [Group(views, mean, step, free) for views in heads]
        for cut, group in zip(cuts, groups, strict=True):
            cut.hold(group)
        _share_out(cuts, groups, step)
    for cut in cuts:
        cut.shortened_anywhere = set().union(*shards.gather_objects(cut.shortened))
    shortened = set().union(*(cut.shortened_anywhere for cut in cuts))
    for cut in cuts:
        cut.apply(codec, shortened)


def _all_even(shards: Shards, groups: Sequence[Group]) -> bool:
    """Whether all heads of a layer, those of other ranks included, store equally many pairs."""
    lengths = [
        sorted({(view.length, older.length) for view, older in zip(group.views, group.older, strict=True)})
        for group in groups
    ]
    return all(len(of_layer) == 1 for of_layer in lengths) and all(
        others == lengths for others in shards.gather_objects(lengths)
    )


def _share_out(cuts: Sequence[Cut], groups: Sequence[Group], step: Eviction) -> None:
    """Choose the pairs that stay in the rows of `groups`, one group for each layer."""
    shards, layers = groups[0].views[0].call.layer.shards, [group.scored(step) for group in groups]
    scored = [item for items in layers for item in items]
    if shards.is_divided and not step.allocator.by_head:
        counts = own_counts(shards, layers, shares(step, groups, gather_scored(shards, layers)))
    else:
        counts = list(shares(step, groups, scored))
    chosen = iter(zip(scored, counts, strict=True))
    for cut, group in zip(cuts, groups, strict=True):
        for view in group.views:
            cut.mark(view, *next(chosen))
        group.forget()


def shares(step: Eviction, groups: Sequence[Group], scored: Sequence[Scored]) -> Sequence[int | Tensor | None]:
    """Return the number of evictable pairs that stay in each view; None for all."""
    means = [group.views[0].target for group in groups for _ in group.views]
    mean = round(sum(means) / len(means))
    lengths = (
        groups[0].views[0].call.layer.shards.gather_objects([view.length for group in groups for view in group.views])
    )
    if step.allocator.keeps_all(list(itertools.chain(*lengths)), mean):
        return [None] * len(scored)
    settled = sum(group.settled for group in groups) / len(groups)
    remaining = mean - round(settled)
    if any(group.limited for group in groups) and not step.allocator.decides and remaining <= 0:
        if step.among is None and remaining < 0:
            warn(groups[0].views[0].call, round(settled), mean)
        return [0] * len(scored)
    return step.allocator.counts(scored, remaining)


class Group:
    """Views of the same rows that together cover all KV heads of a layer.

    `older` are the views of the evictable pairs. `settled` pairs per head stay in any case: the newest, those that are not free
    if the group is `limited`, and those that were read behind the prompt.
    """

    def __init__(self, views: list[View], mean: Mean, step: Eviction, free: Free | None = None) -> None:
        hidden = step.hidden_states if step.reads_hidden_states else None
        self.limited = free is not None
        marked = [] if free is None else [free(view) for view in views]
        if not all(bool((mask.sum(dim=2) == mask[0, 0].sum()).all()) for mask in marked):
            marked = [head for mask in marked for head in mask.split(1, dim=1)]
            views = [head for view in views for head in view.per_head()]
        rows, heads = len(views[0].rows), sum(view.shape[1] for view in views)
        stored = sum(view.shape[1] * view.length for view in views) / heads
        evictable = sum(int(mask.sum()) for mask in marked) / (heads * rows) if self.limited else stored
        shards = views[0].call.layer.shards
        if self.limited:
            stored, evictable = _means(shards, stored, evictable)
        target, available = mean(views[0], stored, evictable)
        newest = round(target * step.recent)
        self.views = [replace(view, target=target, available=available, hidden=hidden) for view in views]
        self.settled: float = newest
        if not self.limited:
            self.older = [view.oldest(view.length - newest) if newest else view for view in self.views]
        else:
            for mask in marked:
                mask[..., max(0, mask.shape[2] - newest) :] = False
            counts = [int(mask[0, 0].sum()) for mask in marked]
            self.settled = (
                sum((view.length - n) * view.shape[1] for view, n in zip(self.views, counts, strict=True)) / heads
            )
            (self.settled,) = _means(shards, self.settled)
            ranks = [mask.nonzero()[:, 2].view(*mask.shape[:2], n) for mask, n in zip(marked, counts, strict=True)]
            self.older = [view.pairs(index) for view, index in zip(self.views, ranks, strict=True)]
        self.settled += waiting(views[0].call) if step.beside else 0
        self._introduce(self.older)
        if self.limited:
            self._introduce(self.views)

    @staticmethod
    def _introduce(views: list[View]) -> None:
        memo: dict[Any, Any] = {}
        for view in views:
            view.group, view.memo = views, memo

    def scored(self, step: Eviction) -> list[Scored]:
        """Return the evictable pairs of each view with their scores, which are computed over all pairs."""
        pairs = zip(self.older, self.views, strict=True)
        return [Scored(older, step.scorer, among=view if self.limited else None) for older, view in pairs]

    def forget(self) -> None:
        """Clear the references of views to each other, so that memory is freed without the garbage collector."""
        for view in (*self.older, *self.views):
            view.group = []


def _means(shards: Shards, *numbers: float) -> list[float]:
    """Return the means over ranks of numbers per head; ranks hold equally many heads."""
    return [sum(of_ranks) / shards.count for of_ranks in zip(*shards.gather_objects(numbers), strict=True)]


def shortened_rows(older: Scored, counts: int | Tensor | None) -> list[int]:
    """Return the rows of a view that lose pairs if `counts` of the evictable ones stay; None stands for all of them."""
    if counts is None or isinstance(counts, int):
        return [] if counts is None or counts >= older.view.length else older.view.rows
    loses = (counts < older.view.length).any(dim=1).tolist()
    return [row for row, row_loses in zip(older.view.rows, loses, strict=True) if row_loses]


def chosen(view: View, older: Scored, counts: int | Tensor | None) -> Tensor:
    """Return the mask `[b, h, n]` of the pairs of a view that stay: `counts` of the evictable ones, and all others."""
    mask = torch.ones(view.shape, dtype=torch.bool, device=view.positions.device)
    if counts is None or not shortened_rows(older, counts):
        return mask
    if older.among is not None and isinstance(counts, int) and counts <= 0:
        return older.put(torch.zeros_like(older.view.positions, dtype=torch.bool), mask)
    return older.put(older.choose(counts), mask)


class Cut:
    """State of one layer while an eviction runs: a mask of kept pairs for each stream."""

    def __init__(
        self, call: LayerCall, step: Eviction, row_by_row: bool, free: Free | None, rows: Sequence[int] | None
    ) -> None:
        self.call, self.store, self.step = call, call.store, step
        window = self.store.window
        check_finite(window.filled_keys, window.filled_values, call.layer.index)
        is_dense = not self.store.sealed and call.tokens.mask is None
        self.opened = None if is_dense else self.store.open_segment(call.tokens.mask)
        row_by_row = row_by_row or (free is not None and self.store.batch > 1)  # spans may differ between rows
        self.views = view_groups(call, self.opened, row_by_row, rows)
        self.groups: list[Group] = []
        self.masks: list[Tensor] = [torch.empty(0)] * (self.store.batch * self.store.heads)
        if rows is not None and len(rows) < self.store.batch:
            self._keep_all_but(rows)
        self.rewritten: list[tuple[View, Tensor, Rewritten]] = []
        self.refitted: dict[int, Target] = {}
        self.shortened: set[int] = set()
        """Rows that lose pairs in heads of this rank."""
        self.shortened_anywhere: set[int] = set()
        """Rows that lose pairs in heads of any rank."""

    def _keep_all_but(self, rows: Sequence[int]) -> None:
        """Mark all pairs of the rows that are not evicted from."""
        for row in set(range(self.store.batch)) - set(rows):
            for view in (view for group in view_groups(self.call, self.opened, rows=[row]) for view in group):
                for stream in view.streams:
                    self.masks[stream] = torch.ones(view.length, dtype=torch.bool, device=view.positions.device)

    def hold(self, group: Group) -> None:
        """Store a group of views."""
        self.groups.append(group)

    def mark(self, view: View, older: Scored, counts: int | Tensor | None) -> None:
        """Store the mask of the pairs of a view that stay, `counts` of the evictable ones, and their new tensors.

        None for `counts` keeps all.
        """
        mask = chosen(view, older, counts)
        if shortened := shortened_rows(older, counts):
            self.shortened |= set(shortened)
            rewritten = self.step.rewritten(view, mask, older)
            if rewritten is not None:
                self.rewritten.append((view, mask, rewritten))
            if self.step.refit is not None:
                self.refitted.update(zip(view.streams, targets(view, self.step.refit.queries), strict=True))
        for stream, marked in zip(view.streams, mask.flatten(0, 1).unbind(), strict=True):
            self.masks[stream] = marked

    def apply(self, codec: CodecAt, shortened: set[int]) -> None:
        """Free the unmarked pairs and change the kept ones; `shortened` are the rows that lose pairs in any layer.

        Shortened rows also get the pairs that were read behind the prompt.
        """
        self._count()
        if self.step.among is None:
            self._restart()
        if self.shortened_anywhere:
            self.store.evict(self.masks, self.call.tokens.mask, self.opened)
        if self.rewritten:
            self._rewrite()
        if self.step.beside:
            self._put_beside(shortened)
        if self.step.refit is not None and self.refitted:
            refit(self.call, self.step.refit, self.refitted, codec)

    def _restart(self) -> None:
        """Store the targets of rows, and count their generated tokens from here on; not if an allocator kept all of a row."""
        for group in self.groups:
            view = group.views[0]
            rows = [row for row in view.rows if row in self.shortened_anywhere or not self.step.allocator.decides]
            before = enumerate(self.store.targets)
            self.store.targets = [view.target if row in rows else target for row, target in before]
            self.store.restart_count(rows)

    def _count(self) -> None:
        """Record how many pairs the next ratio applies to: the target, or the number kept if the allocator decides."""
        for group in self.groups:
            view = group.views[0]
            if self.step.allocator.decides:
                counts = {row: self._kept(row) for row in view.rows if row in self.shortened_anywhere}
            elif self.step.among is None:
                counts = dict.fromkeys(view.rows, view.target)
            else:
                counts = {row: self.call.left.get(row, view.seen) - self._evicted(row) for row in view.rows}
            self.call.left.update(counts)

    def _masks(self, row: int) -> list[Tensor]:
        return self.masks[row * self.store.heads : (row + 1) * self.store.heads]

    def _kept(self, row: int) -> int:
        """Return the number of marked pairs of a row, averaged over the heads of all ranks."""
        return self._mean(sum(int(mask.sum()) for mask in self._masks(row)))

    def _evicted(self, row: int) -> int:
        """Return the number of unmarked pairs of a row, averaged over its heads."""
        return self._mean(sum(int((~mask).sum()) for mask in self._masks(row)))

    def _mean(self, pairs: int) -> int:
        """Return the number of pairs per head, from the number of pairs of all heads of this rank."""
        shards = self.call.layer.shards
        total: int = sum(shards.gather_objects(pairs))
        return total // (shards.count * self.store.heads)

    def _put_beside(self, rows: set[int]) -> None:
        """Insert the pairs that were read behind the prompt into the heads of some rows."""
        observer = self.store.observers.get(BEHIND)
        pairs = None if observer is None else observer.take()
        if pairs is not None and rows:
            put_before(self.store, {row: (pairs[0][row], pairs[1][row]) for row in rows}, self.call.tokens.mask)

    def _rewrite(self) -> None:
        """Write the new keys, values, log-weights and shifts of kept pairs.

        Raises:
            ValueError: the pairs are encoded.
        """
        self._weigh()
        moved = [
            (view, mask, new)
            for view, mask, new in self.rewritten
            if new.keys is not None or new.values is not None or new.shift is not None
        ]
        dense = self.store.dense
        if not moved or not self.store.sealed:  # the layer may have lost all its pairs to others
            return
        if dense is None or self.store.segments:
            raise ValueError("a press that rewrites kept pairs needs dense storage: use it without a codec")
        keys = dense.keys.clone() if any(new.keys is not None for _, _, new in moved) else None
        values = dense.values.clone() if any(new.values is not None for _, _, new in moved) else None
        shift: Tensor | None = None
        for view, mask, new in moved:
            for index, n in enumerate(view.streams):
                at = divmod(index, mask.shape[1])
                rows, marked = dense.layout.rows(n), mask[at]
                for target, source in ((keys, new.keys), (values, new.values)):
                    if target is not None and source is not None:
                        target[rows] = source[at][marked].to(target.dtype)
                if new.shift is not None:
                    shift = dense.side_array("shift").clone() if shift is None else shift
                    shift[rows] = new.shift[at][marked].float()
        self.store.replace_dense(keys, values, {} if shift is None else {"shift": shift})

    def _weigh(self) -> None:
        """Store the new log-weights of kept pairs, in dense and encoded storage."""
        log_weights = {
            n: weights[marked]
            for view, mask, new in self.rewritten
            if new.log_weight is not None
            for n, weights, marked in zip(view.streams, new.log_weight.flatten(0, 1), mask.flatten(0, 1), strict=True)
        }
        if log_weights:
            self.store.weigh(log_weights)
