# SPDX-License-Identifier: Apache-2.0
"""Sparse-dLLM: eviction around the block that a masked-diffusion model writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvpress.core.checks import Count, Odd
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.observe.view import View
from kvpress.presses.window import newest_pairs


@register(
    "sparse_dllm",
    "evict",
    "Song et al., 2025, arXiv:2508.02558",
    example="sparse_dllm:0.5",
    cases=("sparse_dllm:0.5,block_length=6,kernel_size=5",),
)
@dataclass
class SparseDLLMPress(ScorerPress):
    """Score a pair by the mean query of the newest block, pooled over neighbouring pairs; all heads share one choice.

        q[h]     = mean over the queries i of the block of q_i[h],   h a query head
        s[t]     = mean over h of q[h] . k_t                         no softmax, no scale
        score[t] = max of s over the kernel_size pairs around t

    Made for `kvpress.diffuse(model, ids, press=...)`: there the block is the one being written, and the ratio applies to
    the pairs before and after it. Elsewhere the block is the newest `block_length` tokens of a prompt, which are kept; a
    prompt, or the surroundings of a block, of at most `block_length` tokens is not evicted from. `diffuse` accepts blocks
    up to `block_length`. `kernel_size` is the odd number of neighbours that the maximum is taken over; 1 turns pooling off.

    Paper: Song et al., Sparse-dLLM: Accelerating Diffusion LLMs with Dynamic Cache Eviction, 2025, arXiv:2508.02558.
    Differs from the paper: each row of a batch makes its own choice, and of neighbours that share a maximum the newest are
    kept, where the authors' `topk` leaves the order open. The time of the eviction, after the second step of a
    block in the paper, is set by `full_steps` of `kvpress.diffuse`.
    """

    block_length: Count = 32
    kernel_size: Odd = 3

    @property
    def protected(self) -> int:
        return self.block_length

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(RecentQueries, self.block_length),)

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`, infinite in the block."""
        queries = view.newest_queries(*self.wants).float().mean(dim=2).unflatten(1, (view.shape[1], -1)).mean(dim=2)
        worth = view.mean_of_heads(torch.einsum("bhd,bhnd->bhn", queries, view.keys.float()))[:, 0]
        newest = 0 if view.call.tokens.around else newest_pairs(view, self.block_length)
        older = worth[:, : view.length - newest]
        if older.shape[1]:
            older = max_pool1d(older, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        pooled = torch.cat([older, torch.full_like(worth[:, :newest], torch.inf)], dim=1)
        return pooled[:, None].expand(view.shape)
