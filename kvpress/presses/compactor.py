"""Leverage and attention within chunks, blended."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kvpress.checks import check_count
from kvpress.context import View
from kvpress.presses.base import Observers, ScorerPress, view_of
from kvpress.presses.leverage_score import leverage
from kvpress.presses.non_causal_attn import ChunkMass, chunk_attention
from kvpress.registry import register


@register("compactor", "evict", "Chari & Van Durme, 2025, arXiv:2507.08143")
@dataclass
class CompactorPress(ScorerPress):
    """Score a pair by its key's leverage and by the attention it receives within its chunk.

        score = blending * z(leverage) + z(chunk attention),   z(x) = (x - mean) / std over the pairs of a row

    The terms are those of `LeverageScorePress`, with its `sketch_dimension`, and `NonCausalAttnPress`, with its `chunk_size`.
    `blending` defaults to the fraction of pairs removed: the harder a cache is cut, the more leverage counts. Where only a
    schedule knows that fraction, as in `DecodingPress(CompactorPress())`, it is 1. The first `sink_size_start` and last
    `sink_size_end` tokens are always kept.

    Paper: Chari & Van Durme, Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores,
    2025, arXiv:2507.08143.
    Differs from the paper: the ratio is given, not calibrated per context; pairs of earlier turns count as average in the
    attention term.
    """

    sink_size_start: int = 8
    sink_size_end: int = 4
    chunk_size: int = 256
    sketch_dimension: int = 48
    blending: float | None = None

    def validate(self) -> None:
        super().validate()
        check_count("sink_size_start", self.sink_size_start, least=0)
        check_count("sink_size_end", self.sink_size_end, least=0)
        check_count("chunk_size", self.chunk_size)
        check_count("sketch_dimension", self.sketch_dimension)
        if self.blending is not None and not self.blending >= 0:
            raise ValueError(f"blending must be >= 0 or None, got {self.blending}")

    @property
    def protected(self) -> int:
        return self.sink_size_start + self.sink_size_end

    def observers(self) -> Observers:
        return {**super().observers(), "chunks": partial(ChunkMass, self.chunk_size)}

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict,
    ) -> Tensor:  # fmt: skip
        """Return `[b, h, n]`, infinite at both ends."""
        view = view_of(kwargs)
        scores = self._weight(view) * standardised(leverage(view, self.sketch_dimension))
        scores += standardised(chunk_attention(view))
        ends = (view.positions < self.sink_size_start) | (view.positions >= view.seen - self.sink_size_end)
        return scores.masked_fill(ends, torch.inf)

    def _weight(self, view: View) -> float:
        if self.blending is not None:
            return self.blending
        return 1 - self.kept_of(view.seen) / view.seen if self.compression_ratio or self.budget else 1.0


def standardised(scores: Tensor) -> Tensor:
    """Subtract the mean of each row of `scores [b, h, n]` and divide by its standard deviation."""
    centred = scores - scores.mean(dim=(1, 2), keepdim=True)
    return centred / centred.square().mean(dim=(1, 2), keepdim=True).sqrt().clamp_min(torch.finfo(scores.dtype).tiny)
