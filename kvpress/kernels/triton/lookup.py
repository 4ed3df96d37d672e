"""Split-KV decode attention on coupled codes; contract and float32 reference are those of `kvpress.kernels.lookup`.

One program decodes a block of rows once for all query heads of a group: a code fetches the c channels of its centroid with one
load, mostly from the first-level cache, which holds the book of a head (64 KiB for 256 entries and 128 float16 channels).
Products are of the dtype of the books with float32 sums. Keys stored before their rotary embedding are not served.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.lookup import check
from kvpress.kernels.lookup import reference as reference
from kvpress.kernels.triton import online
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import padded, plan
from kvpress.kernels.triton.merge import merged, partials

BLOCK = 32
LEAST_ROWS, MOST_ROWS = 4, 16
WARPS, STAGES = 2, 3


@triton.jit
def _side(CODES, BOOK, row, live, stride, i, j, GROUPS: tl.constexpr, E: tl.constexpr, C: tl.constexpr):
    """Channels of rows counted from CODES; i numbers groups and j channels of a group, on axes of their own beside row's."""
    live_i = i < GROUPS
    code = tl.load(CODES + row * stride + i, mask=live & live_i, other=0).to(tl.int32)
    return tl.load(BOOK + (i * E + code) * C + j, mask=live & live_i & (j < C), other=0.0)


@triton.jit(do_not_specialize=["M", "causal"])
def _kernel(
    Q, KEY_CODES, KEY_BOOK, VALUE_CODES, VALUE_BOOK, STARTS, LENGTHS, BOOK_OF_STREAM, BIAS, OUT, LSE,
    key_stride, value_stride, M, causal, scale, softcap,
    KG: tl.constexpr, KE: tl.constexpr, KC: tl.constexpr, KGP: tl.constexpr, KCP: tl.constexpr,
    VG: tl.constexpr, VE: tl.constexpr, VC: tl.constexpr, VGP: tl.constexpr, VCP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)  # 64 bits: row * stride overflows int32 at 128k rows of 8 heads
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    i = tl.arange(0, BN)
    live_m = m < M
    length = tl.load(LENGTHS + n).to(tl.int32)
    start = tl.load(STARTS + n)
    book = tl.load(BOOK_OF_STREAM + n)
    KEY_BOOK += book * (KG * KE * KC)
    VALUE_BOOK += book * (VG * VE * VC)
    limit = online.visible(m, length, causal)

    kg, kc = tl.arange(0, KGP), tl.arange(0, KCP)
    vg, vc = tl.arange(0, VGP), tl.arange(0, VCP)
    live_k = (kg[:, None] < KG) & (kc[None, :] < KC)
    live_v = (vg[:, None] < VG) & (vc[None, :] < VC)
    channel = kg[:, None] * KC + kc[None, :]
    mask = live_m[:, None, None] & live_k[None, :, :]
    q = tl.load(Q + (n * M + m[:, None, None]) * (KG * KC) + channel[None, :, :], mask=mask, other=0.0)
    q = tl.reshape(q, [BM, KGP * KCP]).to(KEY_BOOK.dtype.element_ty)

    largest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, VGP * VCP], tl.float32)
    first, last = online.share(length, BN)
    for at in tl.range(first, last, BN):
        live = at + i < last
        keys = _side(
            KEY_CODES + (start + at) * key_stride, KEY_BOOK, i[None, None, :], live[None, None, :], key_stride,
            kg[:, None, None], kc[None, :, None], KG, KE, KC,
        )  # fmt: skip
        keys = tl.reshape(keys, [KGP * KCP, BN])
        logits = online.to_logits(tl.dot(q, keys, input_precision="ieee"), scale, softcap)
        if BIAS is not None:
            logits += tl.load(BIAS + start + at + i, mask=live, other=0.0)[None, :] * online.LOG2E
        logits = tl.where(live[None, :] & (at + i[None, :] < limit[:, None]), logits, -float("inf"))
        weights, keep, largest, total = online.update(logits, largest, total)
        values = _side(
            VALUE_CODES + (start + at) * value_stride, VALUE_BOOK, i[:, None, None], live[:, None, None], value_stride,
            vg[None, :, None], vc[None, None, :], VG, VE, VC,
        )  # fmt: skip
        values = tl.reshape(values, [BN, VGP * VCP])
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")

    out_row = (n * tl.num_programs(1) + tl.program_id(1)) * M + m
    norm = online.store_lse(LSE, out_row, live_m, largest, total)
    out = tl.reshape(acc * norm[:, None], [BM, VGP, VCP])
    to = OUT + out_row[:, None, None] * (VG * VC) + (vg[:, None] * VC + vc[None, :])[None, :, :]
    tl.store(to, out, mask=live_m[:, None, None] & live_v[None, :, :])


def sizes(book: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    """Groups, entries and channels per group of a book, and the two padded so that at least 16 channels result."""
    _, groups, entries, coupled = book
    width = padded(coupled, 1)
    return groups, entries, coupled, padded(groups, max(1, 16 // width)), width


@on_device
def lookup_decode(
    q: Tensor,
    key_codes: Tensor,
    key_book: Tensor,
    value_codes: Tensor,
    value_book: Tensor,
    starts: Tensor,
    lengths: Tensor,
    book_of_stream: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    causal: int = 0,
    capacity: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to coded rows, as `kvpress.kernels.lookup_decode` does without positions.

    Args:
        q: queries [N, M, D].
        key_codes: uint8 or int16 [R, D / c].
        key_book: centroids [books, D / c, E, c].
        value_codes: uint8 or int16 [R, Dv / c'].
        value_book: centroids [books, Dv / c', E', c'].
        starts: int64 [N].
        lengths: int64 [N]; read on the device, so streams outside the storage are not refused.
        book_of_stream: int64 [N].
        scale: factor of the logits.
        softcap: bound of the logits.
        bias: float32 [R].
        causal: number of new tokens.
        capacity: most rows that a stream can have, all by default; it bounds the number of splits.

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    check(q, key_codes, key_book, value_codes, value_book, book_of_stream, softcap, causal, bias)
    checks.streams(starts, lengths, q)
    key, value = sizes(key_book.shape), sizes(value_book.shape)
    grid = plan(q, key_codes.shape[0] if capacity is None else capacity, BLOCK, LEAST_ROWS, MOST_ROWS)
    out, lse = partials(q, grid.splits, value[0] * value[2])
    if lse.numel():
        _kernel[grid.programs](
            q.contiguous(),
            key_codes,
            key_book,
            value_codes,
            value_book,
            starts.contiguous(),
            lengths.contiguous(),
            book_of_stream.contiguous(),
            None if bias is None else bias.contiguous(),
            out,
            lse,
            key_codes.stride(0),
            value_codes.stride(0),
            q.shape[1],
            causal if causal > 1 else None,  # one new token, the last row of its stream, sees every row
            scale,
            softcap,
            *key,
            *value,
            grid.rows,
            BLOCK,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return merged(out, lse)
