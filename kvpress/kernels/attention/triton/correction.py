# SPDX-License-Identifier: Apache-2.0
"""Corrections of decoded rows as terms of logits and outputs; `kvpress.kernels.formats.correction` defines them.

No corrected row is ever formed. The rows of a tile lie in few chunks, so a low-rank term is two thin products per chunk:

    logits    (q . basis) . factor               output    (weights . factor) . basis

An outlier of a key is multiplied with one element of the query. Outliers of values are a product too: with channel
LOW * h + l, the deltas by low part l, [LOW, rows], times the weights of rows by high part h.

Loops over chunks and outliers are inside an `if`: Triton then still prefetches in the loop over tiles.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from kvpress.kernels.triton import codes

LOW = tl.constexpr(16)

ENTRIES = tl.constexpr(64)
"""Outliers of a tile that are handled at a time: one per thread of two warps."""

NO_CHUNK = tl.constexpr(2**31 - 1)


@triton.jit
def key_low_rank(
    q, products, FACTOR, BASIS, CHUNK, row, live, j, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Add the products of queries, in the pieces of `packed_kernel`, with the low-rank terms of keys: float32 [BN, BM]."""
    chunk = tl.load(CHUNK + row, mask=live, other=NO_CHUNK)
    current = tl.min(chunk, 0)
    k = tl.arange(0, RP)
    if current < NO_CHUNK:
        while current < NO_CHUNK:
            inner = tl.zeros([RP, products.shape[1]], tl.float32)
            for c in tl.static_range(C):
                column = c * W + j[None, :]
                mask = (column < D // PARTS // UNIT) & (k < RANK)[:, None]
                for p in tl.static_range(PARTS):
                    for b in tl.static_range(UNIT):
                        channel = codes.channel(p, b, column, D, PARTS, UNIT)
                        at = (current.to(tl.int64) * RANK + k[:, None]) * D + channel
                        basis = tl.load(BASIS + at, mask=mask, other=0.0)
                        query = q[(c * PARTS + p) * UNIT + b].to(basis.dtype)
                        inner = tl.dot(basis, query, inner, input_precision="tf32")
            mine = (chunk == current)[:, None] & (k < RANK)[None, :]
            factor = tl.load(FACTOR + row[:, None] * RANK + k[None, :], mask=mine, other=0.0)
            products = tl.dot(factor.to(tl.float32), inner, products, input_precision="tf32")
            current = tl.min(tl.where(chunk > current, chunk, NO_CHUNK), 0)
    return products


@triton.jit
def value_low_rank(
    weights, acc, FACTOR, BASIS, CHUNK, row, live, j, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Add the products of weights [BN, BM] with the low-rank terms of values to outputs, in the pieces of `packed_kernel`."""
    chunk = tl.load(CHUNK + row, mask=live, other=NO_CHUNK)
    current = tl.min(chunk, 0)
    k = tl.arange(0, RP)
    if current < NO_CHUNK:
        while current < NO_CHUNK:
            mine = (chunk == current)[None, :] & (k < RANK)[:, None]
            factor = tl.load(FACTOR + row[None, :] * RANK + k[:, None], mask=mine, other=0.0)
            inner = tl.dot(factor, weights.to(factor.dtype), input_precision="tf32")
            new = ()
            for c in tl.static_range(C):
                column = c * W + j[:, None]
                mask = (column < D // PARTS // UNIT) & (k < RANK)[None, :]
                for p in tl.static_range(PARTS):
                    for b in tl.static_range(UNIT):
                        channel = codes.channel(p, b, column, D, PARTS, UNIT)
                        at = (current.to(tl.int64) * RANK + k[None, :]) * D + channel
                        basis = tl.load(BASIS + at, mask=mask, other=0.0).to(tl.float32)
                        new += (tl.dot(basis, inner, acc[(c * PARTS + p) * UNIT + b], input_precision="tf32"),)
            acc = new
            current = tl.min(tl.where(chunk > current, chunk, NO_CHUNK), 0)
    return acc


@triton.jit
def key_outliers(Q, m, live_m, FIRST, CHANNEL, DELTA, row, live, D: tl.constexpr):
    """Return the products of query rows m with the outliers of keys, float32 [BN, BM]."""
    BN: tl.constexpr = row.shape[0]
    SLOTS: tl.constexpr = ENTRIES // BN
    first, count, longest = entries_of(FIRST, row, live)
    products = tl.zeros([BN, m.shape[0]], tl.float32)
    if longest > 0:
        for e in tl.range(0, longest, SLOTS):
            channel, delta = slots_of(CHANNEL, DELTA, first, count, e, SLOTS)
            query = tl.load(Q + m[None, :] * D + channel[:, None], mask=live_m[None, :], other=0.0)
            terms = query.to(tl.float32) * delta[:, None].to(tl.float32)
            products += tl.sum(tl.reshape(terms, [SLOTS, BN, m.shape[0]]), 0)
    return products


@triton.jit
def value_outliers(weights, keep, acc, FIRST, CHANNEL, DELTA, row, live):
    """Scale the accumulator by `keep` and add the products of weights [BN, BM] with the outliers of values.

    The accumulator is float32 [LOW, BM * HIGH], with channel h * LOW + l of query row m at (l, m * HIGH + h).
    """
    BN: tl.constexpr = weights.shape[0]
    BM: tl.constexpr = weights.shape[1]
    HIGH: tl.constexpr = acc.shape[1] // BM
    SLOTS: tl.constexpr = ENTRIES // BN
    high, low = tl.arange(0, HIGH), tl.arange(0, LOW)
    acc *= tl.reshape(tl.broadcast_to(keep[:, None], [BM, HIGH]), [BM * HIGH])[None, :]
    first, count, longest = entries_of(FIRST, row, live)
    if longest > 0:
        slots = tl.reshape(tl.broadcast_to(weights[None, :, :], [SLOTS, BN, BM]), [SLOTS * BN, BM, 1])
        for e in tl.range(0, longest, SLOTS):
            channel, delta = slots_of(CHANNEL, DELTA, first, count, e, SLOTS)
            is_high = (channel // LOW)[:, None, None] == high[None, None, :]
            by_high = tl.reshape(tl.where(is_high, slots, 0.0), [SLOTS * BN, BM * HIGH]).to(delta.dtype)
            by_low = tl.where((channel % LOW)[None, :] == low[:, None], delta[None, :], 0.0).to(delta.dtype)
            acc = tl.dot(by_low, by_high, acc, input_precision="tf32")
    return acc


@triton.jit
def outlier_outputs(acc, channel, BM: tl.constexpr):
    """Return some channels of an accumulator of `value_outliers`: [channels, BM]."""
    rows = tl.reshape(tl.trans(acc), [BM, acc.shape[0] * acc.shape[1] // BM])
    return tl.trans(tl.gather(rows, tl.broadcast_to(channel[None, :], [BM, channel.shape[0]]), 1))


@triton.jit
def entries_of(FIRST, row, live):
    """Return the first outlier of each row, the number of outliers of each row, and the largest number."""
    first = tl.load(FIRST + row, mask=live, other=0)
    count = tl.load(FIRST + row + 1, mask=live, other=0) - first
    return first, count, tl.max(count, 0)


@triton.jit
def slots_of(CHANNEL, DELTA, first, count, e, SLOTS: tl.constexpr):
    """Return channel and delta of SLOTS outliers of every row, from number e on; the delta is 0 past the last one."""
    e += tl.arange(0, SLOTS)[:, None]
    at = tl.reshape(first[None, :] + e, [SLOTS * first.shape[0]])
    live = tl.reshape(e < count[None, :], at.shape)
    channel = tl.load(CHANNEL + at, mask=live, other=0).to(tl.int32)
    return channel, tl.load(DELTA + at, mask=live, other=0.0)
