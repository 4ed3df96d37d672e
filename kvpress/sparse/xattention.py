# SPDX-License-Identifier: Apache-2.0
"""XAttention: sums along anti-diagonals tell which tiles carry attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.core.checks import Count, Share
from kvpress.core.pattern import Prompt
from kvpress.core.registry import register
from kvpress.kernels import Tiles, tile_mass
from kvpress.sparse.tiling import IN_CHUNKS, EstimatedPress, Places, capped, covering, per_head


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

    Of each `stride` neighbouring tokens, the queries in reverse order and the keys in order are joined into one vector, whose
    product sums an anti-diagonal of the stride x stride square:

        A = softmax(q_joined . k_joined * scale / stride)      score[i, j] = sum of A over tile (i, j)

    Tiles of a row are taken by falling score until the threshold is reached; the first block, with the sinks, always is
    one of them. `stride` must divide `block`. With a threshold of 1 and no `max_density`, everything is read. Estimates cost
    1 / stride of the products of full attention, and hold the logits of a few blocks of queries.

    Paper: Xu et al., XAttention: Block Sparse Attention with Antidiagonal Scoring, 2025, arXiv:2503.16428.
    Differs from the paper: one threshold for all heads, where its code ships one for each head of one model; blocks of 64
    tokens, where its code has 128; a soft cap is left out of estimates.
    """

    threshold: Share = 0.9
    stride: Count = 8

    def validate(self) -> None:
        super().validate()
        if self.block % self.stride:
            raise ValueError(f"stride must divide the {self.block} tokens of a block, got {self.stride}")

    def tiles(self, layer: int, prompt: Prompt) -> Tiles:
        del layer
        places = Places.of(prompt, self.block)
        if self.threshold >= 1 and self.max_density >= 1:
            return Tiles(places.past.expand(prompt.shape(self.block)), self.block)
        scores = per_head(prompt, lambda queries, keys: self._scores(queries, keys, prompt))
        chosen = covering(scores, self.threshold) & places.past
        # The first block ranks before all others.
        first = torch.where(places.at == 0, torch.inf, scores)
        return Tiles(capped(chosen | (places.at == 0), first, places, self.max_density), self.block)

    def _scores(self, queries: Tensor, keys: Tensor, prompt: Prompt) -> Tensor:
        """Scores of tiles, float32 `[b, G, nq, nk]`, from queries `[b, G, Q, D]` and keys `[b, 1, T, D]`."""
        stride, per = self.stride, self.block // self.stride
        new, total = queries.shape[2], keys.shape[2]
        # Query blocks are filled up to whole blocks, keys too; what is added is seen by nobody, or falls out with its block.
        asked = pad(queries, (0, 0, 0, -new % self.block)).unflatten(2, (-1, stride)).flip(3).flatten(3)
        known = pad(keys, (0, 0, 0, -total % self.block)).unflatten(2, (-1, stride)).flatten(3)
        newest = torch.arange(stride - 1, asked.shape[2] * stride, stride, device=keys.device).clamp_max(new - 1)
        last = (newest + total - new) // stride
        scale = prompt.logits.scale / stride
        scores = tile_mass(asked.flatten(0, 1), known.flatten(0, 1), last, (per, per), scale=scale)
        return scores.unflatten(0, queries.shape[:2])
