# SPDX-License-Identifier: Apache-2.0
"""Scores of pages and labels in Triton.

One program reads a block of rows once and multiplies it with all queries of its stream, so the result needs no merge. There is
no loop over rows to prefetch in: a block is small, and many concurrent programs hide its latency. Products of 16-bit rows run
on tensor cores with float32 sums, with queries rounded to the dtype of the rows, as in dense attention. Codes are float16, and
their scale and zero are applied to the sum:  q . (c * s + z) = s * (q . c) + z * sum(q), without zeros with z = -s * point.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.operand import Ranges
from kvpress.kernels.formats.packed import Packed
from kvpress.kernels.triton import codes
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import launches, padded

TILE_BYTES = 16 * 1024
"""Bytes of rows that one program reads."""

WARPS, STAGES = 4, 1

MOST_QUERIES = 16
"""Most query rows of a tile: the sums of more would spill from registers."""


@triton.jit(do_not_specialize=["M", "width"])
def _kernel(
    Q, LOW, HIGH, SCALE, ZERO, STARTS, COUNTS, OUT, stride, M, width,
    REDUCE: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    POINT: tl.constexpr = 0.0,
):  # fmt: skip
    """Score a block of rows; elements of HIGH are channels, or with BITS > 0 bytes of 8 // BITS codes."""
    PARTS: tl.constexpr = 8 // BITS if BITS > 0 else 1
    n = tl.program_id(1).to(tl.int64)  # 64 bits: row * stride overflows int32 at 128k rows of 8 heads
    count = tl.load(COUNTS + n).to(tl.int32)
    first_row = tl.program_id(0) * BN
    i = first_row + tl.arange(0, BN)
    d = tl.arange(0, DP)
    live, live_d = i < count, d < D // PARTS
    row = tl.load(STARTS + n) + i
    at = row[None, :] * stride + d[:, None]
    high = tl.load(HIGH + at, mask=live[None, :] & live_d[:, None], other=0)
    if LOW is not None:
        low = tl.load(LOW + at, mask=live[None, :] & live_d[:, None], other=0)
    if BITS > 0:
        scale = tl.load(SCALE + row, mask=live, other=0.0).to(tl.float32)
        zero = -POINT * scale
        if ZERO is not None:
            zero = tl.load(ZERO + row, mask=live, other=0.0).to(tl.float32)
    out = tl.full([BN], -float("inf") if REDUCE == "max" else 0.0, tl.float32)
    queries = tl.where(first_row < count, M, 0)  # blocks past the end of the stream read no queries
    for first in tl.range(0, queries, BM):
        m = first + tl.arange(0, BM)
        live_m = m < M
        scores = tl.zeros([BM, BN], tl.float32)
        total = tl.zeros([BM], tl.float32)
        for p in tl.static_range(PARTS):
            channel = p * (D // PARTS) + d
            mask = live_m[:, None] & live_d[None, :]
            q = tl.load(Q + (n * M + m[:, None]) * D + channel[None, :], mask=mask, other=0.0)
            if BITS > 0:
                code = codes.unpack(high, high, p, 0, BITS)
                q = q.to(tl.float16)
                scores = tl.dot(q, code, scores)
                total += tl.sum(q.to(tl.float32), 1)
            elif LOW is None:
                scores = tl.dot(q.to(high.dtype), high, scores, input_precision="ieee")
            else:
                # max(q low, q high) = max(q, 0) high + min(q, 0) low for every channel
                q = q.to(tl.float32)
                scores = tl.dot(tl.maximum(q, 0.0).to(high.dtype), high, scores, input_precision="ieee")
                scores = tl.dot(tl.minimum(q, 0.0).to(low.dtype), low, scores, input_precision="ieee")
        if BITS > 0:
            scores = scores * scale[None, :] + total[:, None] * zero[None, :]
        if REDUCE == "max":
            out = tl.maximum(out, tl.max(tl.where(live_m[:, None], scores, -float("inf")), 0))
        else:
            out += tl.sum(scores, 0)
    tl.store(OUT + n * width + i, tl.where(live, out, -float("inf")), mask=i < width)


@on_device
def score(q: Tensor, low: Dense | None, high: Dense | Packed, where: Ranges, reduce: str, capacity: int) -> Tensor:
    """Run the kernel on checked arguments; rows past the capacity are not scored."""
    streams, queries, D = q.shape
    packed = high if isinstance(high, Packed) else None
    rows = high.storage
    row_width = rows.shape[1]
    block = block_rows(row_width, rows.element_size() * (1 if low is None else 2))
    out = q.new_empty(streams, capacity, dtype=torch.float32)
    for part in launches(streams) if out.numel() else ():
        _kernel[(-(-capacity // block), part.stop - part.start)](
            q[part].contiguous(),
            None if low is None else low.data,
            rows,
            None if packed is None else packed.scale,
            None if packed is None else packed.zero,
            where.starts[part].contiguous(),
            where.lengths[part].contiguous(),
            out[part],
            rows.stride(0),
            queries,
            capacity,
            reduce,
            D,
            0 if packed is None else packed.bits,
            padded(row_width),
            min(MOST_QUERIES, padded(queries)),
            block,
            0.0 if packed is None else float(packed.zero_point),
            num_warps=WARPS,
            num_stages=STAGES,
            maxnreg=registers(D, 0 if packed is None else packed.bits),
        )
    return out


def block_rows(row_width: int, element_bytes: int) -> int:
    """Return the rows of one program, for rows of `row_width` elements of `element_bytes` bytes."""
    return min(256, max(16, TILE_BYTES // (padded(row_width) * element_bytes)))


def registers(channels: int, bits: int = 0) -> int | None:
    """Return the limit of registers per thread, None for none: without it, ptxas spills for small tiles, to run more programs.

    Rows with many channels need more registers; so do codes with fewer channels, which are unpacked into several tiles.
    """
    return 128 if channels <= (32 if bits > 1 else 128) else None
