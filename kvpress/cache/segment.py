# SPDX-License-Identifier: Apache-2.0
"""Sealed pairs: the interface of all storage formats, and the dense format.

A segment stores the pairs of all streams of one layer flat, `[total, ...]`, in ascending order of slot within each stream.
Copies of a cache share its tensors, so none is ever written to: every change makes a new segment. Eviction, beam search and
batch operations all call `take`, which returns a segment of some rows.

A format is a dataclass with its tensors (`kvpress.cache.storage`), a field `layout: OfStreams` and `decode`. It may override
`attend` and `attend_rows` to read codes directly, with `log_weight` added to the logits; the defaults decode block by block.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.layout import Layout, arranged, row_numbers, spans
from kvpress.cache.offset import KeyOffset
from kvpress.cache.segment_attention import Attended, DenseBlock
from kvpress.cache.storage import Held, Joint, RowChoice, derived, own, part, per_pair, per_pair_or_zero
from kvpress.cache.tier import FileTier, MemoryTier, in_file

SegmentT = TypeVar("SegmentT", bound="Segment")
OfStreams = Annotated[Layout, own("offsets")]

SLOT = 2
"""Bytes of the slot of a pair, where a stream has gaps; more if two neighbours are 2**15 or more slots apart."""

WEIGHT = 2
"""Bytes of the log-weight of a pair where pairs were sampled."""


@dataclass(eq=False, repr=False)
class Segment(Held, Attended, ABC):
    """Pairs of N streams in one storage format."""

    first: Annotated[Sequence[int], own()] = field(default=(), kw_only=True)
    """Slot of the first pair of every stream."""
    side: Annotated[dict[str, Tensor], per_pair_or_zero("scores")] = field(default_factory=dict, kw_only=True)
    """Per-pair arrays `[total]`, such as accumulated attention."""
    tier: FileTier | None = field(default=None, init=False)
    """Files that hold the pairs, and those of all segments made of this one; None for memory."""
    key_offset: Annotated[KeyOffset | None, part()] = field(default=None, init=False)
    """Vectors added to keys when they are read."""
    index: Annotated[dict[str, Any], derived("indexes")] = field(default_factory=dict, init=False)
    """Cache of data that a selector derives from the pairs."""
    _held_slots: Annotated[Tensor | None, own("indexes")] = field(default=None, init=False)
    """Slots (int32) or differences of slots (int16), `[total]`; None where no stream has gaps."""
    _log_weight: Annotated[Tensor | None, per_pair_or_zero("weights")] = field(default=None, init=False)
    """Log-weights `[total]`; None for zeros."""
    _first_on: Annotated[tuple[Sequence[int], Tensor] | None, derived("indexes")] = field(default=None, init=False)
    """`first`, and the same on the device."""

    def __post_init__(self) -> None:
        self.first = tuple(self.first) or (0,) * self.layout.streams
        self._place()

    @abstractmethod
    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Decode flat rows to `(keys [n, D], values [n, Dv])` in the dtype of the model, without the key offset."""

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        keys, values = self.decode(rows)
        if self.key_offset is None:
            return keys, values
        rows = row_numbers(rows, self.layout.total, self.device)
        return (keys.float() + self.key_offset.of_rows(self, rows)).to(keys.dtype), values

    def as_rows(self) -> kernels.Rows | None:
        return self._keep("operand", self._with_offset)

    @property
    def computes_operands(self) -> bool:
        # Positions are computed where keys of a segment with gaps have an offset.
        return self.key_offset is not None and self.key_offset.computes_positions(self)

    def _with_offset(self) -> kernels.Rows | None:
        rows = self.operand()
        if rows is None or self.key_offset is None:
            return rows
        return replace(rows, key_offset=self.key_offset.operand(self))

    def _tables(self) -> Tensor | None:
        return None if self.key_offset is None else self.key_offset.rotation.angles.coarse

    @property
    def encoded(self) -> bool:
        """Whether a codec made the segment; sinks, which stay dense, may be a segment too."""
        return True

    def _place(self) -> None:
        if self.tier is not None:
            self.tier.place(self)

    def check(self, total: int, streams: int) -> None:
        layout = self.layout
        if (
            not isinstance(layout, Layout)
            or (layout.total, layout.streams) != (total, streams)
            or min(layout.lengths) < 0
        ):
            raise ValueError(f"the layout of {type(self).__name__} is not one of {total} pairs in {streams} streams")
        if len(self.first) != streams or not all(type(first) is int for first in self.first):
            raise ValueError(f"{type(self).__name__} does not begin at one slot for each of {streams} streams")
        slots = self._held_slots
        if slots is not None and (slots.shape != (total,) or slots.dtype not in (torch.int16, torch.int32)):
            raise ValueError(f"slots of {type(self).__name__} are not one for each of {total} pairs")
        super().check(total, streams)

    def put(self, tier: FileTier | None) -> None:
        """Move the pairs to files or, with None, to the fastest memory; tensors that other segments share do not change.

        Raises:
            OSError: no space is left.
        """
        self.tier = tier
        (tier or MemoryTier()).place(self)

    def away(self) -> float:
        """Return bytes per pair outside the memory of the device, which are fetched when the pair is read."""
        kept = self._kept()
        if "away" not in kept:
            stored = [tensor for tensors in self.storage().values() for tensor in tensors if in_file(tensor)]
            kept["away"] = sum(tensor.numel() * tensor.element_size() for tensor in stored) / max(1, self.layout.total)
        size: float = kept["away"]
        return size

    @property
    def log_weight(self) -> Tensor | None:
        """Log-weights [total], float32 or float16, added to the logits; None for zeros.

        A pair with log-weight log n stands for n equal pairs.
        """
        return self._log_weight

    @log_weight.setter
    def log_weight(self, log_weight: Tensor | None) -> None:
        self._log_weight = log_weight

    # -- rows ------------------------------------------------------------------------------------------------

    def take(self: SegmentT, rows: Tensor, layout: Layout) -> SegmentT:
        """Return the segment of flat `rows` (int64, on the host), laid out as `layout`."""
        rows = rows.to(self.device)
        selected = self._take(RowChoice(rows, layout, self.layout))
        selected._set_slots(self.slots().index_select(0, rows))
        return selected

    def take_streams(self: SegmentT, streams: Sequence[int]) -> SegmentT:
        """Return the segment of some streams, in this order, -1 for one without pairs; repeats are copied."""
        rows, layout = self.layout.rows_of_streams(streams), self.layout.of_streams(streams)
        if not self.contiguous:
            return self.take(rows, layout)
        selected = self._take(RowChoice(rows.to(self.device), layout, self.layout))
        selected.first = tuple(self.first[n] if n >= 0 and self.layout.lengths[n] else 0 for n in streams)
        return selected

    def _take(self: SegmentT, choice: RowChoice) -> SegmentT:
        """Return the segment of the chosen rows, without slots."""
        selected = super()._take(replace(choice, origin=self.layout))
        selected.layout, selected._held_slots, selected.first = choice.layout, None, (0,) * choice.layout.streams
        return selected

    def moved_by(self: SegmentT, moves: Sequence[int]) -> SegmentT:
        """Return a segment of the same pairs with `moves[n]` added to the slots of stream n; slots below 0 stay.

        Positions, which are slots less the left padding, do not change.
        """
        if not any(moves):
            return self
        layout, by_stream = self.layout, torch.tensor(moves, dtype=torch.int64)
        placed = self._move(by_stream.to(self.device))
        if self.contiguous:
            placed.first = tuple(
                first + move if length else 0
                for first, move, length in zip(self.first, moves, layout.lengths, strict=True)
            )
        else:
            placed._set_slots(moved_slots(self.slots(), layout, by_stream))
        return placed

    def own(self) -> Segment:
        """Return a segment of the same pairs in which streams share none."""
        return self

    def known(self) -> Segment:
        """Return the segment that codecs read the format and tables of streams from; it has a pair or more of each stream."""
        return self

    def located(self, rows: Tensor) -> tuple[Segment, Tensor]:
        """Return the segment that stores the pairs of flat `rows`, and their rows in it."""
        return self, rows

    def cut(self: SegmentT, *bounds: Sequence[int]) -> list[SegmentT]:
        """Split every stream at some ranks: return the segments before the first bound, ..., after the last."""
        return Segment.join_and_cut([self], *bounds)

    @staticmethod
    def join_and_cut(segments: Sequence[SegmentT], *bounds: Sequence[int]) -> list[SegmentT]:
        """Return the pieces of `join(segments)` that `cut` would return, without a copy of all pairs in between."""
        layouts = [segment.layout for segment in segments]
        joined = segments[0] if len(segments) == 1 else segments[0]._join(segments, Joint(layouts))
        first = _first_of_runs(segments)
        slots = torch.cat([segment.slots() for segment in segments]) if first is None else None
        pieces = []
        for number, (rows, layout) in enumerate(arranged(layouts, bounds)):
            rows = rows.to(joined.device)
            piece = joined._take(RowChoice(rows, layout, joined.layout))
            if first is None:
                assert slots is not None  # noqa: S101 - for type checkers
                piece._set_slots(slots[rows])
            else:
                ranks = bounds[number - 1] if number else [0] * layout.streams
                starts = zip(first, ranks, layout.lengths, strict=True)
                piece.first = tuple(slot + rank if length else 0 for slot, rank, length in starts)
            pieces.append(piece)
        return pieces

    @staticmethod
    def join(segments: Sequence[SegmentT]) -> SegmentT:
        """Return one segment with, for every stream, the pairs of all `segments` in order."""
        layouts = [segment.layout for segment in segments]
        if not all(layout.uniform for layout in layouts) or not segments[0].weaves():
            return Segment.join_and_cut(segments)[0]
        joint = Joint(layouts, woven=True)
        joined, slots = segments[0]._join(segments, joint), joint.pairs([segment.slots() for segment in segments])
        assert slots is not None  # noqa: S101 - for type checkers
        joined._set_slots(slots)
        return joined

    def _join(self: SegmentT, others: Sequence[SegmentT], joint: Joint) -> SegmentT:
        """Return the segment of all pairs of `others`, without slots."""
        layouts = [segment.layout for segment in others]
        joined = super()._join(others, Joint(layouts, joint.woven))
        lengths = zip(*(layout.lengths for layout in layouts), strict=True)
        joined.layout = Layout(map(sum, lengths) if joint.woven else itertools.chain(*(a.lengths for a in layouts)))
        return joined

    def joinable(self, other: Segment) -> bool:
        """Return whether `other` has the same format and settings, so that both can be joined."""
        return self.joins(other, ())

    def joins(self, other: Held, streams: Sequence[int]) -> bool:
        if not isinstance(other, Segment):
            return False
        lengths = zip(self.layout.lengths, other.layout.lengths, strict=True)
        return super().joins(other, [n for n, pair_counts in enumerate(lengths) if all(pair_counts)])

    def side_array(self, name: str) -> Tensor:
        """Return the per-pair array `name`, float32 [total]; zeros where nothing was recorded."""
        array = self.side.get(name)
        return torch.zeros(self.layout.total, device=self.device) if array is None else array

    def describe(self, pairs: Segment, without: Collection[str]) -> None:
        """Copy slots, log-weights and per-pair arrays, except those in `without`, from the dense pairs that were encoded."""
        self._held_slots, self.first, self.log_weight = pairs._held_slots, pairs.first, pairs.log_weight
        if self.lists_slots:
            self._held_slots = pairs.positions
        self.side = {name: array for name, array in pairs.side.items() if name not in without}

    # -- slots -----------------------------------------------------------------------------------------------

    lists_slots: ClassVar[bool] = False
    """Whether kernels read slots, so that slots are stored instead of differences."""

    @property
    def contiguous(self) -> bool:
        """Whether no stream has gaps."""
        return self._held_slots is None

    @property
    def positions(self) -> Tensor | None:
        """Slot of every pair, int32 [total], or None where every stream is contiguous.

        Stored are the differences between neighbours, int16, unless one is too large or kernels read slots.
        """
        stored = self._held_slots
        if stored is None or stored.dtype == torch.int32:
            return stored
        sums, (starts, lengths) = stored.cumsum(0), self.layout.on(stored.device)
        base = self.first_slot() - sums[starts.clamp_max(len(sums) - 1)]
        return (sums + base.repeat_interleave(lengths, output_size=len(sums))).to(torch.int32)

    def slots(self) -> Tensor:
        """Return the slot of every pair, int32 [total]."""
        if (positions := self.positions) is not None:
            return positions
        slots = spans(torch.tensor(self.first, dtype=torch.int64), self.layout.lengths_tensor)
        return slots.to(torch.int32).to(self.device)

    def first_slot(self) -> Tensor:
        """Return the slot of the first pair of every stream, int64 [N]; copied to the device once."""
        if self._first_on is None or self._first_on[0] is not self.first:
            self._first_on = self.first, torch.tensor(self.first, dtype=torch.int64).to(self.device)
        return self._first_on[1]

    def _set_slots(self, slots: Tensor) -> None:
        """Store slots, as a start per stream where they are contiguous (the common case without eviction)."""
        layout = self.layout
        filled = [n for n in range(layout.streams) if layout.lengths[n]]
        if not filled:
            self.first, self._held_slots = (0,) * layout.streams, None
            return
        ends = torch.tensor([(layout.offsets[n], layout.offsets[n + 1] - 1) for n in filled], device=slots.device)
        steps = slots.diff(prepend=slots[:1])
        steps[ends[:, 0]] = 0
        *bounds_and_step, widest = torch.cat([slots[ends.flatten()], steps.abs().max()[None]]).tolist()
        starts = dict(zip(filled, bounds_and_step[::2], strict=True))
        self.first = tuple(starts.get(n, 0) for n in range(layout.streams))
        # Slots ascend, except for pairs without a token, whose slot is negative.
        pairs = zip(filled, bounds_and_step[::2], bounds_and_step[1::2], strict=True)
        if all(0 <= first == last - layout.lengths[n] + 1 for n, first, last in pairs):
            self._held_slots = None
        else:
            listed = self.lists_slots or widest > torch.iinfo(torch.int16).max
            self._held_slots = slots.to(torch.int32) if listed else steps.to(torch.int16)

    # -- tensors ---------------------------------------------------------------------------------------------

    def storage(self) -> dict[str, list[Tensor]]:
        """Return the tensors that store the pairs, by component."""
        return self.tensors(self.stored_names())

    def stored_names(self) -> list[str]:
        return [name for name in self.declared() if name not in Segment.declared() and name != "layout"]

    def tensors(self, names: Sequence[str] | None = None, component: str = "") -> dict[str, list[Tensor]]:
        by_component = super().tensors(names, component)
        if self.tier is None:
            return by_component
        by_place: dict[str, list[Tensor]] = {}
        for component_name, tensors in by_component.items():
            for tensor in tensors:
                by_place.setdefault("file" if in_file(tensor) else component_name, []).append(tensor)
        return by_place

    @property
    def value_dim(self) -> int:
        """Head dim of the values."""
        return self.read(slice(0, 0))[1].shape[-1]

    def to(self, device: torch.device | str, memo: dict[int, Any] | None = None) -> None:
        """Move all tensors to a device, in place; `memo` as in `moved`."""
        vars(self).update(vars(self.moved(device, memo)))


