# SPDX-License-Identifier: Apache-2.0
"""RocketKV: evict coarsely after the prompt, then read only the best pages, by the largest channels of the query."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.selection import Chosen
from kvpress.core.checks import Count, Odd, Range, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, register
from kvpress.core.selector import Budget
from kvpress.observe.call import LayerCall
from kvpress.presses.snapkv import SnapKVPress
from kvpress.sparse.quest import PageIndex, QuestSelector


@register(
    "rocketkv",
    "evict",
    "after Behnam et al., 2025, arXiv:2502.14051",
    example="rocketkv:share=0.25",
    exempt=(
        Exemption(
            EVERY_SUITE, "it reads a part of the pairs that it keeps; compared with snapkv, and with pages by loops"
        ),
        Exemption(
            "fuzz", "what it reads is a part of what it keeps, and may not be compared with hiding the evicted pairs"
        ),
    ),
    status="experimental",
)
@dataclass
class RocketKVPress(BasePress):
    """Read the `share` of a prompt's pairs in every decode step: one half of the saving by eviction, one by selection.

        kept pairs = sqrt(share) of the prompt, by SnapKV's scores       read pairs = sqrt(share) of the kept ones

    First SnapKV evicts: the attention of the last `window_size` tokens, averaged over `kernel_size` neighbouring pairs. Then
    every token reads the pages of `page_size` kept pairs with the largest bound on their logits:

        bound[page] = sum over the channels d in C of max(q[d] * min[d], q[d] * max[d])

    C are the `channels` channels with the largest sum of |q[d]| over the query heads of a GQA group, all if the head dim is
    not larger. A KV head reads the pages with the largest bound over its query heads. min and max are those of the keys of a
    page. The first `skip_layers` layers read all kept pairs. Generated tokens are kept, and are selected from as well. 1 for
    `share` changes nothing.

    Paper: after Behnam et al., RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression, 2025,
    arXiv:2502.14051; its code was not at hand.
    Differs from the paper: page size and channels are settings, where the paper derives them from the ratio of the second
    stage; the bounds of all channels are stored and read, so that the choice of channels saves no traffic; query heads of a
    group share pages by the largest bound.
    """

    share: Annotated[float, Range(0, 1, above=True)] = 1.0
    window_size: Count = 32
    kernel_size: Odd = 63
    page_size: Count = 4
    channels: Count = 32
    skip_layers: Size = 0

    @property
    def compression_ratio(self) -> float:
        """Fraction of a prompt's pairs that are evicted."""
        return 1 - self.stage

    @property
    def stage(self) -> float:
        """Share of the pairs that either stage leaves."""
        return float(self.share**0.5)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if self.share == 1:
            return Recipe()
        evicting = SnapKVPress(1 - self.stage, self.window_size, self.kernel_size).recipe(model)
        return replace(evicting, selector=self.selector_at)

    def selector_at(self, layer: int) -> QuestSelector | None:
        """Return the selector of an attention layer; None reads all kept pairs."""
        if layer < self.skip_layers:
            return None
        return ChannelPages(Budget(self.stage, 0, 0), self.page_size, self.channels)


class ChannelPages(QuestSelector):
    """Selects pages by the bounds of their logits over the largest channels of the query; see `RocketKVPress`."""

    def __init__(self, budget: Budget, page_size: int, channels: int) -> None:
        super().__init__(budget, page_size)
        self.channels = channels

    def best(self, call: LayerCall, queries: Tensor, index: PageIndex, joined: bool) -> Chosen | None:
        return super().best(call, in_largest_channels(queries, self.channels), index, joined)


def in_largest_channels(queries: Tensor, channels: int) -> Tensor:
    """Return `queries [q * N, G, D]` with zeros outside the channels of the largest sum of |q| over the G query heads."""
    dim = queries.shape[2]
    if channels >= dim:
        return queries
    largest = queries.abs().float().sum(dim=1, keepdim=True).topk(channels, dim=2).indices
    is_read = torch.zeros(len(queries), 1, dim, dtype=torch.bool, device=queries.device).scatter_(2, largest, True)
    return queries * is_read
