# SPDX-License-Identifier: Apache-2.0
"""Numbers of the rows with the largest scores in long streams: several programs read one stream, in seven launches.

Scores are mapped to integers of 32 bits in the same order, which are searched for the smallest chosen one, digit by digit. Each
of five launches counts how many integers with the digits found so far have which next digit, and every program of the next
launch finds the same digit in the counts. Then each program counts its chosen and equal integers, and lists them behind
those of the programs before it.
"""

# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.formats.operand import Ranges
from kvpress.kernels.triton.order import order

CHUNK, BLOCK, WARPS = 8192, 4096, 8
"""Scores of a program, scores that it reads at a time, and its warps."""

PLACES, LARGEST = (25, 18, 11, 4, 0), (127, 127, 127, 127, 15)
"""Lowest bit of each digit, and its largest value. Triton counts into few bins much faster than into many."""

BINS = tl.constexpr(max(LARGEST) + 1)
DIGITS = tl.constexpr(len(PLACES))


@triton.jit
def bounds(LENGTHS, MOST, n, capacity, width, first, last):
    """Return the length of a stream, the rows to choose, and the range of rows that compete: the others are always chosen."""
    length = tl.minimum(tl.load(LENGTHS + n), capacity).to(tl.int32)
    count = tl.minimum(length, width)
    if MOST is not None:
        count = tl.minimum(count, tl.load(MOST + n).to(tl.int32))
    low = tl.minimum(first, length)
    return length, count, low, tl.maximum(length - last, low)


@triton.jit
def _found(HISTOGRAMS, n, streams, wanted, KNOWN: tl.constexpr, PLACES: tl.constexpr, LARGEST: tl.constexpr):
    """Return the integer made of the digits that are known, and how many integers with these digits are still wanted."""
    bins = tl.arange(0, BINS)
    smallest = tl.zeros([], tl.uint32)
    loaded = ()
    for k in tl.static_range(KNOWN):
        loaded += (tl.load(HISTOGRAMS + (k * streams + n) * BINS + bins),)
    for k in tl.static_range(KNOWN):
        counts = loaded[k]
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # integers with a larger digit
        digit = tl.sum((above >= wanted).to(tl.int32), 0)  # the smallest digit with fewer than `wanted` above it
        digit = tl.minimum(digit, LARGEST[k])
        wanted -= tl.sum(tl.where(bins > digit, counts, 0), 0)
        smallest += digit.to(tl.uint32) << PLACES[k]
    return smallest, wanted


