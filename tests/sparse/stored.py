# SPDX-License-Identifier: Apache-2.0
"""Calls of selectors on stored pairs without a model: two rows, two KV heads, ragged segments with log-weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.attention import Logits
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.observe.shards import UNDIVIDED

DIM, GROUPS, STREAMS = 16, 3, 4
LENGTHS = [[90, 0, 75, 83], [7, 82, 30, 20]]


def call_of(
    lengths: list[list[int]], distinct: int | None = None, softcap: float | None = None, tokens: int = 1, index: int = 0
) -> Any:
    """Return a call of layer `index` on segments of these lengths; with `distinct`, keys repeat so many vectors of a part."""
    generator, segments = torch.Generator().manual_seed(0), []
    halves = torch.randn(2, distinct or 1, DIM // 2, generator=generator)
    for stream_lengths in lengths:
        layout = Layout(stream_lengths)
        keys = torch.randn(layout.total, DIM, generator=generator)
        if distinct is not None:
            chosen = torch.randint(distinct, (2, layout.total), generator=generator)
            keys = torch.cat([halves[0][chosen[0]], halves[1][chosen[1]]], dim=1)
        segments.append(DenseSegment(keys, torch.randn(layout.total, DIM, generator=generator), layout))
        segments[-1].log_weight = torch.randn(layout.total, generator=generator)
    window = SimpleNamespace(keys=torch.empty(2, 2, 0, DIM))
    store = SimpleNamespace(segments=segments, batch=2, heads=2, codec_state={}, window=window, fetched=0)
    return SimpleNamespace(
        store=store,
        logits=Logits(0.3, softcap),
        queries=torch.empty(2, 2 * GROUPS, tokens, DIM),
        tokens=SimpleNamespace(seen_before=300, mask=None),
        layer=SimpleNamespace(index=index, shards=UNDIVIDED),
    )


def chosen_ranks(call: Any, chosen: Any, stream: int, row: int) -> list[int]:
    """Return the ranks over all segments that a query stream reads."""
    ranks, base = [], 0
    for segment, pairs in zip(call.store.segments, chosen, strict=True):
        ranks += (pairs.rows[row, : pairs.counts[row]].long() - segment.layout.offsets[stream] + base).tolist()
        base += segment.layout.lengths[stream]
    return ranks


def pairs_of(call: Any, stream: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values `[n, D]` and the log-weights `[n]` of a stream, float64."""
    spans = [(segment, segment.layout.rows(stream)) for segment in call.store.segments]
    parts = [
        (segment.keys[rows], segment.values[rows], segment.side_array("none")[rows])
        if segment.log_weight is None
        else (segment.keys[rows], segment.values[rows], segment.log_weight[rows])
        for segment, rows in spans
    ]
    keys, values, weights = (torch.cat(part).double() for part in zip(*parts, strict=True))
    return keys, values, weights
