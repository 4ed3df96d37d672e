# SPDX-License-Identifier: Apache-2.0
"""What an eviction keeps of layers: how many pairs of each head, which ones, and what takes their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.codec import WIDTH
from kvpress.cache.rewrite import put_before
from kvpress.core.checks import check_finite
from kvpress.core.protection import warn
from kvpress.core.recipe import Eviction, Rewritten
from kvpress.core.refit import CodecAt, Target, refit, targets
from kvpress.core.scoring import Scored
from kvpress.observe.appended import BEHIND, waiting
from kvpress.observe.call import LayerCall
from kvpress.observe.view import View, view_groups

Mean = Callable[[View, float, float], tuple[int, int]]
"""Maps a view, how many pairs its heads hold and how many of these may be taken, to how many stay and of how many that is."""

Free = Callable[[View], Tensor]
"""Marks the pairs `[b, h, n]` of a view that may be taken."""


def evict(calls: Sequence[LayerCall], step: Eviction, mean: Mean, free: Free | None, codec: CodecAt) -> None:
    """Cut layers down: `mean` says to how many pairs per head, on average over heads that share it, and of how many.

    Only `free` pairs are taken, None for all; the others count among those that stay, also where these are fewer. `codec` is
    what seals the pairs of a layer afterwards.
    """
    apart = step.allocator.scope == "cache"
    cuts = [Cut(call, step, apart, free) for call in calls]
    for found in zip(*(cut.views for cut in cuts), strict=True):
        groups = [Group(views, mean, step, free) for views in found]
        if len({len(group.views) for group in groups}) > 1:
            # Layers that share pairs are compared view by view, so a view must stand for as many heads in all of them.
            heads = [[head for view in views for head in view.per_head()] for views in found]
            groups = [Group(views, mean, step, free) for views in heads]
        for cut, group in zip(cuts, groups, strict=True):
            cut.hold(group)
        _share_out(cuts, groups, step)
    shortened = {row for cut in cuts for row in cut.shortened}
    for cut in cuts:
        cut.apply(codec, shortened)


def _share_out(cuts: Sequence[Cut], groups: Sequence[Group], step: Eviction) -> None:
    """Choose what stays of some rows, given their views in every layer."""
    scored = [each for group in groups for each in group.scored(step)]
    chosen = iter(zip(scored, shares(step, groups, scored), strict=True))
    for cut, group in zip(cuts, groups, strict=True):
        for view in group.views:
            cut.mark(view, *next(chosen))
        group.forget()


def shares(step: Eviction, groups: Sequence[Group], scored: Sequence[Scored]) -> Sequence[int | Tensor | None]:
    """Return how many of the pairs that there is a choice of stay in each view, None for all of them."""
    means = [group.views[0].target for group in groups for _ in group.views]
    mean = round(sum(means) / len(means))
    if step.allocator.keeps_all([view.length for group in groups for view in group.views], mean):
        return [None] * len(scored)
    settled = sum(group.settled for group in groups) / len(groups)
    rest = mean - round(settled)
    if any(group.limited for group in groups) and not step.allocator.decides and rest <= 0:
        if step.among is None and rest < 0:
            warn(groups[0].views[0].call, round(settled), mean)
        return [0] * len(scored)
    return step.allocator.counts(scored, rest)


class Group:
    """Views of the same rows that together cover all kv heads of a layer, and `older` ones of what there is a choice of.

    `settled` pairs per head stay in any case: the newest ones, those that are not free where it is `limited`, and those that
    wait to be put beside them.
    """

    def __init__(self, views: list[View], mean: Mean, step: Eviction, free: Free | None = None) -> None:
        hidden = step.hidden_states if step.reads_hidden_states else None
        self.limited = free is not None
        marked = [] if free is None else [free(view) for view in views]
        if not all(bool((each.sum(dim=2) == each[0, 0].sum()).all()) for each in marked):
            marked = [part for each in marked for part in each.split(1, dim=1)]
            views = [part for view in views for part in view.per_head()]
        rows, heads = len(views[0].rows), sum(view.shape[1] for view in views)
        held = sum(view.shape[1] * view.length for view in views) / heads
        loose = sum(int(each.sum()) for each in marked) / (heads * rows) if self.limited else held
        target, available = mean(views[0], held, loose)
        newest = round(target * step.recent)
        self.views = [replace(view, target=target, available=available, hidden=hidden) for view in views]
        self.settled: float = newest
        if not self.limited:
            self.older = [view.oldest(view.length - newest) if newest else view for view in self.views]
        else:
            for each in marked:
                each[..., max(0, each.shape[2] - newest) :] = False
            left = [int(each[0, 0].sum()) for each in marked]
            self.settled = (
                sum((view.length - n) * view.shape[1] for view, n in zip(self.views, left, strict=True)) / heads
            )
            places = [each.nonzero()[:, 2].view(*each.shape[:2], n) for each, n in zip(marked, left, strict=True)]
            self.older = [view.pairs(index) for view, index in zip(self.views, places, strict=True)]
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
        """Return what there is a choice of, with what it is worth among all pairs."""
        pairs = zip(self.older, self.views, strict=True)
        return [Scored(older, step.scorer, among=view if self.limited else None) for older, view in pairs]

    def forget(self) -> None:
        """Let go of each other, so that nothing waits for the garbage collector."""
        for view in (*self.older, *self.views):
            view.group = []


def keeps_every(older: Scored, counts: int | Tensor | None) -> bool:
    """Whether every pair of a view stays, where so many of its older ones do; None for all."""
    if counts is None or isinstance(counts, int):
        return counts is None or counts >= older.view.length
    return bool((counts >= older.view.length).all())


def chosen(step: Eviction, view: View, older: Scored, counts: int | Tensor | None) -> Tensor:
    """Mark the pairs `[b, h, n]` of a view that stay: `counts` of those that there is a choice of, and all others."""
    mask = torch.ones(view.shape, dtype=torch.bool, device=view.positions.device)
    if counts is None or keeps_every(older, counts):
        return mask
    if older.among is not None and isinstance(counts, int) and counts <= 0:
        return older.put(torch.zeros_like(older.view.positions, dtype=torch.bool), mask)
    return older.put(older.choose(counts), mask)


class Cut:
    """What one layer keeps in an eviction under way: a mask for each of its streams."""

    def __init__(self, call: LayerCall, step: Eviction, apart: bool, free: Free | None) -> None:
        self.call, self.store, self.step = call, call.store, step
        window = self.store.window
        check_finite(window.filled_keys, window.filled_values, call.layer.index)
        whole = not self.store.sealed and call.tokens.mask is None
        self.opened = None if whole else self.store.open_segment(call.tokens.mask)
        apart = apart or (free is not None and self.store.batch > 1)  # rows may have other spans
        self.views = view_groups(call, self.opened, apart)
        self.groups: list[Group] = []
        self.masks: list[Tensor] = [torch.empty(0)] * (self.store.batch * self.store.heads)
        self.rewritten: list[tuple[View, Tensor, Rewritten]] = []
        self.widths: dict[int, Tensor] = {}
        self.refitted: dict[int, Target] = {}
        self.everything = True
        self.shortened: set[int] = set()
        self.targets = [0] * self.store.batch

    def hold(self, group: Group) -> None:
        """Note a group whose pairs are to be cut, and to how many."""
        self.groups.append(group)
        for row in group.views[0].rows:
            self.targets[row] = group.views[0].target

    def mark(self, view: View, older: Scored, counts: int | Tensor | None) -> None:
        """Choose the pairs of a view that stay, `counts` of the older ones, and what takes their place; None keeps all."""
        mask = chosen(self.step, view, older, counts)
        if not keeps_every(older, counts):
            self.everything = False
            self.shortened |= set(view.rows)
            rewritten = self.step.rewritten(view, mask, older)
            if rewritten is not None:
                self.rewritten.append((view, mask, rewritten))
            if self.step.refit is not None:
                self.refitted.update(zip(view.streams, targets(view, self.step.refit.queries), strict=True))
        for stream, marked in zip(view.streams, mask.flatten(0, 1).unbind(), strict=True):
            self.masks[stream] = marked
        if older.width is not None:
            widths = older.put(older.width, older.width.new_zeros(view.shape)).flatten(0, 1)
            self.widths |= {n: own[self.masks[n]] for n, own in zip(view.streams, widths, strict=True)}

    def apply(self, codec: CodecAt, shortened: set[int]) -> None:
        """Free what was not marked, change what stays, and put what waits beside it in rows that some layer has `shortened`."""
        self._count()
        decided_nothing = self.everything and self.step.allocator.decides
        if self.step.among is None and not decided_nothing:
            self.store.targets = self.targets
            self.store.since_eviction, self.store.counted = 0, self.store.seen
        if not self.everything or self.widths:
            self.store.evict(self.masks, self.call.tokens.mask, self.opened)
        if self.rewritten:
            self._rewrite()
        if self.widths:
            self._hand_on_widths()
        if self.step.beside:
            self._put_beside(shortened)
        if self.step.refit is not None and self.refitted:
            refit(self.call, self.step.refit, self.refitted, codec)

    def _count(self) -> None:
        """Say what the ratio of a next eviction is of: what this one was told to keep, or what it decided to."""
        for group in self.groups:
            left, streams = group.views[0].target, [n for view in group.views for n in view.streams]
            if self.step.among is not None:
                row = group.views[0].rows[0]
                taken = sum(int((~self.masks[n]).sum()) for n in streams) // len(streams)
                left = self.call.left.get(row, group.views[0].seen) - taken
            if self.step.allocator.decides:
                if all(bool(self.masks[n].all()) for n in streams):
                    continue
                left = sum(int(self.masks[n].sum()) for n in streams) // len(streams)
            self.call.left.update(dict.fromkeys(group.views[0].rows, left))

    def _put_beside(self, rows: set[int]) -> None:
        """Give the heads of some rows the pairs that were read behind the prompt."""
        waits = self.store.observers.get(BEHIND)
        pairs = None if waits is None else waits.take()
        if pairs is not None and rows:
            put_before(self.store, {row: (pairs[0][row], pairs[1][row]) for row in rows}, self.call.tokens.mask)

    def _rewrite(self) -> None:
        """Put keys, values, weights and positions in the place of those of the pairs that stay."""
        self._weigh()
        moved = [
            (view, mask, new)
            for view, mask, new in self.rewritten
            if new.keys is not None or new.values is not None or new.shift is not None
        ]
        dense = self.store.dense
        if not moved:
            return
        if dense is None or self.store.segments:
            raise ValueError("rewritten pairs need dense storage: they cannot be combined with a codec")
        keys = dense.keys.clone() if any(new.keys is not None for _, _, new in moved) else None
        values = dense.values.clone() if any(new.values is not None for _, _, new in moved) else None
        shift: Tensor | None = None
        for view, mask, new in moved:
            for place, n in enumerate(view.streams):
                at = divmod(place, mask.shape[1])
                rows, marked = dense.layout.rows(n), mask[at]
                for target, source in ((keys, new.keys), (values, new.values)):
                    if target is not None and source is not None:
                        target[rows] = source[at][marked].to(target.dtype)
                if new.shift is not None:
                    shift = dense.side_array("shift").clone() if shift is None else shift
                    shift[rows] = new.shift[at][marked].float()
        self.store.replace_dense(keys, values, {} if shift is None else {"shift": shift})

    def _hand_on_widths(self) -> None:
        """Tell the codec in how many bits it is to hold the pairs that it has not encoded yet."""
        dense = self.store.dense
        if dense is None:
            return
        flat = torch.zeros(dense.layout.total, device=dense.device)
        for n, widths in self.widths.items():
            length = dense.layout.lengths[n]
            flat[dense.layout.rows(n)] = widths[len(widths) - length :].to(flat)
        self.store.replace_dense(sides={WIDTH: flat})

    def _weigh(self) -> None:
        """Give the pairs that stay new logit weights, wherever they are stored."""
        given = {
            n: weights[marked]
            for view, mask, new in self.rewritten
            if new.log_weight is not None
            for n, weights, marked in zip(view.streams, new.log_weight.flatten(0, 1), mask.flatten(0, 1), strict=True)
        }
        if given:
            self.store.weigh(given)
