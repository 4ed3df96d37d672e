# SPDX-License-Identifier: Apache-2.0
"""Shared prefix: sealed pairs that several rows of a batch share, stored once and read once for all of them.

Attention over a set of pairs can be computed in parts (`kvpress.cache.attention`), and sealed pairs are never written to. So
rows with the same prefix, such as beams, samples of one prompt or questions about one text, need no copies of it: the queries
of all rows read the prefix together, and each row merges the result with attention over its remaining pairs.

Paper: Juravsky et al., Hydragen, 2024, arXiv:2402.05099.
Differs from the paper: pairs may be encoded, evicted per head, weighted and selected; a single level of sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial
from kvpress.cache.layout import Layout, row_numbers
from kvpress.cache.segment import OfStreams, Segment
from kvpress.cache.storage import Held, derived, part

LEAST = 64
"""Minimum mean number of pairs per stream for sharing.

Shorter segments are copied, so that later ones can be joined to them; shared segments are never joined."""


@dataclass(eq=False, repr=False)
class CommonSegment(Segment):
    """Pairs of another segment, whose streams may be shared by several streams of this one."""

    base: Annotated[Segment, part()]
    """Segment that stores the pairs."""
    origin: tuple[int, ...]
    """Stream of `base` for every stream; each stream of `base` occurs."""
    layout: OfStreams
    """Layout of the streams, as if pairs were copied."""
    _held_moves: Annotated[Tensor | None, derived("indexes")] = field(default=None, init=False)
    _held_places: Annotated[tuple[Tensor, Tensor] | None, derived("indexes")] = field(default=None, init=False)

    @classmethod
    def of(cls, segment: Segment, streams: Sequence[int]) -> Segment:
        """Return some streams of a segment, in this order; repeated streams share their pairs.

        Pairs are copied where streams are left out, so that their memory is freed; where streams are short; and where per-pair
        arrays differ from row to row.
        """
        segment = segment.own() if segment.side else segment
        base, origin = (segment.base, segment.origin) if isinstance(segment, cls) else (segment, None)
        chosen = list(streams) if origin is None else [origin[n] for n in streams]
        if chosen == list(range(base.layout.streams)):
            return base
        used = sorted(set(chosen))
        if (
            base.side
            or base.layout.total < LEAST * base.layout.streams
            or len(used) == len(chosen) < base.layout.streams
        ):
            return base.take(*base.layout.take_streams(chosen))
        if len(used) < base.layout.streams:
            base = base.take(*base.layout.take_streams(used))
        base_stream_of = {n: index for index, n in enumerate(used)}
        layout, base_streams = base.layout, tuple(base_stream_of[n] for n in chosen)
        return cls(
            base,
            base_streams,
            Layout(layout.lengths[n] for n in base_streams),
            first=tuple(base.first[n] for n in base_streams),
        )

    def check(self, total: int, streams: int) -> None:
        super().check(total, streams)
        lengths = self.base.layout.lengths
        is_valid = all(type(origin) is int and 0 <= origin < len(lengths) for origin in self.origin)
        if not is_valid or tuple(lengths[origin] for origin in self.origin) != self.layout.lengths:
            raise ValueError("streams of a CommonSegment do not match the segment that they share")

    def _lengths_of(self, name: str, total: int, streams: int) -> tuple[int, int]:
        del name, total, streams
        return self.base.layout.total, self.base.layout.streams

    def own(self) -> Segment:
        unshared: Segment = self.take(torch.arange(self.layout.total), self.layout)
        return unshared

    def away(self) -> float:
        return self.base.away()

    def known(self) -> Segment:
        layout = Layout(min(1, length) for length in self.layout.lengths)
        rows = self.layout.starts_tensor[self.layout.lengths_tensor > 0]
        first_pairs: Segment = self.take(rows, layout)
        return first_pairs

    # -- rows ------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _moves(self) -> Tensor:
        """Return the row of `base` minus the row here, for each stream, int64 [N]; computed once."""
        if self._held_moves is None:
            starts = self.base.layout.starts_tensor[list(self.origin)]
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
        return selected

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
        return self.base.slots()[self._rows(torch.arange(self.layout.total))]

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
            streams[origin].append(n)
        width = max(map(len, streams))
        streams_of_base = torch.tensor([sharing + sharing[:1] * (width - len(sharing)) for sharing in streams])
        index = torch.tensor([origin * width + streams[origin].index(n) for n, origin in enumerate(self.origin)])
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
        return out[index], lse[index]

    def serves(self, queries: Tensor, logits: Logits) -> bool:
        return self.base.serves(queries, logits)

    def attend_rows(
        self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor, streams: Tensor | None = None
    ) -> Partial:
        if streams is None:
            streams = torch.arange(len(rows), device=rows.device) % self.layout.streams
        origin = torch.tensor(self.origin, device=rows.device)[streams]
        return self.base.attend_rows(queries, logits, self._rows(rows), counts, origin)

    def mass(self, queries: Tensor, logits: Logits, lse: Tensor) -> Tensor:
        return self.own().mass(queries, logits, lse)
