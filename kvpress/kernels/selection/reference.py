# SPDX-License-Identifier: Apache-2.0
"""Rows with the largest scores in plain torch, without waiting for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.kernels.formats.operand import Ranges
from kvpress.kernels.selection.contract import MOST_ROWS, refusal


def choose(
    scores: Tensor, where: Ranges, k: int, first: int = 0, last: int = 0, limits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return row numbers int32 [N, min(k, capacity)] and counts int64 [N]; arguments as in `kvpress.kernels.top_rows`."""
    if scores.device.type == "cpu":  # the check would wait for a GPU
        _check_streams(scores.shape[1], where, k, first + last, limits)
    capacity = scores.shape[1]
    rank, end = torch.arange(capacity, device=scores.device), where.lengths[:, None]
    bits = (scores + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(scores.isnan(), -(2**31))
    # Scores are made unique: topk does not define which of equal scores it takes.
    unique = order.long() * 2**32 + rank.flip(0)
    unique = unique.masked_fill((rank < first) | (rank >= end - last), torch.iinfo(torch.int64).max)
    unique = unique.masked_fill(rank >= end, torch.iinfo(torch.int64).min)
    chosen = unique.topk(min(k, capacity), dim=1, sorted=limits is not None).indices
    counts = where.lengths.clamp(max=chosen.shape[1])
    if limits is not None:
        counts = torch.minimum(counts, limits)
        chosen = chosen.masked_fill(rank[: chosen.shape[1]] >= counts[:, None], capacity)
    chosen = chosen.masked_fill(chosen >= end, capacity).sort(dim=1).values
    rows = (where.starts[:, None] + chosen).masked_fill(chosen >= end, 0)
    return rows.int(), counts


def _check_streams(capacity: int, where: Ranges, k: int, forced: int, limits: Tensor | None) -> None:
    starts, lengths = where.starts, where.lengths
    bad = (starts < 0) | (lengths < 0) | (lengths > capacity) | (starts + lengths > MOST_ROWS)
    if limits is not None:
        bad |= (limits < lengths.clamp(max=forced)) | (torch.minimum(limits, lengths) > k)
    if bad.any():
        raise refusal(int(bad.int().argmax()), capacity, limits)


def of_blocks(
    chosen: Tensor, chosen_counts: Tensor, blocks: Ranges, pairs: Ranges, size: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Return row numbers and counts; arguments and results as in `kvpress.kernels.rows_of_blocks`."""
    device = chosen.device
    rank = (chosen - blocks.starts[:, None])[..., None] * size + torch.arange(size, device=device)
    is_chosen = torch.arange(chosen.shape[1], device=device) < chosen_counts[:, None]
    exists = (is_chosen[..., None] & (rank < pairs.lengths[:, None, None])).flatten(1)
    rows = (rank.flatten(1) + pairs.starts[:, None]).masked_fill(~exists, 0)
    return rows[:, : min(rows.shape[1], longest)].int(), exists.sum(dim=1)


def split(
    ranks: Tensor, counts: Tensor, segments: Sequence[Ranges], longest: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return row numbers and counts in each segment; arguments and results as in `kvpress.kernels.split_rows`."""
    column = torch.arange(ranks.shape[1], device=ranks.device)
    ranks = ranks.masked_fill(column >= counts[:, None], MOST_ROWS)
    passed, found = torch.zeros_like(counts), []
    for where, most in zip(segments, longest, strict=True):
        bounds = torch.stack([passed, passed + where.lengths], dim=1).to(ranks.dtype)
        low, high = torch.searchsorted(ranks, bounds).unbind(1)
        offsets = column[:most]
        rows = (
            ranks.gather(1, (low[:, None] + offsets).clamp_max(ranks.shape[1] - 1)) + (where.starts - passed)[:, None]
        )
        found.append((rows.masked_fill(offsets >= (high - low)[:, None], 0).int(), high - low))
        passed = passed + where.lengths
    return found
