# SPDX-License-Identifier: Apache-2.0
"""Vertical and slash lines of attention: columns of keys, and diagonals of equal distance."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.core.pattern import PromptTensors
from kvpress.sparse.tiling import NEGLIGIBLE, per_head


def newest_attention(prompt: PromptTensors, count: int) -> tuple[Tensor, Tensor]:
    """Return the attention that columns and diagonals receive from the newest `count` queries, each float32 `[b, Hq, T]`.

    Diagonal o holds the query-key pairs whose query comes o tokens after the key. KV heads are computed one after the other,
    so that only G x count x T weights are in memory at a time.
    """
    received = per_head(prompt, lambda queries, keys: _received(_newest_weights(prompt, queries, keys, count)))
    return received[:, :, 0], received[:, :, 1]


def covering_lines(prompt: PromptTensors, count: int, share: float) -> tuple[Tensor, Tensor]:
    """Return the attention that lines receive from the newest `count` queries, and the mask of the lines that are needed.

    Both are `[b, Hq, 2, T]`, columns first, then diagonals. Lines of both kinds are taken by falling attention until a `share`
    of the attention of these queries lies on them. A weight on two taken lines counts once, and a line that adds nothing is
    not needed.
    """

    def lines(queries: Tensor, keys: Tensor) -> Tensor:
        weights = _newest_weights(prompt, queries, keys, count)
        received = _received(weights)
        return torch.stack([received, _needed(weights, received, share).float()], dim=2)

    stacked = per_head(prompt, lines)
    return stacked[:, :, 0], stacked[:, :, 1] > 0


def slash_scores(prompt: PromptTensors, diagonals: Tensor, block: int) -> Tensor:
    """Return, for each tile, the sum of the scores `[b, Hq, T]` of the diagonals that cross it: float32 `[b, Hq, nq, nk]`.

    A query block at position p and a key block at position k have distances from p - k - block + 1 to p - k + block - 1.
    """
    sums = pad(diagonals.float().cumsum(dim=-1), (1, 0))
    device, total = diagonals.device, prompt.total
    start = torch.arange(total - prompt.new, total, block, device=device)
    distance = start[:, None] - torch.arange(0, total, block, device=device)
    low, high = ((distance + shift).clamp(0, total) for shift in (1 - block, block))
    return sums[..., high] - sums[..., low]


def _newest_weights(prompt: PromptTensors, queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """Return the softmax of the newest `count` of `queries [b, G, Q, D]` (fewer if Q is less) over all `keys [b, 1, T, D]`."""
    total, count = keys.shape[2], min(count, queries.shape[2])
    columns = torch.arange(total, device=keys.device)
    logits = prompt.logits(queries[:, :, -count:], keys)
    return logits.masked_fill(columns > columns[total - count :, None], -torch.inf).softmax(dim=-1)


def _received(weights: Tensor) -> Tensor:
    """Return the sums of `weights [b, G, n, T]` of the newest n queries along columns and along diagonals, `[b, G, 2, T]`."""
    count, total = weights.shape[2:]
    # Rows are cut one element shorter than their width, which shifts each row by one: diagonals become columns.
    skewed = pad(weights.flip(2), (0, count)).flatten(2)[..., : count * (total + count - 1)]
    diagonals = skewed.unflatten(2, (count, -1)).sum(dim=2)[..., :total].flip(2)
    return torch.stack([weights.sum(dim=2), diagonals], dim=2)


def _needed(weights: Tensor, received: Tensor, share: float) -> Tensor:
    """Return the mask of the lines that are needed to cover a share of the weights, bool `[b, G, 2, T]`."""
    count, total = weights.shape[2:]
    rank = received.flatten(2).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    columns, diagonals = rank[..., :total], rank[..., total:]
    covered = torch.zeros_like(received.flatten(2))
    for row in range(count):
        seen = total - count + row + 1
        # A weight counts for the better of its two lines: its column, and the diagonal of its distance.
        best = torch.minimum(columns[..., :seen], diagonals[..., :seen].flip(-1))
        covered.scatter_add_(2, best, weights[:, :, row, :seen])
    before = covered.cumsum(dim=-1) - covered
    target = share * covered.sum(dim=-1, keepdim=True).clamp_min(NEGLIGIBLE)
    is_needed = (before < target) & (covered > 0)
    lines: Tensor = is_needed.gather(2, rank).unflatten(2, (2, total))
    return lines
