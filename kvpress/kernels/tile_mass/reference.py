# SPDX-License-Identifier: Apache-2.0
"""Attention mass of tiles in plain torch, a few blocks of queries after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.kernels.tile_mass.contract import Tile, blocks

CHUNK = 2**20
"""Most logits of a KV head in memory at a time, unless one block of queries has more: few enough for the CPU's cache."""


def receive(q: Tensor, keys: Tensor, last: Tensor, tile: Tile, scale: float) -> Tensor:
    """Compute the mass, float32 `[H, query blocks, tiles]`; arguments as in `kvpress.kernels.tile_mass`."""
    rows, columns = tile
    group, count = len(q) // len(keys), keys.shape[1]
    queries, transposed = q.unflatten(0, (-1, group)), keys.transpose(1, 2)[:, None]
    step = max(1, CHUNK // max(1, group * count * rows)) * rows
    at, ends = torch.arange(count, device=q.device), last.tolist()
    parts = []
    for start in range(0, q.shape[1], step):
        # Keys after the last one that a query of the step sees are skipped.
        seen = max(0, min(max(ends[start : start + step]) + 1, count))
        limit = last[start : start + step, None]
        logits = (queries[:, :, start : start + step] @ transposed[..., :seen]).float().mul_(scale)
        weights = logits.masked_fill_(at[:seen] > limit, -torch.inf).softmax(dim=-1).masked_fill_(limit < 0, 0)
        sums = pad(weights, (0, -seen % columns)).unflatten(3, (-1, columns)).sum(dim=4)
        sums = pad(sums, (0, blocks(count, columns) - sums.shape[3], 0, -len(limit) % rows))
        parts.append(sums.unflatten(2, (-1, rows)).sum(dim=3))
    return torch.cat(parts, dim=2).flatten(0, 1)
