# SPDX-License-Identifier: Apache-2.0
"""Numbers of the rows with the largest scores in Triton: a search for the smallest chosen score, in one launch.

One program serves a stream. Scores are mapped to integers of 32 bits in the same order. Each of 16 passes counts the integers
from three thresholds on, which settles two bits of the smallest chosen one. Then the rows above it are listed, and as many
equal ones as fit, in ascending order. Counting takes few instructions and no atomics, as a histogram of several bits would.
The integers stay in registers; `parallel` serves streams that are too long for that.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.formats.operand import Ranges
from kvpress.kernels.selection import parallel
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import launches, padded
from kvpress.kernels.triton.order import order

LONGEST, PER_THREAD = 8192, 16
"""Most scores of a stream that one program reads, and scores of a thread."""

COLUMNS = 1024
"""Rows of chosen blocks that a program lists."""


@triton.jit
def _smallest(key, competes, wanted):
    """Return the smallest of the `wanted` largest integers among those that compete."""
    smallest = tl.zeros([], tl.uint32)
    for step in tl.range(16):
        bit = tl.full([], 1, tl.uint32) << (30 - 2 * step)
        counts = tl.zeros_like(key).to(tl.int64)
        for threshold in tl.static_range(3):  # three counts of 20 bits: one sum instead of three
            reached = competes & (key >= smallest + (threshold + 1) * bit)
            counts += reached.to(tl.int64) << (20 * threshold)
        total = tl.sum(counts, 0)
        digit = tl.zeros([], tl.uint32)
        for threshold in tl.static_range(3):
            digit += (((total >> (20 * threshold)) & 0xFFFFF) >= wanted).to(tl.uint32)
        smallest += digit * bit
    return smallest


@triton.jit(do_not_specialize=["capacity", "width", "first", "last"])
def _kernel(
    SCORES, STARTS, LENGTHS, MOST, ROWS, COUNTS, stride, capacity, width, first, last, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    length, count, low, high = parallel.bounds(LENGTHS, MOST, n, capacity, width, first, last)
    wanted = count - (length - (high - low))
    i = tl.arange(0, BLOCK)
    competes = (i >= low) & (i < high)
    key = order(tl.load(SCORES + n * stride + i, mask=i < length, other=0.0))
    smallest = _smallest(key, competes, wanted)
    above, ties = competes & (key > smallest), competes & (key == smallest)
    fitting = wanted - tl.sum(above.to(tl.int32), 0)
    chosen = (i < length) & ((competes == 0) | above | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= fitting)))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    ROWS += n * width
    tl.store(ROWS + place, (tl.load(STARTS + n) + i).to(tl.int32), mask=chosen & (place < width))
    tl.store(ROWS + i, tl.zeros([BLOCK], tl.int32), mask=(i >= count) & (i < width))
    tl.store(COUNTS + n, count.to(tl.int64))


@on_device
def choose(
    scores: Tensor, where: Ranges, k: int, first: int = 0, last: int = 0, limits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the kernel on checked arguments; arguments and results as in `kvpress.kernels.top_rows`."""
    streams, capacity = scores.shape
    rows = torch.empty(streams, min(k, capacity), dtype=torch.int32, device=scores.device)
    counts = torch.empty(streams, dtype=torch.int64, device=scores.device)
    if not rows.numel():
        counts.zero_()
    elif capacity > LONGEST:
        parallel.choose(scores, where, rows, counts, first, last, limits)
    else:
        block = padded(capacity, 2048)
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
            block,
            num_warps=block // (32 * PER_THREAD),
        )
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
    for part in launches(streams) if rows.numel() else ():
        _blocks_kernel[(-(-rows.shape[1] // COLUMNS), part.stop - part.start)](
            chosen[part].contiguous(),
            chosen_counts[part].contiguous(),
            blocks.starts[part].contiguous(),
            pairs.starts[part].contiguous(),
            pairs.lengths[part].contiguous(),
            rows[part],
            counts[part],
            width,
            rows.shape[1],
            size,
            COLUMNS,
        )
    if not rows.numel():
        counts.zero_()
    return rows, counts
