# SPDX-License-Identifier: Apache-2.0
"""Causal attention of the newest tokens of a prompt to chosen tiles: blocks of keys for each block of queries of each head.

    logit[b, h, i, j] = softcap(scale * q[b, h, i] . keys[b, h // G, j])      for the keys j that query i reads: j <= T - Q + i,
                                                                               in a listed block or among the columns
    out = softmax(logit) values,   lse = log sum exp(logit)

    q [B, Hq, Q, D]    keys [B, H, T, D]    values [B, H, T, Dv]    out float32 [B, Hq, Q, Dv]    lse float32 [B, Hq, Q]

All sums are float32. A query that reads no key has ``out = 0`` and ``lse = -inf``, the neutral element of an LSE merge. Tiles
that are not read cost nothing. The error is that of summation in another order.

Every back end has a function ``attend(q, keys, values, lists, real, scale, softcap)`` that leaves sinks to its caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks


@dataclass(frozen=True)
class Tiles:
    """Keys that are read: key blocks of every query block, and single columns of every head.

    Query block i has the tokens from `T - Q + i * block` on, key block j those from `j * block` on.
    """

    chosen: Tensor
    """Key blocks that each query block reads, bool `[B, Hq, ceil(Q / block), ceil(T / block)]`.

    Key blocks with tokens of the query block are always read, later ones never.
    """
    block: int
    """Tokens of a query block, and of a key block."""
    columns: Tensor | None = None
    """Single keys that all later query blocks read, bool `[B, Hq, T]`; None for none."""

    def lists(self, queries: int, total: int) -> Lists:
        """Return lists of the blocks and columns that the newest `queries` of `total` tokens read."""
        first, last = spans(queries, total, self.block, self.chosen.device)
        at = torch.arange(self.chosen.shape[-1], device=self.chosen.device)
        read = (self.chosen | (at >= first[:, None])) & (at <= last[:, None])
        ends = read.sum(dim=-1).flatten().cumsum(0)
        tiles = read.nonzero()[:, -1].int()
        if self.columns is None:
            return Lists(ends, tiles, self.block)
        column_ends = self.columns.sum(dim=-1).flatten().cumsum(0)
        return Lists(ends, tiles, self.block, column_ends, self.columns.nonzero()[:, -1].int())

    def pairs(self, queries: int, total: int) -> Tensor:
        """Return the mask of the keys that each query reads, bool `[B, Hq, Q, T]`; for tests and small prompts."""
        first, last = spans(queries, total, self.block, self.chosen.device)
        at = torch.arange(self.chosen.shape[-1], device=self.chosen.device)
        read = (self.chosen | (at >= first[:, None])) & (at <= last[:, None])
        read = read.repeat_interleave(self.block, dim=2)[:, :, :queries].repeat_interleave(self.block, dim=3)[
            ..., :total
        ]
        if self.columns is not None:
            read = read | self.columns[:, :, None]
        position = torch.arange(total, device=read.device)
        return read & (position <= position[total - queries :, None])


@dataclass(frozen=True)
class Lists:
    """Tiles as concatenated lists; query block i of head h of row b has list `(b * Hq + h) * query blocks + i`."""

    ends: Tensor
    """End of each list in `tiles`, int64; a list begins at the end of the one before."""
    tiles: Tensor
    """Numbers of key blocks, int32, ascending in each list."""
    block: int
    """Tokens of a block."""
    column_ends: Tensor | None = None
    """End of the list of each head of each row in `columns`, int64; None without columns."""
    columns: Tensor | None = None
    """Indices of single keys, int32, ascending in each list.

    A query block skips columns in its listed blocks, and columns that are not before its first query.
    """


def spans(queries: int, total: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the last key block with tokens of each query block, int64 `[query blocks]` each."""
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
    """Refuse arguments that do not match."""
    checks.shape("q", q, ("B", "Hq", "Q", "D"), *checks.FLOATS)
    batch, heads, queries, channels = q.shape
    checks.shape("keys", keys, (batch, "H", "T", channels), q.dtype)
    kv_heads, total = keys.shape[1:3]
    checks.shape("values", values, (batch, kv_heads, total, "Dv"), q.dtype)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of the {kv_heads} KV heads, got {heads}")
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
