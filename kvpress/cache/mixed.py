# SPDX-License-Identifier: Apache-2.0
"""Streams with pairs in two storage formats, such as salient pairs in more bits than the others."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial, merge
from kvpress.cache.layout import Layout, interleave
from kvpress.cache.offset import common_offset
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.storage import Axis, RowChoice, own, part


@dataclass(eq=False)
class Flags(Axis):
    """One bit per pair."""

    bits: Annotated[Tensor, own("indexes")]
    """Packed bits, uint8 [ceil(total / 8)]."""
    total: Annotated[int, own()]
    """Number of pairs."""

    @classmethod
    def of(cls, flags: Tensor) -> Flags:
        """Pack bools [total]."""
        bits = torch.nn.functional.pad(flags, (0, -len(flags) % 8)).view(-1, 8).to(torch.uint8) << places(flags.device)
        return cls(bits.sum(dim=1, dtype=torch.uint8), len(flags))

    def read(self) -> Tensor:
        """Unpack to bools [total]."""
        return ((self.bits[:, None] >> places(self.bits.device)) & 1).flatten()[: self.total].bool()

    def take(self, rows: Tensor) -> tuple[Flags, Tensor]:
        return Flags.of(self.read()[rows]), rows

    def entries(self, total: int) -> int:
        if self.total != total or self.bits.shape != (-(-total // 8),):
            raise ValueError(f"flags do not have {total} entries")
        return total

    def join(self, others: Sequence[Flags], totals: Sequence[int], device: torch.device) -> Flags:
        return Flags.of(torch.cat([flags.read() for flags in others]))


@dataclass(eq=False, repr=False)
class MixedSegment(Segment):
    """Two segments with the same streams, and one bit per pair for the segment that stores it.

    Attention does not depend on the order of pairs, so it reads both parts and merges the results; order matters only for
    flat rows: reading, eviction, selection. The parts have log-weights, but neither slots nor a key offset.
    """

    one: Annotated[Segment, part()]
    """First part."""
    other: Annotated[Segment, part()]
    """Second part."""
    flags: Annotated[Flags, part()]
    """Whether the second part stores each pair."""
    layout: OfStreams
    """Layout of all pairs."""

    @property
    def parts(self) -> tuple[Segment, Segment]:
        """Both segments."""
        return self.one, self.other

    @property
    def in_second(self) -> Tensor:
        """Whether the second part stores each pair, bool [total]."""
        return self.flags.read()

    def check(self, total: int, streams: int) -> None:
        super().check(total, streams)
        second = int(self.in_second.sum())
        if (self.one.layout.total, self.other.layout.total) != (total - second, second):
            raise ValueError(f"the parts of a MixedSegment do not have {total} pairs together")

    def _lengths_of(self, name: str, total: int, streams: int) -> tuple[int, int]:
        held = getattr(self, name)
        return (held.layout.total if isinstance(held, Segment) else total), streams

    def _halves(self) -> list[tuple[Tensor, Segment]]:
        """Return each part with a mask of its pairs, bool [total]."""
        second = self.in_second
        return [(~second, self.one), (second, self.other)]

    def _read_parts(self) -> tuple[Segment, Segment]:
        """Return both segments for attention, with their key offset if there is one."""
        if self.key_offset is None:
            return self.parts
        rows = self.in_second.to(torch.uint8).argsort(stable=True)
        rows_by_part = rows.split([self.one.layout.total, self.other.layout.total])
        twins = [copy.copy(segment) for segment in self.parts]
        for twin, part_rows in zip(twins, rows_by_part, strict=True):
            twin.key_offset = self.key_offset.of_part(self, part_rows)
        return twins[0], twins[1]

    @property
    def log_weight(self) -> Tensor | None:
        kinds = [part.log_weight.dtype for part in (self.one, self.other) if part.log_weight is not None]
        if not kinds:
            return None
        joined = torch.zeros(self.layout.total, device=self.device, dtype=max(kinds, key=lambda kind: kind.itemsize))
        for in_part, segment in self._halves():
            if segment.log_weight is not None:
                joined[in_part] = segment.log_weight.to(joined)
        return joined

    @log_weight.setter
    def log_weight(self, log_weight: Tensor | None) -> None:
        if log_weight is None:
            self.one.log_weight = self.other.log_weight = None
            return
        for in_part, segment in self._halves():
            segment.log_weight = log_weight[in_part]

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        second, ranks = self._places()
        is_second, part_rows = second[rows], ranks[rows]
        read = [segment.read(part_rows[is_second == bool(p)]) for p, segment in enumerate(self.parts)]
        keys, values = (like.new_empty(len(is_second), like.shape[1]) for like in read[0])
        for p, (part_keys, part_values) in enumerate(read):
            keys[is_second == bool(p)], values[is_second == bool(p)] = part_keys, part_values
        return keys, values

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return, for every flat row, whether the second part stores it, and its row in its part."""
        second = self.in_second
        return second, torch.where(second, second.cumsum(0), (~second).cumsum(0)) - 1

    def as_parts(self, queries: Tensor, logits: Logits) -> list[kernels.Part] | None:
        part_lists = [segment.as_parts(queries, logits) for segment in self._read_parts() if segment.layout.total]
        return None if None in part_lists else [part for parts in part_lists for part in parts or ()]

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        filled = [(p, segment) for p, segment in enumerate(self._read_parts()) if segment.layout.total]
        if hidden is None:
            return merge([segment.attend(queries, logits) for _, segment in filled])
        second = self.in_second
        return merge([segment.attend(queries, logits, hidden[second == bool(p)]) for p, segment in filled])

    def attend_rows(
        self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor, streams: Tensor | None = None
    ) -> Partial:
        second, ranks = self._places()
        live = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        rows = rows.long().masked_fill(~live, 0)
        partials = []
        for p, segment in enumerate(self._read_parts()):
            in_part = live & (second[rows] == bool(p))
            order = in_part.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            part_rows = ranks[rows].masked_fill(~in_part, 0).gather(1, order)
            if segment.layout.total:
                partials.append(segment.attend_rows(queries, logits, part_rows, in_part.sum(dim=1), streams))
        return merge(partials)

    def mass(self, queries: Tensor, logits: Logits, lse: Tensor) -> Tensor:
        received = torch.zeros(self.layout.total, device=queries.device)
        second = self.in_second
        for p, segment in enumerate(self._read_parts()):
            received[second == bool(p)] = segment.mass(queries, logits, lse)
        return received

    def _choices(self, choice: RowChoice) -> dict[str, RowChoice]:
        second, ranks = self._places()
        is_second, part_rows = second[choice.rows], ranks[choice.rows]
        stream = choice.layout.streams_of(torch.arange(choice.layout.total, device=is_second.device))
        chosen = {}
        for name, in_part in (("one", ~is_second), ("other", is_second)):
            layout = Layout(torch.bincount(stream[in_part], minlength=choice.layout.streams).tolist())
            chosen[name] = RowChoice(part_rows[in_part], layout, layout)
        return chosen


