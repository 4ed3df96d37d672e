# SPDX-License-Identifier: Apache-2.0
"""Split-KV decode attention on codes of codebooks.

One program decodes a block of rows once for all query heads of a GQA group: one load reads the c channels of a code's centroid,
mostly from the L1 cache, which holds the book of a head (64 KiB for 256 entries and 128 float16 channels). Products have the
dtype of the books, with float32 sums. Keys stored before their rotary embedding are decoded as two tiles, with the two channels
of a rotated pair at the same index, and rotated in float32. Row scales are multiplied into values, not into weights, which
would leave the range of a 16-bit float. Outliers are terms of logits and outputs, as in `correction`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.attention.triton import correction
from kvpress.kernels.attention.triton.merge import Partials, partials
from kvpress.kernels.attention.triton.operand import causal, offsets, positions, streams, width
from kvpress.kernels.formats.coded import Coded
from kvpress.kernels.formats.correction import Correction
from kvpress.kernels.formats.offset import Products
from kvpress.kernels.formats.operand import Options, Rows, Where
from kvpress.kernels.formats.rotary import STEP
from kvpress.kernels.triton import codes, online
from kvpress.kernels.triton.grid import padded, plan, resident

LEAST_ROWS, MOST_ROWS = 4, 16
RESIDENT = 6
"""Most programs on a multiprocessor: 64 threads with some 170 registers each."""

WARPS = 2
STAGES = tl.constexpr(3)
"""Stages of the loop, set explicitly: codes are then prefetched even where centroids are too small for asynchronous copies."""

BLOCK_POSITIONS = tl.constexpr(STEP)


@dataclass(frozen=True)
class DecodeTiles:
    """Tiles in which keys or values are decoded."""

    span: int
    """Channels that one load reads."""
    span_padded: int
    """`span`, padded to a power of two."""
    pair_padded: int
    """Spans of each half of the rotated channels, padded to a power of two."""
    rest_padded: int
    """Spans of the channels that are not rotated, padded to a power of two."""


def spans(channels: int, coupled: int, half: int) -> DecodeTiles:
    """Return the tiles of rows with 2 * `half` rotated channels; a tile has at least 16 channels, for products."""
    span = gcd(coupled, half)
    width = padded(span, 1)
    pair, unrotated = (padded(size // span, max(1, 16 // width)) for size in (half, channels - 2 * half))
    return DecodeTiles(span, width, pair, unrotated)


def block_rows(channels: int, half: int, scaled: bool = False) -> int:
    """Return the rows per block for key and value channels together: decoded tiles, angles and scaled values use registers."""
    return 16 if half or scaled or channels > 256 else 32


def registers(scaled: bool, corrected: bool = False) -> int | None:
    """Return the limit of registers per thread: without one, ptxas hoists so many loads of scaled rows that it spills."""
    return 255 if corrected else 224 if scaled else None


@triton.jit
def _queries(Q, m, live_m, i, j, first, last, D: tl.constexpr, SPAN: tl.constexpr):
    """Load channels first + i * SPAN + j of query rows m, below channel `last`: [BM, channels of the tile]."""
    channel = first + i[:, None] * SPAN + j[None, :]
    live = (channel < last) & (j < SPAN)[None, :]
    mask = live_m[:, None, None] & live[None, :, :]
    q = tl.load(Q + m[:, None, None] * D + channel[None, :, :], mask=mask, other=0.0)
    return tl.reshape(q, [q.shape[0], q.shape[1] * q.shape[2]])


@triton.jit
def _side(
    CODES, BOOK, at, i, j, live, G: tl.constexpr, BG: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
    SPAN: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Decode channels i * SPAN + j of rows whose codes begin at byte `at`; i, j and `at` have an axis each."""
    if SPAN == C:
        group, first = i, 0
    else:
        group, first = i // (C // SPAN), i % (C // SPAN) * SPAN
    code = codes.entries(CODES, at, group, live, G, BITS)
    if E < 2**BITS:
        code = tl.minimum(code, E - 1)
    if BG > 1:
        code += group * E
    return tl.load(BOOK + code * C + first + j, mask=live & (j < SPAN), other=0.0)


