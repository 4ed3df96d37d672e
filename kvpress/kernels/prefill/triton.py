# SPDX-License-Identifier: Apache-2.0
"""Sparse causal attention in Triton.

One program attends from up to 64 queries of one block to its listed tiles, then to the single columns of its head. Programs of
a head have consecutive numbers, so that the keys they share stay in the L2 cache. Products of 16-bit keys run on tensor cores
with float32 sums; weights are rounded to the dtype of the values.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.prefill.contract import Lists
from kvpress.kernels.triton import online
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import block_rows, padded

MOST_QUERIES = 64
STAGES = 2


@triton.jit
def _is_listed(block, begin, end, TILES, halvings):
    """Whether each key block is in the ascending list from `begin` to `end` of `TILES`; a binary search."""
    low, high = begin + tl.zeros_like(block), end + tl.zeros_like(block)
    for _ in tl.range(0, halvings):
        middle = (low + high) // 2
        less = tl.load(TILES + middle, mask=low < high, other=0) < block
        low, high = tl.where((low < high) & less, middle + 1, low), tl.where((low < high) & ~less, middle, high)
    return tl.load(TILES + low, mask=low < end, other=-1) == block


@triton.jit
def _attend(
    q, j, live, at, KEYS, VALUES, REAL, key_stride, value_stride, scale, softcap, acc, largest, total,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Add the keys at positions `j` to the sums of the queries at positions `at`."""
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    if REAL is not None:
        live = live & (tl.load(REAL + j, mask=live, other=0) != 0)
    row = j.to(tl.int64)
    keys = tl.load(KEYS + row[None, :] * key_stride + d[:, None], mask=live[None, :] & (d < D)[:, None], other=0.0)
    logits = online.to_logits(tl.dot(q, keys, input_precision="ieee"), scale, softcap)
    logits = tl.where(live[None, :] & (j[None, :] <= at[:, None]), logits, -float("inf"))
    weights, keep, largest, total = online.update(logits, largest, total)
    mask = live[:, None] & (dv < DV)[None, :]
    values = tl.load(VALUES + row[:, None] * value_stride + dv[None, :], mask=mask, other=0.0)
    return tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee"), largest, total


@triton.jit(do_not_specialize=["queries", "length", "halvings"])
def _kernel(
    Q, KEYS, VALUES, ENDS, TILES, COLUMN_ENDS, COLUMNS, REAL, OUT, LSE, key_row, key_head, key_stride, value_row, value_head,
    value_stride, queries, length, heads, group, block, halvings, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1).to(tl.int64)
    row, kv = n // heads, n % heads // group
    parts = tl.cdiv(block, BM)  # programs of one query block
    i = tl.program_id(0) // parts
    inside = tl.program_id(0) % parts * BM + tl.arange(0, BM)
    m = i * block + inside
    live_m = (inside < block) & (m < queries)
    at = length - queries + m
    d = tl.arange(0, DP)
    q = tl.load(Q + (n * queries + m[:, None]) * D + d[None, :], mask=live_m[:, None] & (d < D)[None, :], other=0.0)
    KEYS += row * key_row + kv * key_head
    VALUES += row * value_row + kv * value_head
    if REAL is not None:
        REAL += row * length

    largest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DVP], tl.float32)
    list_index = n * tl.cdiv(queries, block) + i
    begin = tl.load(ENDS + list_index - 1, mask=list_index > 0, other=0)
    end = tl.load(ENDS + list_index)
    steps = tl.cdiv(block, BN)  # of one tile
    for step in tl.range(0, ((end - begin) * steps).to(tl.int32)):
        column = step % steps * BN + tl.arange(0, BN)
        j = tl.load(TILES + begin + step // steps) * block + column
        acc, largest, total = _attend(
            q, j, (column < block) & (j < length), at, KEYS, VALUES, REAL, key_stride, value_stride, scale, softcap,
            acc, largest, total, D, DV, DP, DVP,
        )  # fmt: skip
    if COLUMNS is not None:
        first = length - queries + i * block
        column_begin = tl.load(COLUMN_ENDS + n - 1, mask=n > 0, other=0)
        count = (tl.load(COLUMN_ENDS + n) - column_begin).to(tl.int32)
        for step in tl.range(0, count, BN):
            entry = step + tl.arange(0, BN)
            j = tl.load(COLUMNS + column_begin + entry, mask=entry < count, other=length)
            live = j < first
            live &= ~_is_listed(j // block, begin, end, TILES, halvings)
            acc, largest, total = _attend(
                q, j, live, at, KEYS, VALUES, REAL, key_stride, value_stride, scale, softcap,
                acc, largest, total, D, DV, DP, DVP,
            )  # fmt: skip

    dv = tl.arange(0, DVP)
    out_row = n * queries + m
    norm = online.store_lse(LSE, out_row, live_m, largest, total)
    mask = live_m[:, None] & (dv < DV)[None, :]
    tl.store(OUT + out_row[:, None] * DV + dv[None, :], acc * norm[:, None], mask=mask)


def query_rows(block: int, itemsize: int) -> int:
    """Return the queries of one program, for blocks of `block` tokens; sums of more queries would spill from registers."""
    return min(MOST_QUERIES if itemsize < 4 else MOST_QUERIES // 2, padded(block))


def key_rows(block: int, channels: int, itemsize: int) -> int:
    """Return the keys per step, for blocks of `block` tokens and `channels` channels of keys and values together."""
    return min(block_rows(channels, itemsize), padded(block))


def warps(row_bytes: int, columns: bool) -> int:
    """Return the warps of a program for `row_bytes` of a key and a value: enough registers for the sums and a second loop."""
    return 4 if row_bytes <= (256 if columns else 512) else 8


@on_device
def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lists: Lists,
    real: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on checked arguments; arguments and results as in `kvpress.kernels.block_prefill`."""
    (batch, heads, queries, D), (kv_heads, total), DV = q.shape, keys.shape[1:3], values.shape[-1]
    keys, values = (side if side.stride(-1) == 1 else side.contiguous() for side in (keys, values))
    out = q.new_empty(batch, heads, queries, DV, dtype=torch.float32)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    if not lse.numel():
        return out, lse
    DP, DVP, block = padded(D), padded(DV), lists.block
    BM = query_rows(block, keys.element_size())
    _kernel[(-(-queries // block) * -(-block // BM), batch * heads)](
        q.contiguous(),
        keys,
        values,
        lists.ends,
        lists.tiles,
        lists.column_ends,
        lists.columns,
        None if real is None else real.contiguous().view(torch.uint8),
        out,
        lse,
        *keys.stride()[:3],
        *values.stride()[:3],
        queries,
        total,
        heads,
        heads // kv_heads,
        block,
        (-(-total // block)).bit_length(),
        scale,
        softcap,
        D,
        DV,
        DP,
        DVP,
        BM,
        key_rows(block, DP + DVP, keys.element_size()),
        num_warps=warps((DP + DVP) * keys.element_size(), lists.columns is not None),
        num_stages=STAGES,
    )
    return out, lse
