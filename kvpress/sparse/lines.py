# SPDX-License-Identifier: Apache-2.0
"""Vertical and slash lines of attention: columns of keys, and diagonals of equal distance."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.core.pattern import Prompt
from kvpress.sparse.tiling import LEAST, per_head


def newest_attention(prompt: Prompt, count: int) -> tuple[Tensor, Tensor]:
    """What columns and diagonals receive from the newest `count` queries, each float32 `[b, Hq, T]`.

    Diagonal o holds the pairs whose query is o tokens behind the key. One kv head is looked at after the other: no more than
    its G x count x T weights are held.
    """
    found = per_head(prompt, lambda queries, keys: _received(_newest_weights(prompt, queries, keys, count)))
    return found[:, :, 0], found[:, :, 1]


def covering_lines(prompt: Prompt, count: int, share: float) -> tuple[Tensor, Tensor]:
    """What columns and diagonals receive from the newest `count` queries, both `[b, Hq, 2, T]`, and which of them are needed.

    Lines of both kinds are taken by what they receive until a `share` of the attention of these queries lies on them, a weight
    on two of them counted once. What a line alone holds of it must be more than nothing.
    """

    def lines(queries: Tensor, keys: Tensor) -> Tensor:
        weights = _newest_weights(prompt, queries, keys, count)
        received = _received(weights)
        return torch.stack([received, _needed(weights, received, share).float()], dim=2)

    found = per_head(prompt, lines)
    return found[:, :, 0], found[:, :, 1] > 0


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


def _newest_weights(prompt: Prompt, queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """Softmax of the newest of `queries [b, G, Q, D]`, at most `count`, over all `keys [b, 1, T, D]`."""
    total, count = keys.shape[2], min(count, queries.shape[2])
    at = torch.arange(total, device=keys.device)
    logits = prompt.logits(queries[:, :, -count:], keys)
    return logits.masked_fill(at > at[total - count :, None], -torch.inf).softmax(dim=-1)


def _received(weights: Tensor) -> Tensor:
    """Sums of the `weights [b, G, n, T]` of the newest n queries along columns and along diagonals, `[b, G, 2, T]`."""
    count, total = weights.shape[2:]
    # A row shorter by one than it is wide shifts each row by one: diagonals become columns.
    skewed = pad(weights.flip(2), (0, count)).flatten(2)[..., : count * (total + count - 1)]
    diagonals = skewed.unflatten(2, (count, -1)).sum(dim=2)[..., :total].flip(2)
    return torch.stack([weights.sum(dim=2), diagonals], dim=2)


def _needed(weights: Tensor, received: Tensor, share: float) -> Tensor:
    """Mark the lines that a share of the weights needs, bool `[b, G, 2, T]`, by their rank among all of both kinds."""
    count, total = weights.shape[2:]
    rank = received.flatten(2).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    columns, diagonals = rank[..., :total], rank[..., total:]
    held = torch.zeros_like(received.flatten(2))
    for row in range(count):
        seen = total - count + row + 1
        # A weight counts for the better one of its two lines; that many tokens ahead of the query is its diagonal.
        best = torch.minimum(columns[..., :seen], diagonals[..., :seen].flip(-1))
        held.scatter_add_(2, best, weights[:, :, row, :seen])
    before = held.cumsum(dim=-1) - held
    wanted = share * held.sum(dim=-1, keepdim=True).clamp_min(LEAST)
    return ((before < wanted) & (held > 0)).gather(2, rank).unflatten(2, (2, total))