@triton.jit
def _angles(COARSE, FINE, position, pair, live, HALF: tl.constexpr):
    """Return cosines and sines of pairs of channels at positions: coarse times fine rotations."""
    coarse = COARSE + position // BLOCK_POSITIONS * (2 * HALF) + pair
    fine = FINE + position % BLOCK_POSITIONS * (2 * HALF) + pair
    a, b = tl.load(coarse, mask=live, other=0.0), tl.load(coarse + HALF, mask=live, other=0.0)
    c, d = tl.load(fine, mask=live, other=0.0), tl.load(fine + HALF, mask=live, other=0.0)
    return a * c - b * d, a * d + b * c


@triton.jit
def _rotated_outliers(
    Q, m, live_m, FIRST, CHANNEL, DELTA, COARSE, FINE, position, row, live, D: tl.constexpr, HALF: tl.constexpr
):
    """Return the products of query rows m with outliers of keys, rotated to positions [BN]: float32 [BM, BN]."""
    BN: tl.constexpr = row.shape[0]
    SLOTS: tl.constexpr = correction.ENTRIES // BN
    first, count, longest = correction.entries_of(FIRST, row, live)
    products = tl.zeros([m.shape[0], BN], tl.float32)
    if longest > 0:
        at = tl.reshape(tl.broadcast_to(position[None, :], [SLOTS, BN]), [SLOTS * BN])
        for e in tl.range(0, longest, SLOTS):
            channel, delta = correction.slots_of(CHANNEL, DELTA, first, count, e, SLOTS)
            rotated = (channel < 2 * HALF) & (delta != 0)
            high = channel >= HALF
            cos, sin = _angles(COARSE, FINE, at, tl.where(high, channel - HALF, channel), rotated, HALF)
            cos = tl.where(rotated, cos, 1.0)
            pair = tl.where(high, channel - HALF, channel + HALF)
            sin = tl.where(high, -sin, sin)
            query = tl.load(Q + m[:, None] * D + channel[None, :], mask=live_m[:, None], other=0.0).to(tl.float32)
            mask = live_m[:, None] & rotated[None, :]
            query = (
                query * cos[None, :] + tl.load(Q + m[:, None] * D + pair[None, :], mask=mask, other=0.0) * sin[None, :]
            )
            products += tl.sum(tl.reshape(query * delta.to(tl.float32)[None, :], [m.shape[0], SLOTS, BN]), 1)
    return products


