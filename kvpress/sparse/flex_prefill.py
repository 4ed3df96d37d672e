# SPDX-License-Identifier: Apache-2.0
"""FlexPrefill: each head chooses between tiles and lines, and reads what covers a share of its attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpress.core.checks import Count, Share
from kvpress.core.pattern import Prompt
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.lines import newest_attention, slash_scores
from kvpress.sparse.tiling import IN_CHUNKS, EstimatedPress, Places, capped, covering, of_means, per_block


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
    """Read, for each head of each prompt, the fewest tiles that an estimate says carry a share `gamma` of the attention.

    The newest `block` queries tell what a head does. Their attention, summed over blocks of keys, is compared with the softmax
    of their mean and of mean keys. Where the root of the Jensen-Shannon divergence is below `tau`, means are good estimates:
    the tiles of the whole prompt are ranked by the softmax of mean queries and mean keys, and taken until they carry gamma.
    Elsewhere the head reads the columns, and the diagonals, that carry gamma of the attention of the newest queries, rounded
    to blocks. Every block of queries reads the first block, and at least the newest `min_budget` tokens. A `tau` of 0 gives
    every head lines. With a gamma of 1 and no `max_density`, everything is read.

    Paper: Lai et al., FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence Inference, 2025,
    arXiv:2502.20766.
    Differs from the paper: any number of rows; lines and tiles are ranked for each block of queries where `max_density`, which
    is ours, cuts them.
    """

    gamma: Share = 0.9
    tau: Share = 0.1
    min_budget: Count = 512
    block: Count = field(default=128, kw_only=True)

    def tiles(self, layer: int, prompt: Prompt) -> Tiles:
        del layer
        places = Places.of(prompt, self.block)
        if self.gamma >= 1 and self.max_density >= 1:
            return Tiles(places.past.expand(prompt.shape(self.block)), self.block)
        columns, diagonals = newest_attention(prompt, self.block)
        pooled = per_block(columns, self.block)
        scores = of_means(prompt, places)
        flexible = _distance(scores[:, :, -1], pooled) < self.tau
        flat = covering((scores / scores.shape[2]).flatten(2), self.gamma).unflatten(2, scores.shape[2:])
        vertical = per_block(columns * covering(columns, self.gamma), self.block)
        slash = slash_scores(prompt, diagonals * covering(diagonals, self.gamma), self.block)
        lines = (vertical[:, :, None] > 0) | (slash > 0)
        chosen = torch.where(flexible[..., None, None], flat, lines)
        worth = torch.where(flexible[..., None, None], scores, vertical[:, :, None] + slash)
        least = -(-self.min_budget // self.block)
        chosen = (chosen | (places.at == 0) | (places.at > places.own - least)) & places.past
        worth = torch.where(places.at == 0, torch.inf, worth)
        return Tiles(capped(chosen, worth, places, self.max_density), self.block)


def _distance(estimate: Tensor, found: Tensor) -> Tensor:
    """Root of the Jensen-Shannon divergence of two distributions `[b, Hq, nk]`."""
    found = found / found.sum(dim=-1, keepdim=True)
    middle = (estimate + found) / 2
    halves = (torch.special.xlogy(part, part) - torch.special.xlogy(part, middle) for part in (estimate, found))
    return (sum(half.sum(dim=-1) for half in halves) / 2).clamp_min(0).sqrt()
