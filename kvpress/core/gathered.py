# SPDX-License-Identifier: Apache-2.0
"""Heads of all ranks as an allocator sees them, where tensor parallel divides the heads of a layer among ranks.

An allocator shares pairs out among the heads of a layer or of all layers. Under tensor parallel it runs on every rank, on the
heads of all ranks in the order of the model, so that every rank computes the budgets of one process and takes its own ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.core.scoring import Scored
from kvpress.observe.shards import Shards
from kvpress.observe.view import View


class Gatherer:
    """Gathers numbers about item k of a layer, the view of the same local heads on every rank.

    `lengths` are the pairs per head of the item on each rank, first those of the view, then those of its whole view.
    """

    def __init__(self, shards: Shards, local: Scored, lengths: Sequence[tuple[int, int]]) -> None:
        self.shards, self.local, self.lengths = shards, local, lengths
        self._by_name: dict[Hashable, list[Tensor]] = {}

    def pairs(self, name: str, array: Callable[[], Tensor]) -> list[Tensor]:
        """Return an array of the pairs of the view, `[b, h, n]`, of every rank; `name` is its key in the cache."""
        if name not in self._by_name:
            longest = max(length for length, _ in self.lengths)
            tensor = array()
            arrays = self.shards.gather(pad(tensor, (0, longest - tensor.shape[2])))
            self._by_name[name] = [
                padded[..., :length] for padded, (length, _) in zip(arrays, self.lengths, strict=True)
            ]
        return self._by_name[name]


class GatheredView:
    """Pairs of a row in heads of one rank, or of all ranks if all heads store equally many; has the facts of a `View`.

    Arrays of pairs are gathered at their first use. Every rank uses the same ones in the same order.
    """

    def __init__(self, gatherer: Gatherer, rank: int | None, view: View, length: int, whole: bool) -> None:
        self._gatherer, self._rank, self._is_whole = gatherer, rank, whole
        self.call, self.layer, self.rows, self.seen = view.call, view.layer, view.rows, view.seen
        self.target, self.available, self.length = view.target, view.available, length
        held, count = view.call.store.heads, gatherer.shards.count
        start, stop, _ = view.heads.indices(held)
        self.model_heads = slice(0, count * held) if rank is None else slice(rank * held + start, rank * held + stop)
        self.memo: dict[Any, Any] = {}
        self.shape = torch.Size((len(view.rows), self.model_heads.stop - self.model_heads.start, length))

    @property
    def device(self) -> torch.device:
        """Device of the pairs."""
        return self._gatherer.local.view.device

    @cached_property
    def positions(self) -> Tensor:
        """Original positions `[b, h, n]`, ascending."""
        if self._is_whole and self._gatherer.local.among is not None:
            raise NotImplementedError("positions of pairs that cannot be evicted are not gathered")
        return self.joined(self._gatherer.pairs("positions", lambda: self._gatherer.local.view.positions))

    def joined(self, arrays: Sequence[Tensor]) -> Tensor:
        """Return the array of the rank of this view, or those of all ranks side by side."""
        return torch.cat(list(arrays), dim=1) if self._rank is None else arrays[self._rank]


class GatheredScored:
    """Scores of a `GatheredView`; has the fields of `Scored` that allocators read."""

    def __init__(self, gatherer: Gatherer, rank: int | None) -> None:
        self._gatherer, self._rank = gatherer, rank
        local = gatherer.local
        length, whole_length = gatherer.lengths[rank or 0]
        self.scorer = local.scorer
        self.view = GatheredView(gatherer, rank, local.view, length, whole=False)
        self.whole = GatheredView(gatherer, rank, local.whole, whole_length, whole=True)

    @cached_property
    def scores(self) -> Tensor:
        """Scores `[b, h, n]`, float32."""
        return self.view.joined(self._gatherer.pairs("scores", lambda: self._gatherer.local.scores))

    def share(self, measure: Callable[[Scored, int | Tensor], Tensor], counts: int | Tensor = 0, /) -> Tensor:
        """Return `measure(scored, counts)`, numbers `[b, h, ...]` about heads, from the ranks that hold these heads."""
        local, shards = self._gatherer.local, self._gatherer.shards
        if isinstance(counts, Tensor) and self._rank is None:
            counts = shards.part(counts, 1)
        return self.view.joined(shards.gather(measure(local, counts)))


def gather_scored(shards: Shards, layers: Sequence[Sequence[Scored]]) -> list[Scored]:
    """Return the items of the heads of all ranks, in the order of layers and heads; each is a `GatheredScored`.

    Every rank has one item for each layer if all heads store equally many pairs; else one for each of its heads, and so have
    the results.
    """
    lengths = shards.gather_objects([[(item.view.length, item.whole.length) for item in items] for items in layers])
    gathered: list[GatheredScored] = []
    for index, items in enumerate(layers):
        gatherers = [Gatherer(shards, item, [of_rank[index][k] for of_rank in lengths]) for k, item in enumerate(items)]
        if len(items) == 1 and items[0].view.shape[1] == items[0].view.call.store.heads:
            gathered.append(GatheredScored(gatherers[0], None))
        else:
            gathered += [GatheredScored(gatherer, rank) for rank in range(shards.count) for gatherer in gatherers]
    return cast("list[Scored]", gathered)


def own_counts(
    shards: Shards, layers: Sequence[Sequence[Scored]], counts: Sequence[int | Tensor | None]
) -> list[int | Tensor | None]:
    """Return the counts of the items of this rank, from `counts` of the items of all ranks."""
    own: list[int | Tensor | None] = []
    first = 0
    for items in layers:
        merged = len(items) == 1 and items[0].view.shape[1] == items[0].view.call.store.heads
        if merged:
            count = counts[first]
            own.append(shards.part(count, 1) if isinstance(count, Tensor) else count)
            first += 1
        else:
            start = first + shards.rank * len(items)
            own += counts[start : start + len(items)]
            first += shards.count * len(items)
    return own