@dataclass(eq=False, repr=False)
class DenseSegment(Segment):
    """Pairs in the dtype of the model: `keys [total, D]`, `values [total, Dv]`."""

    keys: Annotated[Tensor, per_pair("dense")]
    values: Annotated[Tensor, per_pair("dense")]
    layout: OfStreams

    @property
    def encoded(self) -> bool:
        return self.key_offset is not None

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        if isinstance(rows, slice):
            return self.keys[rows], self.values[rows]
        return self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def blocks(self) -> Iterator[DenseBlock]:
        layout = self.layout
        if layout.uniform and layout.longest:
            shape = (layout.streams, layout.longest, -1)
            all_rows = slice(0, layout.total)
            yield DenseBlock(slice(0, layout.streams), all_rows, self.keys.view(shape), self.values.view(shape))
            return
        for n in range(layout.streams):
            rows = layout.rows(n)
            if rows.stop > rows.start:
                yield DenseBlock(slice(n, n + 1), rows, self.keys[None, rows], self.values[None, rows])

    def operand(self) -> kernels.Rows | None:
        return kernels.Rows(kernels.Dense(self.keys), kernels.Dense(self.values), log_weight=self.log_weight)


def moved_slots(slots: Tensor, layout: Layout, moves: Tensor) -> Tensor:
    """Return slots, int32 [total], plus the entry of their stream in `moves [N]`; slots below 0, without a token, stay."""
    by_pair = moves.to(slots.device).repeat_interleave(layout.on(slots.device)[1], output_size=layout.total)
    return torch.where(slots >= 0, slots + by_pair, slots).to(torch.int32)


