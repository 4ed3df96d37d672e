# SPDX-License-Identifier: Apache-2.0
"""FlexPrefill: each head reads tiles or lines that cover a share of its attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpress.core.checks import Count, Share
from kvpress.core.pattern import PromptTensors
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.lines import newest_attention, slash_scores
from kvpress.sparse.tiling import IN_CHUNKS, BlockGrid, EstimatedPress, capped, covering, mean_attention, per_block


@register(
    "flex_prefill",
    "prefill",
    "Lai et al., 2025, arXiv:2502.20766",
    example="flex_prefill:gamma=0.9",
    cases=("flex_prefill:gamma=0.6,tau=0.5,min_budget=8,block=8",),
    exempt=(IN_CHUNKS,),
)
@dataclass
class FlexPrefillPress(EstimatedPress):
    """Read, for each head of each prompt, the fewest tiles that carry a share `gamma` of the estimated attention.

    `gamma` is the share of the estimated attention that the tiles of a head carry: closer to 1, more tiles are read. The
    newest `block` queries decide the kind of a head. Their attention, summed over blocks of keys, is compared with the
    softmax of their mean over mean keys. If the root of the Jensen-Shannon divergence is below `tau`, means are good
    estimates: all tiles of the prompt are ranked by the softmax of mean queries over mean keys, and taken until they carry
    gamma. Otherwise the head reads the columns, and the diagonals, that carry gamma of the attention of the newest queries,
    rounded to blocks. Every block of queries reads the first block, and at least the newest `min_budget` tokens. A `tau` of 0
    gives every head lines. With a gamma of 1 and no `max_density`, everything is read.

    Paper: Lai et al., FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence Inference, 2025,
    arXiv:2502.20766.
    Differs from the paper: any number of rows; `max_density`, which is ours, limits lines and tiles for each block of
    queries.
    """

    gamma: Share = 0.9
    tau: Share = 0.1
    min_budget: Count = 512
    block: Count = field(default=128, kw_only=True)

    def tiles(self, layer: int, prompt: PromptTensors) -> Tiles:
        del layer
        grid = BlockGrid.of(prompt, self.block)
        if self.gamma >= 1 and self.max_density >= 1:
            return Tiles(grid.causal.expand(prompt.shape(self.block)), self.block)
        columns, diagonals = newest_attention(prompt, self.block)
        pooled = per_block(columns, self.block)
        scores = mean_attention(prompt, grid)
        flexible = _distance(scores[:, :, -1], pooled) < self.tau
        flat = covering((scores / scores.shape[2]).flatten(2), self.gamma).unflatten(2, scores.shape[2:])
        vertical = per_block(columns * covering(columns, self.gamma), self.block)
        slash = slash_scores(prompt, diagonals * covering(diagonals, self.gamma), self.block)
        lines = (vertical[:, :, None] > 0) | (slash > 0)
        chosen = torch.where(flexible[..., None, None], flat, lines)
        worth = torch.where(flexible[..., None, None], scores, vertical[:, :, None] + slash)
        nearest = -(-self.min_budget // self.block)
        chosen = (chosen | (grid.keys == 0) | (grid.keys > grid.first - nearest)) & grid.causal
        worth = torch.where(grid.keys == 0, torch.inf, worth)
        return Tiles(capped(chosen, worth, grid, self.max_density), self.block)


def _distance(estimate: Tensor, weights: Tensor) -> Tensor:
    """Return the root of the Jensen-Shannon divergence of two distributions `[b, Hq, nk]`; `weights` are normalised."""
    weights = weights / weights.sum(dim=-1, keepdim=True)
    middle = (estimate + weights) / 2
    halves = (torch.special.xlogy(p, p) - torch.special.xlogy(p, middle) for p in (estimate, weights))
    divergence: Tensor = sum(half.sum(dim=-1) for half in halves) / 2
    return divergence.clamp_min(0).sqrt()
