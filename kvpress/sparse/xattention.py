# SPDX-License-Identifier: Apache-2.0
"""XAttention: choose tiles by sums of attention along anti-diagonals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.core.checks import Count, Share
from kvpress.core.pattern import PromptTensors
from kvpress.core.registry import register
from kvpress.kernels import Tiles, tile_mass
from kvpress.sparse.tiling import IN_CHUNKS, BlockGrid, EstimatedPress, capped, covering, per_head


@register(
    "xattention",
    "prefill",
    "Xu et al., 2025, arXiv:2503.16428",
    example="xattention:threshold=0.9",
    cases=("xattention:threshold=0.5,stride=4,block=8",),
    exempt=(IN_CHUNKS,),
)
@dataclass
class XAttentionPress(EstimatedPress):
    """Read the tiles whose anti-diagonals add up to a `threshold` of the attention of their block of queries.

    The queries of `stride` neighbouring tokens, in reverse order, are concatenated into one vector, and so are the keys, in
    order. The product of two such vectors is the sum along an anti-diagonal of a stride x stride square:

        A = softmax(q_joined . k_joined * scale / stride)      score[i, j] = sum of A over tile (i, j)

    Tiles of a block of queries are taken by falling score until the threshold is reached; the first block, with the sinks, is
    always taken. `threshold` is the share of the estimated attention of a block of queries that its tiles hold; closer to 1,
    more tiles are read. `stride` must divide `block`. With a threshold of 1 and no `max_density`, everything is read.
    Estimates cost 1 / stride of the products of full attention, and store the logits of a few blocks of queries at a time.

    Paper: Xu et al., XAttention: Block Sparse Attention with Antidiagonal Scoring, 2025, arXiv:2503.16428.
    Differs from the paper: one threshold for all heads, where its code ships one for each head of one model; blocks of 64
    tokens, where its code has 128; estimates ignore a soft cap.
    """

    threshold: Share = 0.9
    stride: Count = 8

    def validate(self) -> None:
        super().validate()
        if self.block % self.stride:
            raise ValueError(f"stride must divide the {self.block} tokens of a block, got {self.stride}")

    def tiles(self, layer: int, prompt: PromptTensors) -> Tiles:
        del layer
        grid = BlockGrid.of(prompt, self.block)
        if self.threshold >= 1 and self.max_density >= 1:
            return Tiles(grid.causal.expand(prompt.shape(self.block)), self.block)
        scores = per_head(prompt, lambda queries, keys: self._scores(queries, keys, prompt))
        chosen = covering(scores, self.threshold) & grid.causal
        # The first block ranks before all others.
        first = torch.where(grid.keys == 0, torch.inf, scores)
        return Tiles(capped(chosen | (grid.keys == 0), first, grid, self.max_density), self.block)

    def _scores(self, queries: Tensor, keys: Tensor, prompt: PromptTensors) -> Tensor:
        """Return the scores of tiles, float32 `[b, G, nq, nk]`, of queries `[b, G, Q, D]` and keys `[b, 1, T, D]`."""
        stride, per = self.stride, self.block // self.stride
        new, total = queries.shape[2], keys.shape[2]
        # Queries and keys are padded to full blocks. No real query sees a padded key, and padded queries are cut off.
        joined_queries = pad(queries, (0, 0, 0, -new % self.block)).unflatten(2, (-1, stride)).flip(3).flatten(3)
        joined_keys = pad(keys, (0, 0, 0, -total % self.block)).unflatten(2, (-1, stride)).flatten(3)
        newest = torch.arange(stride - 1, joined_queries.shape[2] * stride, stride, device=keys.device).clamp_max(
            new - 1
        )
        last = (newest + total - new) // stride
        scale = prompt.logits.scale / stride
        flat_scores = tile_mass(joined_queries.flatten(0, 1), joined_keys.flatten(0, 1), last, (per, per), scale=scale)
        scores: Tensor = flat_scores.unflatten(0, queries.shape[:2])
        return scores
