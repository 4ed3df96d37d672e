"""Pairs in two storage formats that take turns along a stream, such as salient pairs in more bits than the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.attention import Logits, Partial, merge
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment

PLACES = tuple(range(8))


class MixedSegment(Segment):
    """Two segments with the same streams; one bit per pair says which of them holds it.

    Attention does not depend on the order of pairs, so it reads the two parts one after the other and merges; order only
    matters where rows are named: reading, eviction, selection.
    """

    def __init__(self, first: Segment, second: Segment, in_second: Tensor, layout: Layout) -> None:
        super().__init__(layout, None, [0] * layout.streams)
        self.parts = (first, second)
        self.bitmap = _pack(in_second)

    @property
    def in_second(self) -> Tensor:
        """Whether the second part holds each pair, bool [total]."""
        places = torch.tensor(PLACES, dtype=torch.uint8, device=self.bitmap.device)
        return ((self.bitmap[:, None] >> places) & 1).flatten()[: self.layout.total].bool()

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        held, ranks = self._places()
        here, at = held[rows], ranks[rows]
        read = [part.read(at[here == bool(p)]) for p, part in enumerate(self.parts)]
        keys, values = (first.new_empty(len(here), first.shape[1]) for first in read[0])
        for p, (part_keys, part_values) in enumerate(read):
            keys[here == bool(p)], values[here == bool(p)] = part_keys, part_values
        return keys, values

    def _places(self) -> tuple[Tensor, Tensor]:
        """For every row, whether the second part holds it, and its row there."""
        held = self.in_second
        second = held.cumsum(0)
        ranks = torch.where(held, second, torch.arange(1, len(held) + 1, device=held.device) - second) - 1
        return held, ranks

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        held = None if hidden is None else self.in_second
        found = []
        for p, part in enumerate(self.parts):
            if part.layout.total:
                chosen = None if hidden is None or held is None else hidden[held == bool(p)]
                found.append(part.attend(queries, logits, chosen))
        return merge(found)

    def attend_rows(self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor) -> Partial:
        held, ranks = self._places()
        live = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        rows = rows.long().masked_fill(~live, 0)
        found = []
        for p, part in enumerate(self.parts):
            here = live & (held[rows] == bool(p))
            order = here.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            mine = ranks[rows].masked_fill(~here, 0).gather(1, order)
            if part.layout.total:
                found.append(part.attend_rows(queries, logits, mine, here.sum(dim=1)))
        return merge(found)

    def mass(self, queries: Tensor, logits: Logits, lse: Tensor) -> Tensor:
        held = self.in_second
        received = torch.zeros(self.layout.total, device=queries.device)
        for p, part in enumerate(self.parts):
            received[held == bool(p)] = part.mass(queries, logits, lse)
        return received

    def _take(self, rows: Tensor, layout: Layout) -> MixedSegment:
        held, ranks = self._places()
        here, at = held[rows], ranks[rows]
        stream = layout.streams_of(torch.arange(layout.total, device=rows.device))
        taken = []
        for p, part in enumerate(self.parts):
            mine = here == bool(p)
            lengths = torch.bincount(stream[mine], minlength=layout.streams)
            taken.append(part._take(at[mine], Layout(lengths.tolist())))
        return MixedSegment(taken[0], taken[1], here, layout)

    @classmethod
    def _concatenate(cls, segments: Sequence[MixedSegment]) -> MixedSegment:
        first, second = (
            type(column[0])._concatenate(column) for column in zip(*(s.parts for s in segments), strict=True)
        )
        held = torch.cat([segment.in_second for segment in segments])
        return MixedSegment(first, second, held, Layout([len(held)]))

    def joinable(self, other: Segment) -> bool:
        return isinstance(other, MixedSegment) and all(
            mine.joinable(theirs) for mine, theirs in zip(self.parts, other.parts, strict=True)
        )

    def storage(self) -> dict[str, list[Tensor]]:
        held: dict[str, list[Tensor]] = {"indexes": [self.bitmap]}
        for part in self.parts:
            for name, tensors in part.storage().items():
                held.setdefault(name, []).extend(tensors)
        return held

    def _to(self, device: torch.device | str) -> None:
        for part in self.parts:
            part.to(device)
        self.bitmap = self.bitmap.to(device)

    @property
    def value_dim(self) -> int:
        return self.parts[0].value_dim


def _pack(flags: Tensor) -> Tensor:
    """Bools [n] as bits, uint8 [ceil(n / 8)]."""
    flags = torch.nn.functional.pad(flags, (0, -len(flags) % 8)).view(-1, 8)
    places = torch.tensor(PLACES, dtype=torch.uint8, device=flags.device)
    return (flags.to(torch.uint8) << places).sum(dim=1, dtype=torch.uint8)
