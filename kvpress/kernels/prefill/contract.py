# SPDX-License-Identifier: Apache-2.0
"""Causal attention of the newest tokens of a prompt to chosen tiles: blocks of keys for each block of queries of each head.

    logit[b, h, i, j] = softcap(scale * q[b, h, i] . keys[b, h // G, j])      for what query i reads: j <= T - Q + i, and
                                                                               block j in its list, or j among its columns
    out = softmax(logit) values,   lse = log sum exp(logit)

    q [B, Hq, Q, D]    keys [B, H, T, D]    values [B, H, T, Dv]    out float32 [B, Hq, Q, Dv]    lse float32 [B, Hq, Q]

All sums are float32. A query that reads nothing has ``out = 0`` and ``lse = -inf``, the neutral element of an LSE merge. Tiles
that are not read cost nothing. Errors, as a fraction of the largest output: that of summing in another order.

Every back end has a function ``attend(q, keys, values, lists, real, scale, softcap)`` that leaves sinks to its caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks


@dataclass(frozen=True)
class Tiles:
    """What is read: key blocks of every query block, and single columns of every head.

    Args:
        chosen: bool `[B, Hq, ceil(Q / block), ceil(T / block)]`; query block i holds the tokens from `T - Q + i * block` on,
            key block j those from `j * block` on. Blocks that hold a query itself are always read, blocks of the future never.
        block: tokens per block, in both directions.
        columns: single keys that all later query blocks read, bool `[B, Hq, T]`; None for none.
    """

    chosen: Tensor
    block: int
    columns: Tensor | None = None

    def lists(self, queries: int, total: int) -> Lists:
        """List the blocks and columns that the newest `queries` of `total` tokens read."""
        own, last = spans(queries, total, self.block, self.chosen.device)
        at = torch.arange(self.chosen.shape[-1], device=self.chosen.device)
        read = (self.chosen | (at >= own[:, None])) & (at <= last[:, None])
        ends = read.sum(dim=-1).flatten().cumsum(0)
        tiles = read.nonzero()[:, -1].int()
        if self.columns is None:
            return Lists(ends, tiles, self.block)
        column_ends = self.columns.sum(dim=-1).flatten().cumsum(0)
        return Lists(ends, tiles, self.block, column_ends, self.columns.nonzero()[:, -1].int())

    def pairs(self, queries: int, total: int) -> Tensor:
        """Return which keys each query reads, bool `[B, Hq, Q, T]`: for tests and small prompts."""
        own, last = spans(queries, total, self.block, self.chosen.device)
        at = torch.arange(self.chosen.shape[-1], device=self.chosen.device)
        read = (self.chosen | (at >= own[:, None])) & (at <= last[:, None])
        read = read.repeat_interleave(self.block, dim=2)[:, :, :queries].repeat_interleave(self.block, dim=3)[
            ..., :total
        ]
        if self.columns is not None:
            read = read | self.columns[:, :, None]
        place = torch.arange(total, device=read.device)
        return read & (place <= place[total - queries :, None])


@dataclass(frozen=True)
class Lists:
    """Tiles as compressed lists, those of query block i of head h of row b at `(b * Hq + h) * query blocks + i`.

    Args:
        ends: where each list ends in `tiles`, int64; it begins where the one before ends.
        tiles: numbers of key blocks, int32, ascending in each list.
        block: tokens per block.
        column_ends: the same for each head of each row; None without columns.
        columns: positions of single keys, int32, ascending. Those in a listed block, and those at or behind the first query of
            a block, are not read twice.
    """

    ends: Tensor
    tiles: Tensor
    block: int
    column_ends: Tensor | None = None
    columns: Tensor | None = None


def spans(queries: int, total: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last key block, each int64 `[query blocks]`, that hold the queries of each query block themselves."""
    first = torch.arange(total - queries, total, block, device=device)
    return first // block, (first + block).clamp_max(total).sub(1) // block


def check(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tiles,
    real: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Refuse arguments that do not belong together."""
    checks.shape("q", q, ("B", "Hq", "Q", "D"), *checks.FLOATS)
    batch, heads, queries, channels = q.shape
    checks.shape("keys", keys, (batch, "H", "T", channels), q.dtype)
    kv_heads, total = keys.shape[1:3]
    checks.shape("values", values, (batch, kv_heads, total, "Dv"), q.dtype)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of the {kv_heads} kv heads, got {heads}")
    if not 0 < queries <= total:
        raise ValueError(f"queries must be the newest of {total} tokens, got {queries}")
    if tiles.block < 1:
        raise ValueError(f"block must be at least 1, got {tiles.block}")
    blocks = (-(-queries // tiles.block), -(-total // tiles.block))
    checks.shape("chosen", tiles.chosen, (batch, heads, *blocks), torch.bool)
    if tiles.columns is not None:
        checks.shape("columns", tiles.columns, (batch, heads, total), torch.bool)
    if real is not None:
        checks.shape("real", real, (batch, total), torch.bool)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    if sinks is not None:
        checks.shape("sinks", sinks, (heads,), *checks.FLOATS)
    checks.same_device(q, keys, values, tiles.chosen, tiles.columns, real, sinks)
