# SPDX-License-Identifier: Apache-2.0
"""Vertical and slash lines of attention: columns of keys, and diagonals of equal distance."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.core.pattern import Prompt
from kvpress.sparse.tiling import per_head


def newest_attention(prompt: Prompt, count: int) -> tuple[Tensor, Tensor]:
    """What columns and diagonals receive from the newest `count` queries, each float32 `[b, Hq, T]`.

    Diagonal o holds the pairs whose query is o tokens behind the key. One kv head is looked at after the other: no more than
    its G x count x T weights are held.
    """
    count, total = min(count, prompt.new), prompt.total
    at = torch.arange(total, device=prompt.keys.device)

    def lines(queries: Tensor, keys: Tensor) -> Tensor:
        logits = prompt.logits(queries[:, :, -count:], keys)
        weights = logits.masked_fill(at > at[total - count :, None], -torch.inf).softmax(dim=-1)
        # A row shorter by one than it is wide shifts each row by one: diagonals become columns.
        skewed = pad(weights.flip(2), (0, count)).flatten(2)[..., : count * (total + count - 1)]
        diagonals = skewed.unflatten(2, (count, -1)).sum(dim=2)[..., :total].flip(2)
        return torch.stack([weights.sum(dim=2), diagonals], dim=2)

    found = per_head(prompt, lines)
    return found[:, :, 0], found[:, :, 1]


def slash_scores(prompt: Prompt, diagonals: Tensor, block: int) -> Tensor:
    """Sum what diagonals `[b, Hq, T]` are worth over those that cross each tile: float32 `[b, Hq, nq, nk]`.

    A query block at position p meets a key block at position k on the distances from p - k - block + 1 to p - k + block - 1.
    """
    sums = pad(diagonals.float().cumsum(dim=-1), (1, 0))
    device, total = diagonals.device, prompt.total
    start = torch.arange(total - prompt.new, total, block, device=device)
    distance = start[:, None] - torch.arange(0, total, block, device=device)
    low, high = ((distance + shift).clamp(0, total) for shift in (1 - block, block))
    return sums[..., high] - sums[..., low]
