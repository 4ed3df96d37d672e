# SPDX-License-Identifier: Apache-2.0
"""Layout of streams in flat storage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

SHARED_ROWS = 2**16
"""Rows of larger storages are computed anew for each layer; the last results for smaller ones, which layers share, are kept."""


class Layout:
    """Lengths and offsets of streams: stream `n` is rows `offsets[n] : offsets[n + 1]` of flat `[total, ...]` storage.

    Lengths are on the host, since they change only when pairs are sealed or evicted, never per token.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        self.lengths = tuple(map(int, lengths))
        self.offsets = tuple(itertools.accumulate(self.lengths, initial=0))
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def streams(self) -> int:
        """Number of streams, N = B * H."""
        return len(self.lengths)

    @property
    def total(self) -> int:
        """Number of pairs over all streams."""
        return self.offsets[-1]

    @property
    def longest(self) -> int:
        """Length of the longest stream."""
        return max(self.lengths, default=0)

    @cached_property
    def uniform(self) -> bool:
        """Whether all streams have the same length, so that flat storage views as `[N, T, ...]`."""
        return len(set(self.lengths)) <= 1

    def rows(self, stream: int) -> slice:
        """Return the flat rows of one stream."""
        return slice(self.offsets[stream], self.offsets[stream + 1])

    @cached_property
    def starts_tensor(self) -> Tensor:
        """First row of every stream, int64 [N] on the host."""
        return torch.tensor(self.offsets[:-1], dtype=torch.int64)

    @cached_property
    def lengths_tensor(self) -> Tensor:
        """Length of every stream, int64 [N] on the host."""
        return torch.tensor(self.lengths, dtype=torch.int64)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return first row and length of every stream, int64 [N] each, on a device; copied there once."""
        if device not in self._on_device:
            self._on_device[device] = (self.starts_tensor.to(device), self.lengths_tensor.to(device))
        return self._on_device[device]

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the layout, for the memory report."""
        return [tensor for pair in self._on_device.values() for tensor in pair] + [
            tensor for tensor in vars(self).values() if isinstance(tensor, Tensor)
        ]

    def pad(self, flat: Tensor, fill: float) -> Tensor:
        """View `flat [total]` as `[N, longest]`, with `fill` past the end of shorter streams."""
        if self.uniform:
            return flat.view(self.streams, self.longest)
        starts, lengths = self.on(flat.device)
        ranks = torch.arange(self.longest, device=flat.device)
        rows = (starts[:, None] + ranks).clamp_max(self.total - 1)
        return flat[rows].masked_fill_(ranks >= lengths[:, None], fill)

    def streams_of(self, rows: Tensor) -> Tensor:
        """Return the stream of each of the flat `rows`, int64."""
        return torch.searchsorted(self.on(rows.device)[0], rows, right=True) - 1

    @property
    def stream_of_row(self) -> Tensor:
        """Stream number of every flat row, int64 [total] on the host."""
        return torch.repeat_interleave(torch.arange(self.streams), self.lengths_tensor)

    def of_streams(self, streams: Sequence[int]) -> Layout:
        """Return the layout of a storage of these streams, in this order, -1 for one without pairs; repeats are allowed."""
        return Layout(self.lengths[n] if n >= 0 else 0 for n in streams)

    def rows_of_streams(self, streams: Sequence[int]) -> Tensor:
        """Return the flat rows of these streams, one after another; -1 for a stream without pairs."""
        select = _rows_of_streams if self.total <= SHARED_ROWS else _rows_of_streams.__wrapped__
        return select(self.lengths, tuple(streams))


def interleave(layouts: Sequence[Layout]) -> tuple[Tensor, Layout]:
    """Return the rows, and their layout, that reorder concatenated storages by stream: stream 0 of all, then stream 1, ..."""
    bases = itertools.accumulate((layout.total for layout in layouts[:-1]), initial=0)
    starts = [layout.starts_tensor + base for layout, base in zip(layouts, bases, strict=True)]
    lengths = torch.stack([layout.lengths_tensor for layout in layouts], dim=1)
    return spans(torch.stack(starts, dim=1).flatten(), lengths.flatten()), Layout(lengths.sum(dim=1).tolist())


def arranged(layouts: Sequence[Layout], bounds: Sequence[Sequence[int]]) -> list[tuple[Tensor, Layout]]:
    """Return the rows, and their layout, of every piece of concatenated storages that are joined and split as by `interleave`.

    Each stream is split at some ranks: the first piece ends before the first of `bounds`, one rank for each stream. Layers with
    the same lengths share the rows.
    """
    lengths = tuple(layout.lengths for layout in layouts)
    arrange = _arranged if sum(layout.total for layout in layouts) <= SHARED_ROWS else _arranged.__wrapped__
    return [(rows, Layout(counts)) for rows, counts in arrange(lengths, tuple(map(tuple, bounds)))]


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _rows_of_streams(lengths: tuple[int, ...], streams: tuple[int, ...]) -> Tensor:
    layout, index = Layout(lengths), torch.tensor([n for n in streams if n >= 0], dtype=torch.int64)
    return spans(layout.starts_tensor[index], layout.lengths_tensor[index])


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _arranged(
    lengths: tuple[tuple[int, ...], ...], bounds: tuple[tuple[int, ...], ...]
) -> list[tuple[Tensor, list[int]]]:
    rows, layout = interleave([Layout(each) for each in lengths])
    edges = torch.tensor([[0] * layout.streams, *bounds, layout.lengths])
    return [
        (rows[spans(layout.starts_tensor + start, stop - start)], (stop - start).tolist())
        for start, stop in itertools.pairwise(edges)
    ]


def spans(first: Tensor, counts: Tensor) -> Tensor:
    """Return `first[i], ..., first[i] + counts[i] - 1` for every i, one after another."""
    ends = counts.cumsum(0)
    within = torch.arange(int(ends[-1]) if len(ends) else 0, device=first.device)
    return torch.repeat_interleave(first - ends + counts, counts) + within


def row_numbers(rows: Tensor | slice, total: int, device: torch.device) -> Tensor:
    """Return row numbers, int64, for `rows`, which may be a slice of a storage with `total` rows."""
    return torch.arange(*rows.indices(total), device=device) if isinstance(rows, slice) else rows
