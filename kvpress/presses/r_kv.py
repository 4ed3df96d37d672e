# SPDX-License-Identifier: Apache-2.0
"""R-KV: attention of the newest tokens, minus the redundancy of keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from kvpress.cache import attention
from kvpress.core.checks import Count, Odd, Share
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.view import LOG_WEIGHT, View
from kvpress.presses.window import NewestWindow, newest_pairs


@register(
    "r_kv",
    "evict",
    "Cai et al., 2025, arXiv:2505.24133",
    example="r_kv:0.5",
    cases=("r_kv:0.5,window_size=4,kernel_size=3,similarity=0.2",),
)
@dataclass
class RKVPress(NewestWindow, ScorerPress):
    """Score a pair by the attention of the newest tokens, minus the similarity of its key to newer keys of its head.

        a[t]  = max_pool(mean over the last w queries i of softmax over t < n - w of max over the group of q_i . k_t)
        r     = softmax over t of mean over i of cos(k_i, k_t), 0 at i = t and at the newest t with cos(k_i, k_t) > similarity
        score = weight * a - (1 - weight) * r

    Of several similar keys, the newest gets no penalty. `window_size` is w, the newest tokens, whose queries score the
    others and which are always kept; `kernel_size` the odd number of neighbours that the maximum is taken over;
    `similarity` the cosine above which two keys count as equal; `weight` the weight of attention against redundancy. The
    paper's schedule, which evicts from a chain of thought while it is written, is
    `decoding(r_kv):compression_interval=128,target_size=1024`.

    Paper: Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, 2025, arXiv:2505.24133.
    Differs from the paper: the first eviction happens at an interval and not when the budget is reached; cosines are
    computed in blocks, so a prompt is scored too; learned attention sinks (GPT-OSS) are left out of the softmax.
    """

    window_size: Count = 8
    kernel_size: Odd = 7
    similarity: Share = 0.5
    weight: Share = 0.1

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`, infinite in the window."""
        scores = torch.full(view.shape, torch.inf, device=view.positions.device)
        older = view.length - newest_pairs(view, self.window_size)
        if older > 0:
            for h, head in enumerate(view.per_head()):
                redundancy = self.redundancy(head.keys[:, 0])[:, :older]
                scores[:, h, :older] = self.weight * self.importance(head, older) - (1 - self.weight) * redundancy
        return scores

    def importance(self, view: View, older: int) -> Tensor:
        """Return the attention `[b, older]` of the window to the `older` oldest pairs, for a view of one head."""
        keys = view.keys[:, 0, :older]
        logits = view.call.logits(view.newest_queries(*self.wants), keys[:, None]).amax(dim=1)
        if LOG_WEIGHT in view.side:
            logits = logits + view.side[LOG_WEIGHT][:, :, :older]
        attention_weights = logits.softmax(dim=-1).mean(dim=1, keepdim=True)
        return max_pool1d(attention_weights, self.kernel_size, stride=1, padding=self.kernel_size // 2)[:, 0]

    def redundancy(self, keys: Tensor) -> Tensor:
        """Return the redundancy `[b, n]` of the `keys [b, n, D]` of one head; cosines are computed in blocks of rows."""
        keys = normalize(keys.float(), dim=-1)
        batch, length, _ = keys.shape
        total, columns = keys.new_zeros(batch, length), torch.arange(length, device=keys.device)
        for rows in columns.split(max(1, attention.BLOCK_BYTES // (12 * batch * length))):
            cosines = (keys[:, rows] @ keys.mT).masked_fill_(columns == rows[:, None], 0.0)
            newest_similar = torch.where(cosines > self.similarity, columns, -1).amax(dim=-1, keepdim=True)
            total += cosines.masked_fill_(columns == newest_similar, 0.0).sum(dim=1)
        return (total / length).softmax(dim=-1)