def survivors(part: SegmentT, marked: Tensor) -> SegmentT:
    """Return the segment of the pairs that `marked`, bool [total], marks."""
    layout = Layout(part.layout.pad(marked, False).sum(dim=1).tolist())
    return part if layout.lengths == part.layout.lengths else part.take(marked.nonzero().flatten(), layout)


def read_keys(segments: Sequence[Segment], streams: Tensor, ranks: Tensor) -> Tensor:
    """Return keys `[S, n, D]` at `ranks [S, n]` over all segments, of some `streams [S]`; both int64 on the host."""
    gathered: Tensor | None = None
    base = torch.zeros(len(streams), 1, dtype=torch.int64)
    for segment in segments:
        starts, lengths = segment.layout.starts_tensor[streams, None], segment.layout.lengths_tensor[streams, None]
        rows, is_here = starts + ranks - base, (ranks >= base) & (ranks < base + lengths)
        base = base + lengths
        if bool(is_here.all()):
            flat_keys, _ = segment.read(rows.flatten().to(segment.device))
            keys: Tensor = flat_keys.unflatten(0, ranks.shape)
            return keys
        if bool(is_here.any()):
            keys, _ = segment.read(rows[is_here].to(segment.device))
            gathered = keys.new_empty(*ranks.shape, keys.shape[-1]) if gathered is None else gathered
            gathered[is_here.to(keys.device)] = keys
    if gathered is None:
        raise ValueError("no segment holds these ranks")
    return gathered


def _first_of_runs(segments: Sequence[Segment]) -> list[int] | None:
    """Return the first slot of every stream if its pairs in all `segments`, in order, have slots without gaps; else None."""
    if not all(segment.contiguous for segment in segments):
        return None
    first, ends = [0] * segments[0].layout.streams, [-1] * segments[0].layout.streams
    for segment in segments:
        for n, (slot, length) in enumerate(zip(segment.first, segment.layout.lengths, strict=True)):
            if not length:
                continue
            if ends[n] < 0:
                first[n] = slot
            elif slot != ends[n]:
                return None
            ends[n] = slot + length
    return first
