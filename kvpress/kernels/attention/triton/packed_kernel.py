# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of decode attention on packed codes.

Only stored bytes are read. A row of codes is split into columns of units (`codes`). Each part of a byte of the units has a
product and an accumulator of its own, so that unpacking needs no shuffle. Codes are the left operand of products, whose tiles
have 16 rows and 8 columns: few queries leave less of a tile empty as columns. Scales of a row are loaded as words, which Triton
copies to shared memory ahead of time as it does codes.

    keys     block inside one row group:  q . (c * s + z) = (q * s) . c + q . z    the scale costs one product per query
             one scale for all channels:  q . (c * s + z) = s (q . c) + z sum(q)   the scale costs one product per logit
             otherwise                    decoded in registers
    values   one scale for all channels:  sum w (c * s + z) = sum (w s) c + sum w z
             otherwise                    decoded in registers, in columns of one channel group where that leaves at least 16

Without zeros, z = -s * point, so that sum w z = -point sum(w s). Products are float16 with float32 sums. To keep float16 from
overflowing or flushing to zero, queries are divided by their largest element, `online` multiplies weights by a constant, and
weights that are multiplied by scales are divided by the largest scale so far.
"""

# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"

import triton
import triton.language as tl

from kvpress.kernels.attention.triton import correction
from kvpress.kernels.triton import codes, online

ZEROS = tl.constexpr(16)
"""Equal rows in which weights times zeros are summed: the fewest that every triton version accepts in a product."""

LEAST_UNIT, MOST_UNIT = tl.constexpr(0x00800000), tl.constexpr(0x7E000000)
"""Bits of the smallest and largest float32 divisor of weights times scales: the inverses are normal numbers, too."""

QUERY_LIFT = tl.constexpr(32.0)
"""Largest element of a scaled query: times scales from 1e-5 to 2000, it fits a float16."""


@triton.jit(do_not_specialize=["M", "streams", "splits", "width", "causal", "places"])
def decode_kernel(
    Q, KEYS, KEY_SCALE, KEY_ZERO, VALUES, VALUE_SCALE, VALUE_ZERO, KEY_GROUP, VALUE_GROUP,
    LISTED, STARTS, LENGTHS, LOG_WEIGHT, KEY_TERMS, VALUE_TERMS, KEY_LEVELS, VALUE_LEVELS, KEY_ROW_SCALE,
    OFFSETS, OUT, LSE, M, streams, splits, width, places, causal, scale, softcap,
    D: tl.constexpr, K_BITS: tl.constexpr, K_GR: tl.constexpr, K_GC: tl.constexpr,
    DV: tl.constexpr, V_BITS: tl.constexpr, V_GR: tl.constexpr, V_GC: tl.constexpr,
    KC: tl.constexpr, KW: tl.constexpr, KP: tl.constexpr, KPARTS: tl.constexpr, K_UNIT: tl.constexpr, FOLD: tl.constexpr,
    VC: tl.constexpr, VW: tl.constexpr, VP: tl.constexpr, VPARTS: tl.constexpr, V_UNIT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, NP: tl.constexpr, K_RANK: tl.constexpr, K_RP: tl.constexpr, V_RANK: tl.constexpr, V_RP: tl.constexpr,
    HIGH: tl.constexpr,
    K_NARROW: tl.constexpr = 0, V_NARROW: tl.constexpr = 0, K_POINT: tl.constexpr = 0.0, V_POINT: tl.constexpr = 0.0,
):  # fmt: skip
    """Attend from a tile of queries to one split of a stream; `packed.Units` describes how keys and values are read."""
    K_SCALED: tl.constexpr = K_GC == D and not FOLD
    value_factor, value_basis, value_chunk, value_first, value_channel, value_delta = VALUE_TERMS
    V_SCALED: tl.constexpr = V_GC == DV and value_factor is None
    K_BY_GROUP: tl.constexpr = not FOLD and not K_SCALED and K_GC % (KW * K_UNIT) == 0
    V_BY_GROUP: tl.constexpr = not V_SCALED and V_GC % (VW * V_UNIT) == 0
    # n has 64 bits: row * stride overflows int32 at 128k rows of 8 heads.
    n, split, split_count = online.split_of(LENGTHS, streams, splits, BN, NP)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    j, jv, i = tl.arange(0, KP), tl.arange(0, VP), tl.arange(0, BN)
    live_m = m < M

    length = tl.load(LENGTHS + n).to(tl.int32)
    start = n * 0
    skipped = 0
    if LISTED is None:
        start = tl.load(STARTS + n)
        skipped = (start % BN).to(tl.int32)  # blocks begin at multiples of BN rows: a folded block lies in one group
        start -= skipped
    else:
        length = tl.minimum(length, width)
    limit = online.visible(m, length, causal) + skipped

    q, highest = _queries(Q + n * M * D, m, j, live_m, D, KC, KW, KP, KPARTS, K_UNIT)
    factor = scale * highest / QUERY_LIFT
    if K_SCALED:
        q_sum = tl.zeros([BM], tl.float32)
        for k in tl.static_range(KC * KPARTS * K_UNIT):
            q_sum += tl.sum(q[k].to(tl.float16).to(tl.float32), 0)
    offset_products, offset_shifts, offset_positions = OFFSETS
    largest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = ()
    for _ in tl.static_range(VC * VPARTS * V_UNIT):
        acc += (tl.zeros([VP, BM], tl.float32),)
    key_factor, key_basis, key_chunk, key_first, key_channel, key_delta = KEY_TERMS
    if value_first is not None:
        outliers = tl.zeros([correction.LOW, BM * HIGH], tl.float32)
    if V_SCALED:
        unit = tl.full([], LEAST_UNIT, tl.int32).to(tl.float32, bitcast=True)
        zeros = tl.zeros([ZEROS, BM], tl.float32)

    first, last = online.share(length + skipped, split, split_count, BN)
    # Loads of 16-bit levels are too small for asynchronous copies; explicit stages make Triton prefetch the codes.
    STAGES: tl.constexpr = None if KEY_LEVELS is None else 3
    for at in tl.range(first, last, BN, num_stages=STAGES):
        live = at + i < last
        if LISTED is None:
            live = live & (at + i >= skipped)
            row = start + at + i
        else:
            row = tl.load(LISTED + n * width + at + i, mask=live, other=0).to(tl.int64)

        row_group = _group(KEY_GROUP, row, live, K_GR)
        products = tl.zeros([BN, BM], tl.float32)
        if key_factor is not None:
            products = correction.key_low_rank(
                q, products, key_factor, key_basis, key_chunk, row, live, j, D, K_RANK, K_RP, KC, KW, KPARTS, K_UNIT
            )
        if key_first is not None:
            extra = correction.key_outliers(Q + n * M * D, m, live_m, key_first, key_channel, key_delta, row, live, D)
            products += extra * (1 / highest * QUERY_LIFT)[None, :]
        if FOLD:
            offsets = tl.zeros([KP, BM], tl.float32)
        if K_SCALED:
            sums = tl.zeros([BN, BM], tl.float32)
        if K_BY_GROUP:
            key_scales = codes.load_scales(KEY_SCALE, row_group[:, None], live[:, None], D // K_GC, K_NARROW)
            key_zeros = codes.load_zeros(KEY_ZERO, key_scales, row_group[:, None], live[:, None], D // K_GC, K_POINT)
        for c in tl.static_range(KC):
            column = c * KW + j
            live_j = column < D // KPARTS // K_UNIT
            low, high = codes.load(
                KEYS, row[:, None], column[None, :], live[:, None] & live_j[None, :], D, K_BITS, K_UNIT
            )
            for p in tl.static_range(KPARTS):
                if FOLD and K_GC == 1:  # the scales of the neighbouring channels of a unit are one load
                    group = ((start + at) // K_GR * D + p * (D // KPARTS)) // K_UNIT + column
                    unit_scales = codes.load_scales(KEY_SCALE, group, live_j, K_UNIT, K_NARROW)
                    unit_zeros = codes.load_zeros(KEY_ZERO, unit_scales, group, live_j, K_UNIT, K_POINT)
                for b in tl.static_range(K_UNIT):
                    part = codes.stand_for(codes.unpack(low, high, p, b, K_BITS, K_UNIT), KEY_LEVELS)
                    query = q[(c * KPARTS + p) * K_UNIT + b]
                    if K_SCALED:
                        sums = tl.dot(part, query.to(tl.float16), sums)
                    elif FOLD:
                        if K_GC == 1:
                            s, z = unit_scales[b], unit_zeros[b]
                        else:
                            group = (start + at) // K_GR
                            channel = codes.channel(p, b, column, D, KPARTS, K_UNIT)
                            s, z = codes.load_group(
                                KEY_SCALE, KEY_ZERO, group, live_j, channel, D, K_GC, K_NARROW, K_POINT
                            )
                        products = tl.dot(part, (query * s[:, None]).to(tl.float16), products)
                        offsets += query * z[:, None]
                    elif K_BY_GROUP:
                        s = key_scales[(p * (D // KPARTS) + c * KW * K_UNIT) // K_GC]
                        z = key_zeros[(p * (D // KPARTS) + c * KW * K_UNIT) // K_GC]
                        products = tl.dot(codes.decode(part, s, z), query.to(tl.float16), products)
                    else:
                        channel = codes.channel(p, b, column, D, KPARTS, K_UNIT)
                        s, z = codes.load_group(
                            KEY_SCALE, KEY_ZERO, row_group[:, None], live[:, None] & live_j[None, :], channel[None, :],
                            D, K_GC, K_NARROW, K_POINT,
                        )  # fmt: skip
                        products = tl.dot(codes.decode(part, s, z), query.to(tl.float16), products)
        if FOLD:
            products += tl.sum(offsets, 0)[None, :]
        if K_SCALED:
            s = codes.load_scale(KEY_SCALE, row_group, live, K_NARROW).to(tl.float32)
            if KEY_ZERO is None:
                products += (sums - K_POINT * q_sum[None, :]) * s[:, None]
            else:
                z = tl.load(KEY_ZERO + row_group, mask=live, other=0.0).to(tl.float32)
                products += sums * s[:, None] + q_sum[None, :] * z[:, None]
        if KEY_ROW_SCALE is not None:
            products *= tl.load(KEY_ROW_SCALE + row, mask=live, other=0.0).to(tl.float32)[:, None]
        if offset_products is not None:
            offset = online.added(offset_products, offset_shifts, offset_positions, n, m, row, live_m, live, M, places)
            products += tl.trans(offset) * (1 / highest * QUERY_LIFT)[None, :]
        logits = online.to_logits(products, factor[None, :], softcap)
        if LOG_WEIGHT is not None:
            logits += tl.load(LOG_WEIGHT + row, mask=live, other=0.0).to(tl.float32)[:, None] * online.LOG2E
        logits = tl.where(live[:, None] & (at + i[:, None] < limit[None, :]), logits, -float("inf"))
        weights, keep, largest, total = online.update(logits, largest, total, 0)
        weights_of_rows = weights
        weights = weights.to(tl.float16)

        if value_first is not None:
            outliers = correction.value_outliers(
                weights, keep, outliers, value_first, value_channel, value_delta, row, live
            )

        row_group = _group(VALUE_GROUP, row, live, V_GR)
        if V_SCALED:
            s = codes.load_scale(VALUE_SCALE, row_group, live, V_NARROW).to(tl.float32)
            new_unit = _unit(tl.max(tl.abs(s), 0), unit)
            if VALUE_ZERO is not None:
                z = tl.load(VALUE_ZERO + row_group, mask=live, other=0.0).to(tl.float16)
                zeros = tl.dot(tl.broadcast_to(z[None, :], [ZEROS, BN]), weights, zeros * keep[None, :])
            keep *= unit / new_unit
            unit = new_unit
            weights = (weights_of_rows * (s / unit)[:, None]).to(tl.float16)
            if VALUE_ZERO is None and V_POINT != 0.0:
                zeros = tl.dot(tl.full([ZEROS, BN], 1.0, tl.float16), weights, zeros * keep[None, :])

        if V_BY_GROUP:
            value_scales = codes.load_scales(VALUE_SCALE, row_group[None, :], live[None, :], DV // V_GC, V_NARROW)
            value_zeros = codes.load_zeros(
                VALUE_ZERO, value_scales, row_group[None, :], live[None, :], DV // V_GC, V_POINT
            )
        new = ()
        for c in tl.static_range(VC):
            column = c * VW + jv
            live_j = column < DV // VPARTS // V_UNIT
            low, high = codes.load(
                VALUES, row[None, :], column[:, None], live[None, :] & live_j[:, None], DV, V_BITS, V_UNIT
            )
            for p in tl.static_range(VPARTS):
                for b in tl.static_range(V_UNIT):
                    part = codes.stand_for(codes.unpack(low, high, p, b, V_BITS, V_UNIT), VALUE_LEVELS)
                    if V_BY_GROUP:
                        s = value_scales[(p * (DV // VPARTS) + c * VW * V_UNIT) // V_GC]
                        z = value_zeros[(p * (DV // VPARTS) + c * VW * V_UNIT) // V_GC]
                        part = codes.decode(part, s, z)
                    elif not V_SCALED:
                        channel = codes.channel(p, b, column, DV, VPARTS, V_UNIT)
                        s, z = codes.load_group(
                            VALUE_SCALE, VALUE_ZERO, row_group[None, :], live[None, :] & live_j[:, None],
                            channel[:, None], DV, V_GC, V_NARROW, V_POINT,
                        )  # fmt: skip
                        part = codes.decode(part, s, z)
                    new += (tl.dot(part, weights, acc[(c * VPARTS + p) * V_UNIT + b] * keep[None, :]),)
        acc = new
        if value_factor is not None:
            acc = correction.value_low_rank(
                weights,
                acc,
                value_factor,
                value_basis,
                value_chunk,
                row,
                live,
                jv,
                DV,
                V_RANK,
                V_RP,
                VC,
                VW,
                VPARTS,
                V_UNIT,
            )

    out_row = tl.program_id(0).to(tl.int64) * M + m
    norm = online.store_lse(LSE, out_row, live_m, largest, total)
    if V_SCALED:
        zero_term = tl.max(zeros, 0)  # rows are equal
        if VALUE_ZERO is None:
            zero_term *= -V_POINT * unit
    for c in tl.static_range(VC):
        for p in tl.static_range(VPARTS):
            for b in tl.static_range(V_UNIT):
                column = c * VW + jv
                live_j = column < DV // VPARTS // V_UNIT
                channel = codes.channel(p, b, column, DV, VPARTS, V_UNIT)
                out = acc[(c * VPARTS + p) * V_UNIT + b]
                if V_SCALED:
                    out = out * unit + zero_term[None, :]
                if value_first is not None:
                    out += correction.outlier_outputs(outliers, tl.where(live_j, channel, 0), BM)
                at = out_row[None, :] * DV + channel[:, None]
                tl.store(OUT + at, out * norm[None, :], mask=live_m[None, :] & live_j[:, None])


@triton.jit
def _unit(peak, minimum):
    """Return the power of two above `peak`, at least `minimum`: dividing by it does not round."""
    bits = tl.minimum((peak.to(tl.int32, bitcast=True) & 0x7F800000) + 0x00800000, MOST_UNIT)
    return tl.maximum(bits.to(tl.float32, bitcast=True), minimum)


@triton.jit
def _group(GROUP, row, live, GR: tl.constexpr):
    """Return the row of scale and zero for each row of codes."""
    if GR == 1:
        return row
    elif GROUP is None:
        return row // GR
    else:
        return tl.load(GROUP + row, mask=live, other=0).to(tl.int64)


@triton.jit
def _queries(
    Q, m, j, live_m, D: tl.constexpr, KC: tl.constexpr, KW: tl.constexpr, KP: tl.constexpr, KPARTS: tl.constexpr,
    K_UNIT: tl.constexpr,
):  # fmt: skip
    """Return queries in the pieces that keys are read in, scaled to at most QUERY_LIFT, and their largest element."""
    pieces = ()
    highest = tl.zeros_like(m).to(tl.float32)
    for c in tl.static_range(KC):
        for p in tl.static_range(KPARTS):
            for b in tl.static_range(K_UNIT):
                column = c * KW + j
                mask = live_m[None, :] & (column < D // KPARTS // K_UNIT)[:, None]
                at = m[None, :] * D + codes.channel(p, b, column, D, KPARTS, K_UNIT)[:, None]
                piece = tl.load(Q + at, mask=mask, other=0.0).to(tl.float32)
                highest = tl.maximum(highest, tl.max(tl.abs(piece), 0))
                pieces += (piece,)
    highest = tl.where(highest > 0, highest, 1.0)
    scaled = ()
    for k in tl.static_range(KC * KPARTS * K_UNIT):
        scaled += (pieces[k] * (1 / highest * QUERY_LIFT)[None, :],)
    return scaled, highest
