# SPDX-License-Identifier: Apache-2.0
"""Pairs that a selector chose for the new tokens of a pass, and attention to them.

With N streams, Q new tokens and G query heads per KV head, pairs are selected for each token and stream: *query stream*
`t * N + n` is token t at stream n. Data per stream, `[N, ...]`, are repeated for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.cache import attention
from kvpress.cache.attention import Logits, Partial
from kvpress.cache.segment import Segment


@dataclass(frozen=True)
class Chosen:
    """Selected pairs of one segment: query stream i reads the first `counts[i]` of `rows[i]`."""

    rows: Tensor
    """Flat rows `[Q * N, K]`, ascending, int32 or int64."""
    counts: Tensor
    """Number of rows `[Q * N]`, int64."""

    @property
    def is_filled(self) -> Tensor:
        """Entries of `rows` that are chosen pairs, bool `[Q * N, K]`."""
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.counts[:, None]

    def of_tokens(self, streams: slice) -> Chosen:
        """Return the selection of some query streams."""
        return Chosen(self.rows[streams], self.counts[streams])


Selection = list[list[Chosen]] | None
"""Selected pairs for each set of query heads of a GQA group, one entry per segment; None for all pairs."""


def by_token(rows: Tensor, tokens: int) -> Tensor:
    """View query rows `[N, G * Q, ...]` as `[Q, N, G, ...]`, token by token."""
    return rows[None] if tokens == 1 else rows.unflatten(1, (-1, tokens)).movedim(2, 0)


def by_stream(rows: Sequence[Tensor], streams: int) -> Tensor:
    """Rearrange results of blocks of tokens, `[q * N, G, ...]` each, to `[N, G * Q, ...]`."""
    blocks = [part.unflatten(0, (-1, streams)) for part in rows]
    return torch.cat(blocks).movedim(0, 2).flatten(1, 2)


def for_tokens(per_stream: Tensor, tokens: int) -> Tensor:
    """Repeat data per stream, `[N, ...]`, for every token: `[Q * N, ...]`."""
    return per_stream if tokens == 1 else per_stream.repeat(tokens, *[1] * (per_stream.dim() - 1))


def joined(blocks: Sequence[Selection]) -> Selection:
    """Join the selections of successive blocks of tokens; all have the same sets of heads and the same segments."""
    first = blocks[0]
    if first is None or len(blocks) == 1:
        return first
    selections = [block for block in blocks if block is not None]
    return [[_as_one(parts) for parts in zip(*heads, strict=True)] for heads in zip(*selections, strict=True)]


def _as_one(parts: Sequence[Chosen]) -> Chosen:
    width = max(part.rows.shape[1] for part in parts)
    rows = [pad(part.rows, (0, width - part.rows.shape[1])) for part in parts]
    return Chosen(torch.cat(rows), torch.cat([part.counts for part in parts]))


def attend_chosen(segment: Segment, queries: Tensor, logits: Logits, chosen: Chosen) -> Partial:
    """Attend from the `queries [Q * N, G, D]` of Q tokens to the pairs of a segment that each of them reads."""
    streams = segment.layout.streams
    if len(queries) == streams or len(queries) <= (step := streams * _tokens_at_once(segment, queries, logits, chosen)):
        return segment.attend_rows(queries, logits, chosen.rows, chosen.counts)
    parts = [
        segment.attend_rows(queries[i : i + step], logits, chosen.rows[i : i + step], chosen.counts[i : i + step])
        for i in range(0, len(queries), step)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def fetched_bytes(segments: Sequence[Segment], selection: Selection) -> int:
    """Return bytes of pairs that a selection reads from segments in host memory or in files."""
    total = 0.0
    for i, segment in enumerate(segments):
        if size := segment.away():
            parts = None if selection is None else [heads[i] for heads in selection]
            total += size * (segment.layout.total if parts is None else sum(_read(part) for part in parts))
    return round(total)


def _read(part: Chosen) -> int:
    # Transfers to a device copy the full width, so that counts on the device need no synchronisation.
    return int(part.counts.sum()) if part.counts.device.type == "cpu" else part.rows.numel()


def _tokens_at_once(segment: Segment, queries: Tensor, logits: Logits, chosen: Chosen) -> int:
    """Return the number of tokens per call of `attend_rows`: all if an operator reads rows in place, else as many as fit."""
    streams, dim = segment.layout.streams, queries.shape[2]
    if segment.serves(queries, logits):
        return len(queries) // streams
    gathered = streams * chosen.rows.shape[1] * (dim + segment.value_dim) * queries.element_size()
    return max(1, attention.BLOCK_BYTES // max(1, gathered))
