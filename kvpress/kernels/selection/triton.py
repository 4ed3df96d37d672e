# SPDX-License-Identifier: Apache-2.0
"""Numbers of the rows with the largest scores in Triton: a search for the smallest chosen score, in one launch.

One program serves a stream. Scores are mapped to integers of 32 bits in the same order. Each of 16 passes counts the integers
from three thresholds on, which settles two bits of the smallest chosen one. A last pass lists the rows above it, and as many
equal ones as fit, in ascending order. Counting takes few instructions and no atomics, as a histogram of several bits would.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.formats.operand import Ranges
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import padded

BLOCK, WARPS = 4096, 16
"""Scores that a program reads at a time, and its warps: 8 scores of each thread."""

FIELD = 10
"""Bits in which a thread counts: enough for 1023 trips, 4 million scores."""

COLUMNS = 1024
"""Rows of chosen blocks that a program lists."""


@triton.jit
def _order(scores):
    """Map float32 to uint32 in the same order: -0.0 like 0.0, NaN below minus infinity."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    signed = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    unsigned = signed.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(scores == scores, unsigned, tl.zeros_like(unsigned))


@triton.jit
def _counts(SCORES, low, high, i, first, second, third, BLOCK: tl.constexpr, FIELD: tl.constexpr):
    """Count the scores low .. high - 1 from each threshold on: int32 [BLOCK] with three fields, to be summed."""
    counts = tl.zeros([BLOCK], tl.int32)
    for at in tl.range(low, high, BLOCK):
        live = at + i < high
        key = _order(tl.load(SCORES + at + i, mask=live, other=0.0))
        trip = (key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << FIELD)
        counts += tl.where(live, trip + ((key >= third).to(tl.int32) << (2 * FIELD)), 0)
    return counts


@triton.jit(do_not_specialize=["capacity", "width", "first", "last"])
def _kernel(
    SCORES, STARTS, LENGTHS, MOST, ROWS, COUNTS, stride, capacity, width, first, last, BLOCK: tl.constexpr, FIELD: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(LENGTHS + n), capacity).to(tl.int32)
    count = tl.minimum(length, width)
    if MOST is not None:
        count = tl.minimum(count, tl.load(MOST + n).to(tl.int32))
    # Rows below `low` and from `high` on are always chosen, and `wanted` of the others.
    low = tl.minimum(first, length)
    high = tl.maximum(length - last, low)
    wanted = count - (length - (high - low))
    SCORES += n * stride
    i = tl.arange(0, BLOCK)

    smallest = tl.zeros([], tl.uint32)
    for step in tl.range(16):
        bit = tl.full([], 1, tl.uint32) << (30 - 2 * step)
        counts = _counts(SCORES, low, high, i, smallest + bit, smallest + 2 * bit, smallest + 3 * bit, BLOCK, FIELD)
        digit = tl.zeros([], tl.uint32)
        for threshold in tl.static_range(3):
            above = tl.sum((counts >> (FIELD * threshold)) & ((1 << FIELD) - 1), 0)
            digit += (above >= wanted).to(tl.uint32)
        smallest += digit * bit
    for at in tl.range(low, high, BLOCK):
        key = _order(tl.load(SCORES + at + i, mask=at + i < high, other=0.0))
        wanted -= tl.sum(((at + i < high) & (key > smallest)).to(tl.int32), 0)

    ROWS += n * width
    start = tl.load(STARTS + n)
    taken = low * 0
    for at in tl.range(0, length, BLOCK):
        rank = at + i
        live = rank < length
        key = _order(tl.load(SCORES + rank, mask=live, other=0.0))
        is_open = (rank >= low) & (rank < high)
        ties = (is_open & (key == smallest)).to(tl.int32)
        chosen = live & ((is_open == 0) | (key > smallest) | ((ties > 0) & (tl.cumsum(ties, 0) <= wanted)))
        wanted -= tl.sum(ties, 0)
        place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(ROWS + place, (start + rank).to(tl.int32), mask=chosen & (place < width))
        taken += tl.sum(chosen.to(tl.int32), 0)
    for at in tl.range(count, width, BLOCK):
        tl.store(ROWS + at + i, tl.zeros([BLOCK], tl.int32), mask=at + i < width)
    tl.store(COUNTS + n, count.to(tl.int64))


@on_device
def choose(
    scores: Tensor, where: Ranges, k: int, first: int = 0, last: int = 0, limits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the kernel on checked arguments; arguments and results as in `kvpress.kernels.top_rows`."""
    streams, capacity = scores.shape
    rows = torch.empty(streams, min(k, capacity), dtype=torch.int32, device=scores.device)
    counts = torch.empty(streams, dtype=torch.int64, device=scores.device)
    if rows.numel():
        _kernel[(streams,)](
            scores,
            where.starts.contiguous(),
            where.lengths.contiguous(),
            None if limits is None else limits.contiguous(),
            rows,
            counts,
            scores.stride(0),
            capacity,
            rows.shape[1],
            first,
            last,
            min(BLOCK, padded(capacity, 1024)),
            FIELD,
            num_warps=WARPS if capacity > BLOCK // 2 else WARPS // 4,
        )
    else:
        counts.zero_()
    return rows, counts


@triton.jit(do_not_specialize=["K", "width"])
def _blocks_kernel(
    CHOSEN, CHOSEN_COUNTS, BLOCK_STARTS, PAIR_STARTS, PAIR_LENGTHS, ROWS, COUNTS, K, width, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1).to(tl.int64)
    count = tl.load(CHOSEN_COUNTS + n).to(tl.int32)
    first_block = tl.load(BLOCK_STARTS + n)
    start, length = tl.load(PAIR_STARTS + n), tl.load(PAIR_LENGTHS + n)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = column // SIZE
    block = tl.load(CHOSEN + n * K + k, mask=k < tl.minimum(count, K), other=0)
    rank = (block - first_block) * SIZE + column % SIZE
    exists = (k < count) & (rank < length)
    tl.store(ROWS + n * width + column, tl.where(exists, start + rank, 0).to(tl.int32), mask=column < width)
    if tl.program_id(0) == 0:
        final = tl.load(CHOSEN + n * K + tl.maximum(count - 1, 0)) - first_block
        tl.store(COUNTS + n, tl.where(count > 0, (count - 1) * SIZE + tl.minimum(SIZE, length - final * SIZE), 0))


@on_device
def of_blocks(
    chosen: Tensor, chosen_counts: Tensor, blocks: Ranges, pairs: Ranges, size: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Run the kernel on checked arguments; arguments and results as in `kvpress.kernels.rows_of_blocks`."""
    streams, width = chosen.shape
    device = chosen.device
    rows = torch.empty(streams, min(width * size, longest), dtype=torch.int32, device=device)
    counts = torch.empty(streams, dtype=torch.int64, device=device)
    if rows.numel():
        _blocks_kernel[(-(-rows.shape[1] // COLUMNS), streams)](
            chosen.contiguous(),
            chosen_counts.contiguous(),
            blocks.starts.contiguous(),
            pairs.starts.contiguous(),
            pairs.lengths.contiguous(),
            rows,
            counts,
            width,
            rows.shape[1],
            size,
            COLUMNS,
        )
    else:
        counts.zero_()
    return rows, counts
