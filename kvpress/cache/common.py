# SPDX-License-Identifier: Apache-2.0
"""Shared prefix: sealed pairs that several rows of a batch share, stored once and read once for all of them.

Attention over a set of pairs can be computed in parts (`kvpress.cache.attention`), and sealed pairs are never written to. So
rows with the same prefix, such as beams, samples of one prompt or questions about one text, need no copies of it: the queries
of all rows read the prefix together, and each row merges the result with attention over its remaining pairs.

Paper: Juravsky et al., Hydragen, 2024, arXiv:2402.05099.
Differs from the paper: pairs may be encoded, evicted per head, weighted and selected; a single level of sharing.

The same class places the pairs of one row among the streams of a batch without copying them (`kvpress.cache.join`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial
from kvpress.cache.layout import Layout, row_numbers
from kvpress.cache.segment import OfStreams, Segment, moved_slots
from kvpress.cache.storage import Held, RowChoice, derived, part

LEAST = 64
"""Minimum mean number of pairs per stream for sharing.

Shorter segments are copied, so that later ones can be joined to them; shared segments are never joined."""


@dataclass(eq=False, repr=False)
class CommonSegment(Segment):
    """Pairs of another segment, whose streams may be shared by several streams of this one."""

    base: Annotated[Segment, part()]
    """Segment that stores the pairs."""
    origin: tuple[int, ...]
    """Stream of `base` for every stream, -1 for a stream without pairs; each stream of `base` occurs."""
    layout: OfStreams
    """Layout of the streams, as if pairs were copied; their slots may begin at other slots than in `base`."""
    _held_moves: Annotated[Tensor | None, derived("indexes")] = field(default=None, init=False)
    _held_places: Annotated[tuple[Tensor, Tensor] | None, derived("indexes")] = field(default=None, init=False)

    @classmethod
    def of(cls, segment: Segment, streams: Sequence[int]) -> Segment:
        """Return some streams of a segment, in this order; repeated streams share their pairs.

        Pairs are copied where streams are left out, so that their memory is freed; where streams are short; and where per-pair
        arrays differ from row to row.
        """
        segment = segment.own() if segment.side else segment
        base, origin = cls.parts_of(segment)
        return cls.arranged(base, [origin[n] for n in streams], [segment.first[n] for n in streams])

    @classmethod
    def parts_of(cls, segment: Segment) -> tuple[Segment, Sequence[int]]:
        """Return the segment that stores the pairs of `segment`, and the stream of it for every stream; -1 for none."""
        if isinstance(segment, cls):
            return segment.base, segment.origin
        return segment, range(segment.layout.streams)

    @classmethod
    def arranged(cls, base: Segment, origin: Sequence[int], first: Sequence[int]) -> Segment:
        """Return a segment whose stream n has the pairs of stream `origin[n]` of `base`, or none where that is -1.

        The slots of stream n are moved so that they begin at `first[n]`. Pairs are shared or copied as `of` describes.
        """
        layout = base.layout.of_streams(origin)
        moves = [
            slot - base.first[n] if n >= 0 and base.layout.lengths[n] else 0
            for n, slot in zip(origin, first, strict=True)
        ]
        if list(origin) == list(range(base.layout.streams)) and not any(moves):
            return base
        present = [n for n in origin if n >= 0]
        used = sorted(set(present))
        if (
            base.side
            or base.layout.total < LEAST * base.layout.streams
            or len(used) == len(present) < base.layout.streams
        ):
            return base.take_streams(origin).moved_by(moves)
        if len(used) < base.layout.streams:
            base = base.take_streams(used)
        base_stream_of = {n: index for index, n in enumerate(used)}
        base_streams = tuple(base_stream_of.get(n, -1) for n in origin)
        starts = tuple(base.first[n] + move if n >= 0 else 0 for n, move in zip(base_streams, moves, strict=True))
        return cls(base, base_streams, layout, first=starts)

    def check(self, total: int, streams: int) -> None:
        super().check(total, streams)
        lengths = self.base.layout.lengths
        is_valid = all(type(origin) is int and -1 <= origin < len(lengths) for origin in self.origin)
        if (
            not is_valid
            or set(self.origin) - {-1} != set(range(len(lengths)))
            or tuple(lengths[origin] if origin >= 0 else 0 for origin in self.origin) != self.layout.lengths
        ):
            raise ValueError("streams of a CommonSegment do not match the segment that they share")

    def _lengths_of(self, name: str, total: int, streams: int) -> tuple[int, int]:
        del name, total, streams
        return self.base.layout.total, self.base.layout.streams

    def own(self) -> Segment:
        unshared: Segment = self.take(torch.arange(self.layout.total), self.layout)
        return unshared

    def moved_by(self, moves: Sequence[int]) -> CommonSegment:
        moved = self._twin()
        moved.first = tuple(first + move for first, move in zip(self.first, moves, strict=True))
        return moved

    def away(self) -> float:
        return self.base.away()

    def known(self) -> Segment:
        layout = Layout(min(1, length) for length in self.layout.lengths)
        rows = self.layout.starts_tensor[self.layout.lengths_tensor > 0]
        first_pairs: Segment = self.take(rows, layout)
        return first_pairs

    # -- rows ------------------------------------------------------------------------------------------------

    @property
    def _origin_index(self) -> Tensor:
        """Stream of `base` for every stream, int64 [N]; any stream where there are no pairs."""
        return torch.tensor(self.origin).clamp_min(0)

    def _slot_moves(self) -> Tensor:
        """Return the slot of a pair here minus its slot in `base`, for each stream, int64 [N] on the host."""
        base_first = torch.tensor(self.base.first)[self._origin_index]
        return torch.where(self.layout.lengths_tensor > 0, torch.tensor(self.first) - base_first, 0)

    @torch.inference_mode(False)
    def _moves(self) -> Tensor:
        """Return the row of `base` minus the row here, for each stream, int64 [N]; computed once."""
        if self._held_moves is None:
            starts = self.base.layout.starts_tensor[self._origin_index]
            self._held_moves = (starts - self.layout.starts_tensor).to(self.device)
        return self._held_moves

    def located(self, rows: Tensor) -> tuple[Segment, Tensor]:
        rows = rows.to(self.device).long()
        return self.base, rows + self._moves()[self.layout.streams_of(rows)]

    def _rows(self, rows: Tensor) -> Tensor:
        return self.located(rows)[1]

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.base.read(self._rows(row_numbers(rows, self.layout.total, self.device)))

    def take(self, rows: Tensor, layout: Layout) -> Any:
        selected = self.base.take(self._rows(rows).cpu(), layout)
        selected.side |= {name: array[rows.to(array.device)] for name, array in self.side.items()}
        streams = RowChoice(rows.cpu(), layout, self.layout).streams
        return selected.moved_by(self._slot_moves()[streams].tolist())

    def joins(self, other: Held, streams: Sequence[int]) -> bool:
        del other, streams
        return False

    @property
    def log_weight(self) -> Tensor | None:
        weight = self.base.log_weight
        return None if weight is None else weight[self._rows(torch.arange(self.layout.total))]

    @log_weight.setter
    def log_weight(self, log_weight: Tensor | None) -> None:
        raise TypeError("rows share these pairs; set the log-weights of own()")

    @property
    def contiguous(self) -> bool:
        return self.base.contiguous

    @property
    def positions(self) -> Tensor | None:
        return None if self.base.contiguous else self.slots()

    def slots(self) -> Tensor:
        return moved_slots(
            self.base.slots()[self._rows(torch.arange(self.layout.total))], self.layout, self._slot_moves()
        )

    # -- attention -------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the streams of each stream of `base`, int64 [P, width], and the index of each stream among these, [N].

        Shorter rows are filled with their first stream.
        """
        if self._held_places is not None:
            return self._held_places
        streams: list[list[int]] = [[] for _ in range(self.base.layout.streams)]
        for n, origin in enumerate(self.origin):
            if origin >= 0:
                streams[origin].append(n)
        width = max(map(len, streams))
        streams_of_base = torch.tensor([sharing + sharing[:1] * (width - len(sharing)) for sharing in streams])
        index = torch.tensor(
            [origin * width + streams[origin].index(n) if origin >= 0 else 0 for n, origin in enumerate(self.origin)]
        )
        self._held_places = streams_of_base.to(self.device), index.to(self.device)
        return self._held_places

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        if hidden is not None:
            return self.own().attend(queries, logits, hidden)
        streams_of_base, index = self._places()
        rows = queries.shape[1]
        step = max(1, kernels.MOST_QUERIES // rows)
        parts = [
            self.base.attend(queries[columns].flatten(1, 2), logits) for columns in streams_of_base.split(step, dim=1)
        ]
        out = torch.cat([part.unflatten(1, (-1, rows)) for part, _ in parts], dim=1).flatten(0, 1)
        lse = torch.cat([part.unflatten(1, (-1, rows)) for _, part in parts], dim=1).flatten(0, 1)
        if -1 not in self.origin:
            return out[index], lse[index]
        is_empty = torch.tensor(self.origin, device=out.device) < 0
        return out[index].masked_fill_(is_empty[:, None, None], 0), lse[index].masked_fill_(
            is_empty[:, None], -torch.inf
        )

    def as_parts(self, queries: Tensor, logits: Logits) -> list[kernels.Part] | None:
        if not self._is_unshared:
            return None  # `attend` reads the pairs once for all rows that share them
        parts = self.base.as_parts(queries, logits)
        if parts is None or len(parts) != 1 or not isinstance(parts[0].where, kernels.Ranges):
            return None
        kept = self._kept()
        if kept.get("base part") is not parts[0]:
            kept["base part"], kept["part"] = parts[0], replace(parts[0], where=self._base_ranges(queries.device))
        return [kept["part"]]

    @property
    def _is_unshared(self) -> bool:
        """Whether no two streams share pairs."""
        return len(self.origin) - self.origin.count(-1) == self.base.layout.streams

    @torch.inference_mode(False)
    def _base_ranges(self, device: torch.device) -> kernels.Ranges:
        """Return the rows of `base` that each stream reads, and the stream of `base` whose scales it uses."""
        index = self._origin_index
        starts, lengths = self.base.layout.starts_tensor[index].to(device), self.layout.lengths_tensor.to(device)
        return kernels.Ranges(starts, lengths, index.to(device), self.base.layout.longest)

    def serves(self, queries: Tensor, logits: Logits) -> bool:
        return self.base.serves(queries, logits)

    def attend_rows(
        self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor, streams: Tensor | None = None
    ) -> Partial:
        if streams is None:
            streams = torch.arange(len(rows), device=rows.device) % self.layout.streams
        origin = self._origin_index.to(rows.device)[streams]
        return self.base.attend_rows(queries, logits, self._rows(rows), counts, origin)

    def mass(self, queries: Tensor, logits: Logits, lse: Tensor) -> Tensor:
        return self.own().mass(queries, logits, lse)
