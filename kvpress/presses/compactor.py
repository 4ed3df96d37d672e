# SPDX-License-Identifier: Apache-2.0
"""Sum of key leverage and attention within chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.core.checks import Count, NotNegative, Positive, Size
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.core.scoring import ByScore
from kvpress.observe.observer import Wanted
from kvpress.observe.rotations import ROTATIONS
from kvpress.observe.view import View
from kvpress.presses.leverage_score import leverage
from kvpress.presses.non_causal_attn import ChunkMass, chunk_attention


@register(
    "compactor",
    "evict",
    "Chari & Van Durme, 2025, arXiv:2507.08143",
    example="compactor:0.5",
    cases=("compactor:0.5,sink_size_start=2,sink_size_end=2,chunk_size=8",),
)
@dataclass
class CompactorPress(ScorerPress):
    """Score a pair by its key's leverage and by the attention it receives within its chunk.

        score = blending * z(leverage) + z(chunk attention),   z(x) = (x - mean) / std over the pairs of a row

    The terms are those of `LeverageScorePress`, with its `sketch_dimension`, and `NonCausalAttnPress`, with its `chunk_size`
    and `scale`. `blending` defaults to the ratio of tokens removed, so leverage counts more at high compression. The first
    `sink_size_start` and last `sink_size_end` tokens are always kept. Both terms are computed over the tokens between them, and
    the first chunk begins after the first ones.

    Paper: Chari & Van Durme, Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores,
    2025, arXiv:2507.08143.
    Differs from the paper: the ratio is a setting, not calibrated per context; pairs of earlier turns get the average of the
    attention term; the queries of the last tokens count in the attention of their chunk.
    """

    sink_size_start: Size = 8
    sink_size_end: Size = 4
    chunk_size: Count = 256
    sketch_dimension: Count = 48
    blending: NotNegative | None = None
    scale: Positive | None = field(default=None, kw_only=True)

    @property
    def protected(self) -> int:
        return self.sink_size_start + self.sink_size_end

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(ChunkMass, self.chunk_size, self.scale, self.sink_size_start), ROTATIONS)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`, infinite at both ends."""
        return self.blend(view, weigh_values=True)

    def without_values(self) -> ByScore:
        return PlainCompactor(self)

    def blend(self, view: View, weigh_values: bool) -> Tensor:
        """Return the sum of both terms, the attention with or without the norm of the values."""
        sinks, newest = view.positions < self.sink_size_start, view.positions >= view.seen - self.sink_size_end
        # Heads may differ in the tokens they store at both ends after an eviction, so only columns common to a row are cut off.
        ends = torch.stack([end.sum(dim=2).amin(dim=1) for end in (sinks, newest)], dim=1).tolist()
        members: dict[tuple[int, ...], list[int]] = {}
        for row, counts in enumerate(ends):
            members.setdefault(tuple(counts), []).append(row)
        scores = torch.full(view.shape, torch.inf, device=view.positions.device)
        for (start, end), rows in members.items():
            if start < view.length - end:
                part = view if len(members) == 1 else view.some_rows(rows)
                scores[rows] = self._blend(part, weigh_values, start, view.length - end)
        return scores.masked_fill(sinks | newest, torch.inf)

    def _blend(self, view: View, weigh_values: bool, start: int, stop: int) -> Tensor:
        """Return the sum of both terms over the columns start .. stop - 1, infinite elsewhere."""
        weight = 1 - view.target / view.seen if self.blending is None else self.blending
        between = view.pairs(torch.arange(start, stop, device=view.positions.device).expand(*view.shape[:2], -1))
        scores = weight * standardised(between, leverage(between, self.sketch_dimension))
        scores += standardised(between, chunk_attention(between, self.wants[0], weigh_values=weigh_values))
        return pad(scores, (start, view.length - stop), value=torch.inf)


@dataclass(frozen=True)
class PlainCompactor(ByScore):
    """Scorer with the scores of `press`, without the norm of the values."""

    press: CompactorPress

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return self.press.wants

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`, infinite at both ends."""
        return self.press.blend(view, weigh_values=False)


def standardised(view: View, scores: Tensor) -> Tensor:
    """Return `scores [b, h, n]` of a view less the mean of each row, divided by the standard deviation of the row."""
    centred = scores - view.mean_of_heads(scores.mean(dim=2, keepdim=True))
    square = view.mean_of_heads(centred.square().mean(dim=2, keepdim=True))
    return centred / square.sqrt().clamp_min(torch.finfo(scores.dtype).tiny)
