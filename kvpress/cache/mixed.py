# SPDX-License-Identifier: Apache-2.0
"""Pairs in two storage formats that take turns along a stream, such as salient pairs in more bits than the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial, merge
from kvpress.cache.layout import Layout, interleave
from kvpress.cache.segment import OfStreams, Segment
from kvpress.cache.storage import Axis, Choice, own, part


@dataclass(eq=False)
class Flags(Axis):
    """One bit per pair: `bits` uint8 [ceil(total / 8)]."""

    bits: Annotated[Tensor, own("indexes")]
    total: Annotated[int, own()]

    @classmethod
    def of(cls, flags: Tensor) -> Flags:
        """Store bools [total]."""
        bits = torch.nn.functional.pad(flags, (0, -len(flags) % 8)).view(-1, 8).to(torch.uint8) << places(flags.device)
        return cls(bits.sum(dim=1, dtype=torch.uint8), len(flags))

    def read(self) -> Tensor:
        """Return bools [total]."""
        return ((self.bits[:, None] >> places(self.bits.device)) & 1).flatten()[: self.total].bool()

    def take(self, rows: Tensor) -> tuple[Flags, Tensor]:
        return Flags.of(self.read()[rows]), rows

    def entries(self, total: int) -> int:
        if self.total != total or self.bits.shape != (-(-total // 8),):
            raise ValueError(f"flags are of another number of pairs than {total}")
        return total

    def join(self, others: Sequence[Flags], totals: Sequence[int], device: torch.device) -> Flags:
        return Flags.of(torch.cat([other.read() for other in others]))


@dataclass(eq=False, repr=False)
class MixedSegment(Segment):
    """Two segments with the same streams; one bit per pair says which of them holds it.

    Attention does not depend on the order of pairs, so it reads the two parts one after the other and merges; order only
    matters where rows are named: reading, eviction, selection. The parts know the weights of their pairs, but no slots and no
    offset.
    """

    one: Annotated[Segment, part()]
    other: Annotated[Segment, part()]
    flags: Annotated[Flags, part()]
    layout: OfStreams

    @property
    def parts(self) -> tuple[Segment, Segment]:
        """Both segments."""
        return self.one, self.other

    @property
    def in_second(self) -> Tensor:
        """Whether the second part holds each pair, bool [total]."""
        return self.flags.read()

    def check(self, total: int, streams: int) -> None:
        super().check(total, streams)
        second = int(self.in_second.sum())
        if (self.one.layout.total, self.other.layout.total) != (total - second, second):
            raise ValueError(f"{total} pairs of a MixedSegment are not as many as its parts hold")

    def _lengths_of(self, name: str, total: int, streams: int) -> tuple[int, int]:
        return getattr(self, name).layout.total, streams

    def _halves(self) -> list[tuple[Tensor, Segment]]:
        """Which pairs each part holds, bool [total]."""
        second = self.in_second
        return [(~second, self.one), (second, self.other)]

    def _read_parts(self) -> tuple[Segment, Segment]:
        """Return both segments as attention reads them: with the offset of their keys, where there is one."""
        if self.key_offset is None:
            return self.parts
        rows = self.in_second.to(torch.uint8).argsort(stable=True)
        mine = rows.split([self.one.layout.total, self.other.layout.total])
        twins = [copy.copy(held) for held in self.parts]
        for twin, own_rows in zip(twins, mine, strict=True):
            twin.key_offset = self.key_offset.of_part(self, own_rows)
        return twins[0], twins[1]

    @property
    def log_weight(self) -> Tensor | None:
        kinds = [part.log_weight.dtype for part in (self.one, self.other) if part.log_weight is not None]
        if not kinds:
            return None
        joined = torch.zeros(self.layout.total, device=self.device, dtype=max(kinds, key=lambda kind: kind.itemsize))
        for mine, held in self._halves():
            if held.log_weight is not None:
                joined[mine] = held.log_weight.to(joined)
        return joined

    @log_weight.setter
    def log_weight(self, log_weight: Tensor | None) -> None:
        if log_weight is None:
            self.one.log_weight = self.other.log_weight = None
            return
        for mine, held in self._halves():
            held.log_weight = log_weight[mine]

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        second, ranks = self._places()
        here, at = second[rows], ranks[rows]
        read = [held.read(at[here == bool(p)]) for p, held in enumerate(self.parts)]
        keys, values = (found.new_empty(len(here), found.shape[1]) for found in read[0])
        for p, (part_keys, part_values) in enumerate(read):
            keys[here == bool(p)], values[here == bool(p)] = part_keys, part_values
        return keys, values

    def _places(self) -> tuple[Tensor, Tensor]:
        """For every row, whether the second part holds it, and its row there."""
        second = self.in_second
        return second, torch.where(second, second.cumsum(0), (~second).cumsum(0)) - 1

    def as_parts(self, queries: Tensor, logits: Logits) -> list[kernels.Part] | None:
        found = [held.as_parts(queries, logits) for held in self._read_parts() if held.layout.total]
        return None if None in found else [part for parts in found for part in parts or ()]

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        filled = [(p, held) for p, held in enumerate(self._read_parts()) if held.layout.total]
        if hidden is None:
            return merge([held.attend(queries, logits) for _, held in filled])
        second = self.in_second
        return merge([held.attend(queries, logits, hidden[second == bool(p)]) for p, held in filled])

    def attend_rows(
        self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor, streams: Tensor | None = None
    ) -> Partial:
        second, ranks = self._places()
        live = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        rows = rows.long().masked_fill(~live, 0)
        found = []
        for p, held in enumerate(self._read_parts()):
            here = live & (second[rows] == bool(p))
            order = here.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            mine = ranks[rows].masked_fill(~here, 0).gather(1, order)
            if held.layout.total:
                found.append(held.attend_rows(queries, logits, mine, here.sum(dim=1), streams))
        return merge(found)

    def mass(self, queries: Tensor, logits: Logits, lse: Tensor) -> Tensor:
        received = torch.zeros(self.layout.total, device=queries.device)
        second = self.in_second
        for p, held in enumerate(self._read_parts()):
            received[second == bool(p)] = held.mass(queries, logits, lse)
        return received

    def _choices(self, choice: Choice) -> dict[str, Choice]:
        second, ranks = self._places()
        here, at = second[choice.rows], ranks[choice.rows]
        stream = choice.layout.streams_of(torch.arange(choice.layout.total, device=here.device))
        chosen = {}
        for name, mine in (("one", ~here), ("other", here)):
            layout = Layout(torch.bincount(stream[mine], minlength=choice.layout.streams).tolist())
            chosen[name] = Choice(at[mine], layout, layout)
        return chosen


def by_format(segments: Sequence[Segment]) -> Segment:
    """Return one segment of the pairs of all `segments` in order: pairs of one format lie in one part, whatever mixed them."""
    if len(segments) == 1:
        return segments[0]
    kinds: list[list[Segment]] = []
    numbers = [torch.zeros(segment.layout.total, dtype=torch.int64, device=segment.device) for segment in segments]
    for segment, number in zip(segments, numbers, strict=True):
        for rows, plain in _plain_parts(segment):
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
    joined.put(segments[0].tier)
    return joined


def _plain_parts(segment: Segment) -> Iterator[tuple[Tensor, Segment]]:
    """Yield the parts of a segment that are not mixed, each with the rows of its pairs."""
    if not segment.layout.total:
        return
    if not isinstance(segment, MixedSegment):
        yield torch.arange(segment.layout.total, device=segment.device), segment
        return
    for mine, held in segment._halves():
        rows = mine.nonzero().flatten()
        yield from ((rows[within], plain) for within, plain in _plain_parts(held))


def _without_slots(kind: Sequence[Segment]) -> Segment:
    """Return the segment of all pairs of one format, whose slots the mixed segment around it holds."""
    joined = copy.copy(kind[0]) if len(kind) == 1 else Segment.join(kind)
    joined.side, joined.first, joined._held_slots = {}, (0,) * joined.layout.streams, None
    return joined


def _mixed(parts: Sequence[Segment], number: Tensor, layout: Layout) -> Segment:
    """Return the segment of all parts, given the `number [total]` of the part that each pair lies in."""
    if len(parts) == 1:
        return parts[0]
    second = number > 0
    rest = Layout(torch.bincount(layout.streams_of(second.nonzero().flatten()), minlength=layout.streams).tolist())
    return MixedSegment(parts[0], _mixed(parts[1:], number[second] - 1, rest), Flags.of(second), layout)


def places(device: torch.device) -> Tensor:
    """The places of the bits of a byte, uint8 [8]."""
    return torch.arange(8, dtype=torch.uint8, device=device)
