# SPDX-License-Identifier: Apache-2.0
"""Blocks of consecutive pairs of a stream, whatever segments they lie in."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.cache.chosen import Chosen
from kvpress.cache.layout import Layout
from kvpress.core.selector import spans_of


def ranks_in(chosen: Chosen, blocks: Layout, pairs: Layout, size: int) -> tuple[Tensor, Tensor]:
    """Return the ranks `[q * N, K]` of the pairs in chosen blocks of `size` of them, and how many these are.

    Only the last block of a stream may be short, so no gaps arise.
    """
    first, _ = spans_of(blocks, chosen.rows)
    _, lengths = spans_of(pairs, chosen.rows)
    ranks = (chosen.rows - first[:, None])[..., None] * size
    ranks = ranks + torch.arange(size, device=ranks.device)
    real = torch.arange(chosen.rows.shape[1], device=ranks.device) < chosen.counts[:, None]
    exists = real[..., None] & (ranks < lengths[:, None, None])
    return ranks.flatten(1)[:, : pairs.longest], exists.flatten(1).sum(dim=1)
