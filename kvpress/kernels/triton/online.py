# SPDX-License-Identifier: Apache-2.0
"""Code shared by split-KV decode kernels: the split of a stream, logits, online softmax and partial results.

Logits are in base 2, and weights are multiplied by 2 ** LIFT: a 16-bit float then represents weights down to 2 ** -29 of the
largest one without loss, so that many small weights beside an attention sink are not flushed to zero. The factor cancels in
the quotient.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvpress.kernels.triton import grid

MOST_SPLITS, LEAST_BLOCKS = tl.constexpr(grid.MOST_SPLITS), tl.constexpr(grid.LEAST_BLOCKS)
LIFT = tl.constexpr(15)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def splits_of(LENGTHS, streams, splits, BLOCK: tl.constexpr, NP: tl.constexpr):
    """Divide the blocks of all streams among `splits` programs, each with blocks of one stream, about as many in every one.

    Long streams get more programs than short ones, so that none ends late. Nothing is read by the host: a recorded launch
    follows the lengths. A stream's last program may have fewer blocks, for which one program a stream is set aside: there are
    never more than `splits`, which run at once.

    Returns:
        Number of programs of each stream, int32 [NP].
    """
    stream = tl.arange(0, NP)
    blocks = tl.cdiv(tl.load(LENGTHS + stream, mask=stream < streams, other=0).to(tl.int32), BLOCK)
    fewest = tl.maximum(LEAST_BLOCKS, tl.cdiv(tl.max(blocks, 0), MOST_SPLITS))
    return tl.cdiv(blocks, tl.maximum(fewest, tl.cdiv(tl.sum(blocks, 0), splits - streams)))


@triton.jit
def split_of(LENGTHS, streams, splits, BLOCK: tl.constexpr, NP: tl.constexpr):
    """Return the stream of this program, the number of its split, and the splits of the stream.

    Programs without work get a split past the last one. One program reads a stream where NP is 0.
    """
    program = tl.program_id(0)
    if NP == 0:
        return program.to(tl.int64), 0, 1
    else:
        counts = splits_of(LENGTHS, streams, splits, BLOCK, NP)
        n = tl.minimum(tl.sum((tl.cumsum(counts, 0) <= program).to(tl.int32), 0), streams - 1)
        first, count = own_splits(counts, n, NP)
        return n.to(tl.int64), program - first, tl.maximum(count, 1)


@triton.jit
def own_splits(counts, n, NP: tl.constexpr):
    """Return the number of the first program of stream n, and the number of its programs."""
    stream = tl.arange(0, NP)
    return tl.sum(tl.where(stream < n, counts, 0), 0), tl.sum(tl.where(stream == n, counts, 0), 0)


@triton.jit
def share(length, split, splits, BLOCK: tl.constexpr):
    """Return the first row of a split and the end of it: whole blocks, as many in every split of the stream."""
    chunk = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    first = split * chunk
    return first, tl.minimum(first + chunk, length)


@triton.jit
def visible(m, length, causal):
    """Return the number of rows of the stream that each query row sees: all, or all but the tokens after the query's."""
    if causal is None:
        return tl.zeros_like(m) + length
    else:
        return length - causal + m % causal + 1


@triton.jit
def added(products, shifts, positions, n, m, row, live_m, live, M, places):
    """Load the products of query rows m of stream n with the offsets of rows [BN], by position: float32 [BM, BN]."""
    at = row + tl.load(shifts + n)
    if positions is not None:
        at = tl.load(positions + row, mask=live, other=0) + tl.load(shifts + n)
    entry = (n * M + m[:, None]) * places + at[None, :]
    return tl.load(products + entry, mask=live_m[:, None] & live[None, :], other=0.0)


@triton.jit
def to_logits(products, scale, softcap):
    """Convert products q . k to logits in base 2."""
    logits = products * scale
    if softcap is not None:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), which saturates instead of overflowing
        logits = softcap * (1 - 2 / (1 + tl.exp2(logits * (2 * LOG2E / softcap))))
    return logits * LOG2E


@triton.jit
def update(logits, largest, total, AXIS: tl.constexpr = 1):
    """Do one block of online softmax over an axis: return weights, the factor of earlier sums, the new maximum and total."""
    new = tl.maximum(largest, tl.max(logits, AXIS))
    safe = tl.where(new == -float("inf"), 0.0, new)  # all rows masked so far: (-inf) - (-inf) would be NaN
    weights = tl.exp2(logits - tl.expand_dims(safe - LIFT, AXIS))
    keep = tl.exp2(largest - safe)
    return weights, keep, new, total * keep + tl.sum(weights, AXIS)


@triton.jit
def store_lse(LSE, at, live, largest, total):
    """Store the natural log-sum-exp, minus infinity where no row was seen; return the factor that normalises outputs."""
    seen = total != 0  # NaN counts as seen and stays NaN
    safe = tl.where(seen, total, 1.0)
    lse = (largest + tl.log2(safe) - LIFT) * LN2
    tl.store(LSE + at, tl.where(seen, lse, -float("inf")), mask=live)
    return tl.where(seen, 1 / safe, 0.0)
