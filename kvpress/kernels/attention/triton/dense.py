# SPDX-License-Identifier: Apache-2.0
"""Split-KV decode attention on dense rows.

One program attends from up to 64 query rows of one stream to one split of its rows, so a row is read once for all query heads
of its GQA group; `merge` merges the splits. Products of 16-bit rows run on tensor cores with float32 sums; queries and weights
are rounded to the dtype of the rows.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.attention.triton.merge import Partials, partials
from kvpress.kernels.attention.triton.operand import causal, offsets, positions, streams, width
from kvpress.kernels.formats.offset import Products
from kvpress.kernels.formats.operand import Options, Rows, Where
from kvpress.kernels.triton import online
from kvpress.kernels.triton.grid import block_rows, padded, plan, resident

WARPS, RESIDENT = 4, 3
"""Warps of a program, and programs that fit on a multiprocessor: three stages of a tile take up to 64 KiB of shared memory."""


@triton.jit(do_not_specialize=["M", "streams", "splits", "width", "causal", "places"])
def _kernel(
    Q, KEYS, VALUES, LISTED, STARTS, LENGTHS, LOG_WEIGHT, OFFSETS, OUT, LSE,
    key_stride, value_stride, M, streams, splits, width, places, causal, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NP: tl.constexpr,
):  # fmt: skip
    # n has 64 bits: row * stride overflows int32 at 128k rows of 8 heads.
    n, split, split_count = online.split_of(LENGTHS, streams, splits, BN, NP)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    d, dv, i = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, BN)
    live_m, live_d, live_dv = m < M, d < D, dv < DV

    length = tl.load(LENGTHS + n).to(tl.int32)
    start = n * 0
    if LISTED is None:
        start = tl.load(STARTS + n)
    else:
        length = tl.minimum(length, width)
    limit = online.visible(m, length, causal)
    q = tl.load(Q + (n * M + m[:, None]) * D + d[None, :], mask=live_m[:, None] & live_d[None, :], other=0.0)
    q = q.to(KEYS.dtype.element_ty)

    offset_products, offset_shifts, offset_positions = OFFSETS
    largest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DVP], tl.float32)
    first, last = online.share(length, split, split_count, BN)
    for at in tl.range(first, last, BN):
        live = at + i < last
        if LISTED is None:
            row = start + at + i
        else:
            row = tl.load(LISTED + n * width + at + i, mask=live, other=0).to(tl.int64)
        keys = tl.load(KEYS + row[None, :] * key_stride + d[:, None], mask=live[None, :] & live_d[:, None], other=0.0)
        products = tl.dot(q, keys, input_precision="ieee")
        if offset_products is not None:
            products += online.added(
                offset_products, offset_shifts, offset_positions, n, m, row, live_m, live, M, places
            )
        logits = online.to_logits(products, scale, softcap)
        if LOG_WEIGHT is not None:
            logits += tl.load(LOG_WEIGHT + row, mask=live, other=0.0).to(tl.float32)[None, :] * online.LOG2E
        logits = tl.where(live[None, :] & (at + i[None, :] < limit[:, None]), logits, -float("inf"))
        weights, keep, largest, total = online.update(logits, largest, total)
        values = tl.load(
            VALUES + row[:, None] * value_stride + dv[None, :], mask=live[:, None] & live_dv[None, :], other=0.0
        )
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")

    out_row = tl.program_id(0).to(tl.int64) * M + m
    norm = online.store_lse(LSE, out_row, live_m, largest, total)
    mask = live_m[:, None] & live_dv[None, :]
    tl.store(OUT + out_row[:, None] * DV + dv[None, :], acc * norm[:, None], mask=mask)


def registers(rows: int) -> int | None:
    """Return the limit of registers per thread for tiles of `rows` queries; without one, ptxas spills for the largest tiles."""
    return 208 if rows > 32 else None


def launch(q: Tensor, rows: Rows, where: Where, options: Options, added: Products | None = None) -> Partials:
    """Run the kernel; arguments as in `kvpress.kernels.attention.triton.launch`."""
    keys, values = rows.keys.storage, rows.values.storage
    D, DV = keys.shape[1], values.shape[1]
    DP, DVP = padded(D), padded(DV)
    block = block_rows(DP + DVP, keys.element_size())
    limit = registers(padded(q.shape[1]))
    grid = plan(q, where.most_rows(rows.count), block, resident(WARPS, limit, RESIDENT))
    results = partials(q, grid, where.lengths, block, DV)
    if results.lse.numel():
        _kernel[grid.programs](
            q.contiguous(),
            keys,
            values,
            *streams(where),
            rows.log_weight,
            offsets(added),
            results.out,
            results.lse,
            keys.stride(0),
            values.stride(0),
            q.shape[1],
            grid.streams,
            grid.splits,
            width(where),
            positions(added),
            causal(options),
            options.scale,
            options.softcap,
            D,
            DV,
            DP,
            DVP,
            grid.rows,
            block,
            grid.padded_streams,
            num_warps=WARPS,
            num_stages=3,
            maxnreg=limit,
        )
    return results