def divided(pairs: DenseSegment, second: Tensor) -> tuple[DenseSegment, DenseSegment]:
    """Return the pairs that `second`, bool [total], does not mark, and those that it marks, both without slots."""
    halves = []
    for marked in (~second, second):
        rows = marked.nonzero().flatten().to(pairs.device)
        lengths = torch.bincount(pairs.layout.streams_of(rows), minlength=pairs.layout.streams)
        halves.append(DenseSegment(pairs.keys[rows], pairs.values[rows], Layout(lengths.tolist())))
    return halves[0], halves[1]


def plain_segments(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield all segments of one format, of mixed segments their parts."""
    for segment in segments:
        if isinstance(segment, MixedSegment):
            yield from plain_segments(segment.parts)
        else:
            yield segment


def by_format(segments: Sequence[Segment]) -> Segment:
    """Join `segments` in order to one segment, in which all pairs of one format lie in one part."""
    if len(segments) == 1:
        return segments[0]
    kinds: list[list[Segment]] = []
    numbers = [torch.zeros(segment.layout.total, dtype=torch.int64, device=segment.device) for segment in segments]
    for segment, number in zip(segments, numbers, strict=True):
        for rows, part_of_kind in _plain_parts(segment):
            plain = copy.copy(part_of_kind)
            plain.key_offset = None  # the joined segment has one for all pairs
            n = next((n for n, kind in enumerate(kinds) if kind[0].joinable(plain)), len(kinds))
            if n == len(kinds):
                kinds.append([])
            kinds[n].append(plain)
            number[rows] = n
    layouts = [segment.layout for segment in segments]
    order, layout = interleave(layouts)
    order = order.to(numbers[0].device)
    joined = _mixed([_without_slots(kind) for kind in kinds], torch.cat(numbers)[order], layout)
    for name in set().union(*(segment.side for segment in segments)):
        joined.side[name] = torch.cat([segment.side_array(name) for segment in segments])[order]
    joined._set_slots(torch.cat([segment.slots() for segment in segments])[order])
    joined.key_offset = common_offset([(segment, segment.key_offset) for segment in segments], order)
    joined.put(segments[0].tier)
    return joined


def _plain_parts(segment: Segment) -> Iterator[tuple[Tensor, Segment]]:
    """Yield the parts of a segment that are not mixed, each with the rows of its pairs."""
    if not segment.layout.total:
        return
    if not isinstance(segment, MixedSegment):
        yield torch.arange(segment.layout.total, device=segment.device), segment
        return
    for in_part, inner in segment._halves():
        rows = in_part.nonzero().flatten()
        yield from ((rows[within], plain) for within, plain in _plain_parts(inner))


def _without_slots(kind: Sequence[Segment]) -> Segment:
    """Join segments of one format, without slots, which the mixed segment stores."""
    joined = copy.copy(kind[0]) if len(kind) == 1 else Segment.join(kind)
    joined.side, joined.first, joined._held_slots = {}, (0,) * joined.layout.streams, None
    return joined


def _mixed(parts: Sequence[Segment], number: Tensor, layout: Layout) -> Segment:
    """Return the segment of all parts; `number [total]` is the part of each pair."""
    if len(parts) == 1:
        return parts[0]
    second = number > 0
    second_layout = Layout(
        torch.bincount(layout.streams_of(second.nonzero().flatten()), minlength=layout.streams).tolist()
    )
    return MixedSegment(parts[0], _mixed(parts[1:], number[second] - 1, second_layout), Flags.of(second), layout)


def places(device: torch.device) -> Tensor:
    """Return the indices of the bits of a byte, uint8 [8]."""
    return torch.arange(8, dtype=torch.uint8, device=device)