@triton.jit(do_not_specialize=["M", "streams", "splits", "width", "places", "books", "causal"])
def _kernel(
    Q, KEY_CODES, KEY_BOOK, KEY_SCALE, VALUE_CODES, VALUE_BOOK, VALUE_SCALE, LISTED, STARTS, LENGTHS, STREAM,
    COARSE, FINE, SHIFT, POSITIONS, KEY_TERMS, VALUE_TERMS, LOG_WEIGHT, OFFSETS, OUT, LSE,
    key_stride, value_stride, M, streams, splits, width, places, books, causal, scale, softcap,
    KB: tl.constexpr, KG: tl.constexpr, KBG: tl.constexpr, KE: tl.constexpr, KC: tl.constexpr,
    VB: tl.constexpr, VG: tl.constexpr, VBG: tl.constexpr, VE: tl.constexpr, VC: tl.constexpr,
    HALF: tl.constexpr, KS: tl.constexpr, KSP: tl.constexpr, KHP: tl.constexpr, KRP: tl.constexpr,
    VCP: tl.constexpr, VGP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NP: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = KG * KC
    # n has 64 bits: row * stride overflows int32 at 128k rows of 8 heads.
    n, split, split_count = online.split_of(LENGTHS, streams, splits, BN, NP)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    i = tl.arange(0, BN)
    live_m = m < M
    length = tl.load(LENGTHS + n).to(tl.int32)
    start = n * 0
    if LISTED is None:
        start = tl.load(STARTS + n)
    else:
        length = tl.minimum(length, width)
    stream = n
    if STREAM is not None:
        stream = tl.load(STREAM + n)
    book = (stream.to(tl.int32) % books).to(tl.int64)
    KEY_BOOK += book * (KBG * KE * KC)
    VALUE_BOOK += book * (VBG * VE * VC)
    limit = online.visible(m, length, causal)

    kh, kr, kc = tl.arange(0, KHP), tl.arange(0, KRP), tl.arange(0, KSP)
    vg, vc = tl.arange(0, VGP), tl.arange(0, VCP)
    if HALF > 0:
        shift = tl.load(SHIFT + stream)
        q_low = _queries(Q + n * M * D, m, live_m, kh, kc, 0, HALF, D, KS).to(KEY_BOOK.dtype.element_ty)
        q_high = _queries(Q + n * M * D, m, live_m, kh, kc, HALF, 2 * HALF, D, KS).to(KEY_BOOK.dtype.element_ty)
    if 2 * HALF < D:
        q_rest = _queries(Q + n * M * D, m, live_m, kr, kc, 2 * HALF, D, D, KS).to(KEY_BOOK.dtype.element_ty)

    offset_products, offset_shifts, offset_positions = OFFSETS
    largest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, VGP * VCP], tl.float32)
    key_first, key_channel, key_delta = KEY_TERMS
    value_first, value_channel, value_delta = VALUE_TERMS
    if value_first is not None:
        outliers = tl.zeros([correction.LOW, BM * HIGH], tl.float32)
    first, last = online.share(length, split, split_count, BN)
    for at in tl.range(first, last, BN, num_stages=STAGES):
        live = at + i < last
        if LISTED is None:
            base, row = start + at, i
        else:
            base, row = start, tl.load(LISTED + n * width + at + i, mask=live, other=0).to(tl.int64)

        products = tl.zeros([BM, BN], tl.float32)
        byte = (row * key_stride)[None, None, :]
        if HALF > 0:
            h, c = kh[:, None, None], kc[None, :, None]
            live_h = live[None, None, :] & (h < HALF // KS)
            position = shift + base + row
            if POSITIONS is not None:
                position = shift + tl.load(POSITIONS + base + row, mask=live, other=0)
            cos, sin = _angles(COARSE, FINE, position[None, None, :], h * KS + c, live_h & (c < KS), HALF)
            low = _side(KEY_CODES + base * key_stride, KEY_BOOK, byte, h, c, live_h, KG, KBG, KE, KC, KS, KB)
            high = _side(
                KEY_CODES + base * key_stride, KEY_BOOK, byte, HALF // KS + h, c, live_h, KG, KBG, KE, KC, KS, KB
            )
            rotated = (low * cos - high * sin).to(low.dtype)
            products = tl.dot(q_low, tl.reshape(rotated, [KHP * KSP, BN]), products, input_precision="ieee")
            rotated = (high * cos + low * sin).to(low.dtype)
            products = tl.dot(q_high, tl.reshape(rotated, [KHP * KSP, BN]), products, input_precision="ieee")
        if 2 * HALF < D:
            r = 2 * HALF // KS + kr[:, None, None]
            live_r = live[None, None, :] & (r < D // KS)
            unrotated = _side(
                KEY_CODES + base * key_stride, KEY_BOOK, byte, r, kc[None, :, None], live_r, KG, KBG, KE, KC, KS, KB
            )
            products = tl.dot(q_rest, tl.reshape(unrotated, [KRP * KSP, BN]), products, input_precision="ieee")
        if KEY_SCALE is not None:
            products *= tl.load(KEY_SCALE + base + row, mask=live, other=0.0).to(tl.float32)[None, :]
        if key_first is not None:
            if HALF > 0:
                products += _rotated_outliers(
                    Q + n * M * D, m, live_m, key_first, key_channel, key_delta, COARSE, FINE, position, base + row, live,
                    D, HALF,
                )  # fmt: skip
            else:
                products += tl.trans(
                    correction.key_outliers(
                        Q + n * M * D, m, live_m, key_first, key_channel, key_delta, base + row, live, D
                    )
                )
        if offset_products is not None:
            products += online.added(
                offset_products, offset_shifts, offset_positions, n, m, base + row, live_m, live, M, places
            )
        logits = online.to_logits(products, scale, softcap)
        if LOG_WEIGHT is not None:
            logits += tl.load(LOG_WEIGHT + base + row, mask=live, other=0.0).to(tl.float32)[None, :] * online.LOG2E
        logits = tl.where(live[None, :] & (at + i[None, :] < limit[:, None]), logits, -float("inf"))
        weights, keep, largest, total = online.update(logits, largest, total)
        if value_first is not None:
            outliers = correction.value_outliers(
                tl.trans(weights), keep, outliers, value_first, value_channel, value_delta, base + row, live
            )
        live_v = live[:, None, None] & (vg < VG)[None, :, None]
        values = _side(
            VALUE_CODES + base * value_stride, VALUE_BOOK, (row * value_stride)[:, None, None], vg[None, :, None],
            vc[None, None, :], live_v, VG, VBG, VE, VC, VC, VB,
        )  # fmt: skip
        values = tl.reshape(values, [BN, VGP * VCP])
        if VALUE_SCALE is not None:
            value_scale = tl.load(VALUE_SCALE + base + row, mask=live, other=0.0).to(tl.float32)
            values = (values.to(tl.float32) * value_scale[:, None]).to(VALUE_BOOK.dtype.element_ty)
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")

    out_row = tl.program_id(0).to(tl.int64) * M + m
    norm = online.store_lse(LSE, out_row, live_m, largest, total)
    if value_first is not None:
        column = tl.arange(0, VGP * VCP)
        channel = column // VCP * VC + column % VCP
        live_c = (column // VCP < VG) & (column % VCP < VC)
        acc += tl.trans(correction.outlier_outputs(outliers, tl.where(live_c, channel, 0), BM))
    out = tl.reshape(acc * norm[:, None], [BM, VGP, VCP])
    to = OUT + out_row[:, None, None] * (VG * VC) + (vg[:, None] * VC + vc[None, :])[None, :, :]
    live_v = (vg[:, None] < VG) & (vc[None, :] < VC)
    tl.store(to, out, mask=live_m[:, None, None] & live_v[None, :, :])


def launch(q: Tensor, rows: Rows, where: Where, options: Options, added: Products | None = None) -> Partials:
    """Run the kernel; arguments as in `kvpress.kernels.attention.triton.launch`."""
    keys, values = rows.keys, rows.values
    assert isinstance(keys, Coded) and isinstance(values, Coded)  # noqa: S101, PT018 - for the type checker
    half = 0 if keys.rotary is None else keys.rotary.fine.shape[2]
    key = spans(keys.channels, keys.book.shape[3], half)
    value = spans(values.channels, values.book.shape[3], 0)
    scaled = values.row_scale is not None
    block = block_rows(keys.channels + values.channels, half, scaled)
    most_registers = registers(scaled, keys.correction is not None or values.correction is not None)
    fitting = resident(WARPS, most_registers, RESIDENT)
    grid = plan(q, where.most_rows(rows.count), block, fitting, LEAST_ROWS, MOST_ROWS)
    results = partials(q, grid, where.lengths, block, values.channels)
    if results.lse.numel():
        _kernel[grid.programs](
            q.contiguous(),
            keys.codes,
            keys.book,
            keys.row_scale,
            values.codes,
            values.book,
            values.row_scale,
            *streams(where),
            None if where.stream is None else where.stream.contiguous(),
            *((None,) * 4 if keys.rotary is None else keys.rotary.tensors()),
            outliers(keys),
            outliers(values),
            rows.log_weight,
            offsets(added),
            results.out,
            results.lse,
            keys.codes.stride(0),
            values.codes.stride(0),
            q.shape[1],
            grid.streams,
            grid.splits,
            width(where),
            positions(added),
            keys.book.shape[0],
            causal(options),
            options.scale,
            options.softcap,
            keys.bits,
            keys.groups,
            *keys.book.shape[1:],
            values.bits,
            values.groups,
            *values.book.shape[1:],
            half,
            key.span,
            key.span_padded,
            key.pair_padded,
            key.rest_padded,
            value.span_padded,
            value.rest_padded,
            grid.rows,
            block,
            grid.padded_streams,
            padded(values.channels) // correction.LOW.value,
            num_warps=WARPS,
            maxnreg=most_registers,
        )
    return results


def outliers(side: Coded) -> tuple[Tensor | None, ...]:
    """Return first, channel and delta of the outliers of keys or values; all None without any."""
    return tuple((side.correction or Correction()).tensors()[3:])