@triton.jit(do_not_specialize=["streams", "capacity", "width", "first", "last"])
def _histogram_kernel(
    SCORES, LENGTHS, MOST, HISTOGRAMS, stride, streams, capacity, width, first, last,
    KNOWN: tl.constexpr, PLACES: tl.constexpr, LARGEST: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the next digit of the integers of a chunk that have the known digits."""
    n = tl.program_id(1).to(tl.int64)
    length, count, low, high = bounds(LENGTHS, MOST, n, capacity, width, first, last)
    smallest, _ = _found(HISTOGRAMS, n, streams, count - (length - (high - low)), KNOWN, PLACES, LARGEST)
    begin = tl.program_id(0) * CHUNK
    i, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    for at in tl.range(tl.maximum(begin, low // BLOCK * BLOCK), tl.minimum(begin + CHUNK, high), BLOCK):
        live = (at + i >= low) & (at + i < high)
        key = order(tl.load(SCORES + n * stride + at + i, mask=live, other=0.0))
        if KNOWN > 0:
            live &= (key >> PLACES[KNOWN - 1]) == (smallest >> PLACES[KNOWN - 1])
        counts = tl.histogram(((key >> PLACES[KNOWN]) & LARGEST[KNOWN]).to(tl.int32), BINS, mask=live)
        tl.atomic_add(HISTOGRAMS + (KNOWN * streams + n) * BINS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _choices(SCORES, rank, length, low, high, smallest):
    """Return which rows are chosen without regard to their number, and which equal the smallest chosen integer."""
    key = order(tl.load(SCORES + rank, mask=rank < length, other=0.0))
    competes = (rank >= low) & (rank < high)
    return (rank < length) & ((competes == 0) | (key > smallest)), competes & (key == smallest)


@triton.jit(do_not_specialize=["streams", "capacity", "width", "first", "last"])
def _count_kernel(
    SCORES, LENGTHS, MOST, HISTOGRAMS, SUMS, stride, streams, capacity, width, first, last,
    PLACES: tl.constexpr, LARGEST: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the chosen and the equal rows of a chunk."""
    n = tl.program_id(1).to(tl.int64)
    length, count, low, high = bounds(LENGTHS, MOST, n, capacity, width, first, last)
    smallest, _ = _found(HISTOGRAMS, n, streams, count - (length - (high - low)), DIGITS, PLACES, LARGEST)
    i, begin = tl.arange(0, BLOCK), tl.program_id(0) * CHUNK
    chosen, equal = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for at in tl.range(begin, tl.minimum(begin + CHUNK, length), BLOCK):
        above, same = _choices(SCORES + n * stride, at + i, length, low, high, smallest)
        chosen += above.to(tl.int32)
        equal += same.to(tl.int32)
    at = (n * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(SUMS + at, tl.sum(chosen, 0))
    tl.store(SUMS + at + 1, tl.sum(equal, 0))


@triton.jit(do_not_specialize=["streams", "capacity", "width", "first", "last"])
def _list_kernel(
    SCORES, STARTS, LENGTHS, MOST, HISTOGRAMS, SUMS, ROWS, COUNTS, stride, streams, capacity, width, first, last,
    PLACES: tl.constexpr, LARGEST: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """List the chosen rows of a chunk, and as many equal ones as still fit, behind those of earlier chunks."""
    n = tl.program_id(1).to(tl.int64)
    length, count, low, high = bounds(LENGTHS, MOST, n, capacity, width, first, last)
    smallest, wanted = _found(HISTOGRAMS, n, streams, count - (length - (high - low)), DIGITS, PLACES, LARGEST)
    chunk, chunks = tl.arange(0, CHUNKS), tl.num_programs(0)
    earlier = chunk < tl.program_id(0)
    sums = SUMS + (n * chunks + chunk) * 2
    wanted = tl.maximum(wanted, 0)
    ties_before = tl.sum(tl.load(sums + 1, mask=earlier, other=0), 0)
    taken = tl.sum(tl.load(sums, mask=earlier, other=0), 0) + tl.minimum(ties_before, wanted)
    wanted = tl.maximum(wanted - ties_before, 0)

    ROWS += n * width
    start = tl.load(STARTS + n)
    i, begin = tl.arange(0, BLOCK), tl.program_id(0) * CHUNK
    for at in tl.range(begin, tl.minimum(begin + CHUNK, length), BLOCK):
        above, same = _choices(SCORES + n * stride, at + i, length, low, high, smallest)
        ties = same.to(tl.int32)
        chosen = (above | (same & (tl.cumsum(ties, 0) <= wanted))).to(tl.int32)
        wanted -= tl.sum(ties, 0)
        place = taken + tl.cumsum(chosen, 0) - 1
        tl.store(ROWS + place, (start + at + i).to(tl.int32), mask=(chosen > 0) & (place < width))
        taken += tl.sum(chosen, 0)
    for at in tl.range(count + tl.program_id(0) * BLOCK, width, chunks * BLOCK):
        tl.store(ROWS + at + i, tl.zeros([BLOCK], tl.int32), mask=at + i < width)
    if tl.program_id(0) == 0:
        tl.store(COUNTS + n, count.to(tl.int64))


def choose(
    scores: Tensor, where: Ranges, rows: Tensor, counts: Tensor, first: int, last: int, limits: Tensor | None
) -> None:
    """Fill rows and counts; arguments as in `kvpress.kernels.top_rows`."""
    streams, capacity = scores.shape
    chunks = -(-capacity // CHUNK)
    starts, lengths = where.starts.contiguous(), where.lengths.contiguous()
    most = None if limits is None else limits.contiguous()
    histograms = torch.zeros(len(PLACES), streams, max(LARGEST) + 1, dtype=torch.int32, device=scores.device)
    sums = torch.empty(streams, chunks, 2, dtype=torch.int32, device=scores.device)
    sizes = (scores.stride(0), streams, capacity, rows.shape[1], first, last)
    grid, read = (chunks, streams), (scores, lengths, most, histograms)
    for known in range(len(PLACES)):
        _histogram_kernel[grid](*read, *sizes, known, PLACES, LARGEST, CHUNK, BLOCK, num_warps=WARPS)
    _count_kernel[grid](*read, sums, *sizes, PLACES, LARGEST, CHUNK, BLOCK, num_warps=WARPS)
    _list_kernel[grid](
        scores, starts, *read[1:], sums, rows, counts, *sizes, PLACES, LARGEST, CHUNK, BLOCK, triton.next_power_of_2(chunks),
        num_warps=WARPS,
    )  # fmt: skip
