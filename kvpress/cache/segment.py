"""Sealed pairs: the interface that every storage format fills, and the dense format.

A segment holds the pairs of all streams of one layer flat, `[total, ...]`, in ascending order of position within each
stream. Its content never changes; eviction, beams and batch operations all go through one operation, `take`, that
returns a new segment made of the given rows.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.attention import Logits, Partial, attend, merge, query_blocks
from kvpress.cache.layout import Layout, interleave

SegmentT = TypeVar("SegmentT", bound="Segment")

BLOCK_ROWS = 4096
"""Rows decoded at a time where a packed format is read without a fused kernel."""


@dataclass
class Block:
    """Dense pairs of some streams: `keys [S, n, D]`, `values [S, n, Dv]`, and where they come from."""

    streams: slice
    rows: slice
    keys: Tensor
    values: Tensor


class Segment(ABC):
    """Pairs of N streams in one storage format.

    `positions` are int32 [total] original columns, or None where every stream is contiguous from `first[n]`.
    `side` holds further per-pair arrays `[total]`, such as the attention mass that heavy hitters accumulate.
    `index` caches what a selector derived from the pairs; it is dropped whenever rows change.
    """

    def __init__(
        self, layout: Layout, positions: Tensor | None, first: Sequence[int], side: dict[str, Tensor] | None = None
    ) -> None:
        self.layout = layout
        self.positions = positions
        self.first = tuple(first)
        self.side = side or {}
        self.index: dict[str, Any] = {}
        self._first_on: tuple[Sequence[int], Tensor] | None = None

    # -- what a format provides ------------------------------------------------------------------------------

    @abstractmethod
    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return dense `(keys [n, D], values [n, Dv])` of flat rows, in the dtype of the model."""

    @abstractmethod
    def _take(self: SegmentT, rows: Tensor, layout: Layout) -> SegmentT:
        """Return storage made of the given rows; positions and side arrays are handled by `take`."""

    @classmethod
    @abstractmethod
    def _concatenate(cls: type[SegmentT], segments: Sequence[SegmentT]) -> SegmentT:
        """Return storage with the rows of all segments back to back, in no particular stream order."""

    @abstractmethod
    def storage(self) -> dict[str, list[Tensor]]:
        """Tensors that hold the pairs, by component name for the memory report."""

    @abstractmethod
    def _to(self, device: torch.device | str) -> None:
        """Move the storage."""

    def joinable(self, other: Segment) -> bool:
        """Whether `other` has the same format and settings, so that both can become one segment."""
        return type(self) is type(other)

    # -- what follows from it --------------------------------------------------------------------------------

    def take(self: SegmentT, rows: Tensor, layout: Layout) -> SegmentT:
        """Return the segment made of flat `rows` (int64, on the host), laid out as `layout`."""
        rows = rows.to(self.device)
        taken = self._take(rows, layout)
        taken.side = {name: array.index_select(0, rows.to(array.device)) for name, array in self.side.items()}
        taken._set_positions(self.columns().index_select(0, rows))
        return taken

    def cut(self: SegmentT, *bounds: Sequence[int]) -> list[SegmentT]:
        """Return the segments between the given ranks of every stream: before the first bound, ..., after the last."""
        rank, stream = self.layout.rank_of_row, self.layout.stream_of_row
        edges = [[0] * self.layout.streams, *bounds, self.layout.lengths]
        pieces = []
        for start, stop in itertools.pairwise(edges):
            inside = (rank >= torch.tensor(start)[stream]) & (rank < torch.tensor(stop)[stream])
            layout = Layout(b - a for a, b in zip(start, stop, strict=True))
            pieces.append(self.take(inside.nonzero().flatten(), layout))
        return pieces

    def _sources(self, rows: Tensor, layout: Layout) -> Tensor:
        """For every stream of `layout`, filled with the flat `rows`, one of our streams that it came from, int64."""
        first = torch.tensor(layout.offsets[:-1], device=rows.device)
        if not layout.total:
            return torch.zeros_like(first)
        return self.layout.streams_of(rows[first.clamp_max(layout.total - 1)])

    @classmethod
    def join(cls: type[SegmentT], segments: Sequence[SegmentT]) -> SegmentT:
        """Return one segment with, for every stream, the pairs of all `segments` in order."""
        rows, layout = interleave([segment.layout for segment in segments])
        joined = cls._concatenate(segments)
        joined.positions = torch.cat([segment.columns() for segment in segments])
        names = {name for segment in segments for name in segment.side}
        joined.side = {name: torch.cat([segment.side_array(name) for segment in segments]) for name in names}
        return joined.take(rows, layout)

    def side_array(self, name: str) -> Tensor:
        """Return the per-pair array `name`, float32 [total]; zeros where nothing was recorded."""
        array = self.side.get(name)
        return torch.zeros(self.layout.total, device=self.device) if array is None else array

    def columns(self) -> Tensor:
        """Original column of every pair, int32 [total]."""
        if self.positions is not None:
            return self.positions
        first = torch.tensor(self.first, dtype=torch.int64)[self.layout.stream_of_row]
        return (first + self.layout.rank_of_row).to(torch.int32).to(self.device)

    def first_column(self) -> Tensor:
        """Column of the first pair of every stream, int64 [N], where they are contiguous; copied to the device once."""
        if self._first_on is None or self._first_on[0] is not self.first:
            self._first_on = self.first, torch.tensor(self.first, dtype=torch.int64).to(self.device)
        return self._first_on[1]

    def _set_positions(self, columns: Tensor) -> None:
        """Store columns, as a start per stream where they are contiguous (the common case without eviction)."""
        layout = self.layout
        filled = [n for n in range(layout.streams) if layout.lengths[n]]
        ends = [(layout.offsets[n], layout.offsets[n + 1] - 1) for n in filled]
        found = columns[torch.tensor(ends, dtype=torch.int64, device=columns.device)].tolist() if ends else []
        starts = dict(zip(filled, (first for first, _ in found), strict=True))
        self.first = tuple(starts.get(n, 0) for n in range(layout.streams))
        # They ascend, but for pairs of no token, whose column is negative.
        contiguous = all(
            0 <= first == last - layout.lengths[n] + 1 for n, (first, last) in zip(filled, found, strict=True)
        )
        self.positions = None if contiguous else columns.to(torch.int32)

    def blocks(self) -> Iterator[Block]:
        """Dense blocks that cover all pairs, small enough never to amount to a dense copy."""
        layout = self.layout
        for n in range(layout.streams):
            rows = layout.rows(n)
            for start in range(rows.start, rows.stop, BLOCK_ROWS):
                part = slice(start, min(start + BLOCK_ROWS, rows.stop))
                keys, values = self.read(part)
                yield Block(slice(n, n + 1), part, keys[None], values[None])

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        """Attend from `queries [N, M, D]` to all pairs; `hidden [total]` marks pairs to leave out."""
        outs = [queries.new_zeros(0)] * self.layout.streams
        lses = list(outs)
        for n, partials in self._partials(queries, logits, hidden).items():
            outs[n], lses[n] = merge(partials)
        empty = [n for n in range(self.layout.streams) if not self.layout.lengths[n]]
        if empty:
            rows, dim = queries.shape[1], self.value_dim
            for n in empty:
                outs[n] = torch.zeros(1, rows, dim, device=queries.device)
                lses[n] = torch.full((1, rows), -torch.inf, device=queries.device)
        return torch.cat(outs), torch.cat(lses)

    def _partials(self, queries: Tensor, logits: Logits, hidden: Tensor | None) -> dict[int, list[Partial]]:
        found: dict[int, list[Partial]] = {}
        for block in self.blocks():
            visible = None if hidden is None else ~hidden[block.rows].view(1, 1, -1)
            partial = attend(queries[block.streams], block.keys, block.values, logits, visible)
            found.setdefault(block.streams.start, []).append(partial)
        return found

    def attend_rows(self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor) -> Partial:
        """Attend to chosen pairs only: the first `counts[n]` of the flat `rows [N, K]`, int64."""
        keys, values = self.read(rows.flatten())
        shape = (*rows.shape, -1)
        visible = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        return attend(queries, keys.view(shape), values.view(shape), logits, visible[:, None, :])

    def mass(self, queries: Tensor, logits: Logits, lse: Tensor) -> Tensor:
        """Attention that every pair receives, summed over query rows: float32 [total]; `lse [N, M]` is the whole's."""
        received = torch.zeros(self.layout.total, device=queries.device)
        for block in self.blocks():
            asking, total = queries[block.streams], lse[block.streams, :, None]
            for rows in query_blocks(asking, block.keys):
                weights = torch.exp(logits(asking[:, rows], block.keys) - total[:, rows])
                received[block.rows] += weights.sum(dim=1).flatten()
        return received

    def tensors(self) -> dict[str, list[Tensor]]:
        """Every tensor that is held, by component."""
        held = {name: list(tensors) for name, tensors in self.storage().items()}
        indexes = [] if self.positions is None else [self.positions]
        for entry in self.index.values():
            indexes.extend(entry.tensors())
        if indexes:
            held["indexes"] = held.get("indexes", []) + indexes
        if self.side:
            held["scores"] = list(self.side.values())
        return held

    @property
    def device(self) -> torch.device:
        """Where the storage lies."""
        return next(tensor for tensors in self.storage().values() for tensor in tensors).device

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """Head dim of the values."""

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device, in place."""
        self._to(device)
        self.positions = None if self.positions is None else self.positions.to(device)
        self.side = {name: array.to(device) for name, array in self.side.items()}
        self.index = {}
        self._first_on = None


class DenseSegment(Segment):
    """Pairs as they were computed: `keys [total, D]`, `values [total, Dv]`."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        layout: Layout,
        positions: Tensor | None = None,
        first: Sequence[int] = (),
        side: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__(layout, positions, first, side)
        self.keys = keys
        self.values = values

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        if isinstance(rows, slice):
            return self.keys[rows], self.values[rows]
        return self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def _take(self, rows: Tensor, layout: Layout) -> DenseSegment:
        return DenseSegment(*self.read(rows), layout)

    @classmethod
    def join(cls, segments: Sequence[DenseSegment]) -> DenseSegment:
        if cls is not DenseSegment or not all(segment.layout.uniform for segment in segments):
            return super().join(segments)
        # Copied once: streams of equal length lie side by side.
        joined = cls(
            _side_by_side(segments, [segment.keys for segment in segments]),
            _side_by_side(segments, [segment.values for segment in segments]),
            Layout(sum(lengths) for lengths in zip(*(segment.layout.lengths for segment in segments), strict=True)),
        )
        names = {name for segment in segments for name in segment.side}
        joined.side = {name: _side_by_side(segments, [s.side_array(name) for s in segments]) for name in names}
        joined._set_positions(_side_by_side(segments, [segment.columns() for segment in segments]))
        return joined

    @classmethod
    def _concatenate(cls, segments: Sequence[DenseSegment]) -> DenseSegment:
        keys = torch.cat([segment.keys for segment in segments])
        values = torch.cat([segment.values for segment in segments])
        return DenseSegment(keys, values, Layout([keys.shape[0]]))

    def storage(self) -> dict[str, list[Tensor]]:
        return {"dense": [self.keys, self.values]}

    def _to(self, device: torch.device | str) -> None:
        self.keys, self.values = self.keys.to(device), self.values.to(device)

    @property
    def value_dim(self) -> int:
        return self.values.shape[-1]

    def blocks(self) -> Iterator[Block]:
        layout = self.layout
        if layout.uniform and layout.longest:
            shape = (layout.streams, layout.longest, -1)
            whole = slice(0, layout.total)
            yield Block(slice(0, layout.streams), whole, self.keys.view(shape), self.values.view(shape))
            return
        for n in range(layout.streams):
            rows = layout.rows(n)
            if rows.stop > rows.start:
                yield Block(slice(n, n + 1), rows, self.keys[None, rows], self.values[None, rows])

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        if hidden is None and kernels.serves(queries, self.keys):
            at, lengths = self.layout.on(self.device)
            return kernels.dense_decode(
                queries, self.keys, self.values, at, lengths, logits.scale, softcap=logits.softcap
            )
        if self.layout.uniform and self.layout.longest:
            (block,) = self.blocks()
            visible = None if hidden is None else ~hidden.view(self.layout.streams, 1, -1)
            return attend(queries, block.keys, block.values, logits, visible)
        return super().attend(queries, logits, hidden)

    def mass(self, queries: Tensor, logits: Logits, lse: Tensor) -> Tensor:
        if kernels.available(self.keys):
            at, lengths = self.layout.on(self.device)
            return kernels.column_mass(queries, self.keys, at, lengths, logits.scale, lse=lse, softcap=logits.softcap)
        return super().mass(queries, logits, lse)

    def attend_rows(self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor) -> Partial:
        if kernels.serves(queries, self.keys):
            return kernels.dense_select(
                queries, self.keys, self.values, rows, counts, logits.scale, softcap=logits.softcap
            )
        return super().attend_rows(queries, logits, rows, counts)


def _side_by_side(segments: Sequence[Segment], arrays: Sequence[Tensor]) -> Tensor:
    """Join arrays `[total, ...]` of segments with streams of one length each, stream by stream."""
    split = [
        array.unflatten(0, (segment.layout.streams, segment.layout.longest))
        for segment, array in zip(segments, arrays, strict=True)
    ]
    return torch.cat(split, dim=1).flatten(0, 1)
