"""Split-KV decode attention on dense rows; the contract and the float32 reference are those of `kvpress.kernels.dense`.

One program attends from up to 64 query rows of one stream to one share of its rows, so a row is read once for all query heads
of its group; `kvpress.kernels.triton.merge` joins the shares. Products of 16-bit rows run on tensor cores with float32 sums;
queries and weights are rounded to the dtype of the rows.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.dense import check
from kvpress.kernels.dense import reference as reference
from kvpress.kernels.triton import online
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import block_rows, padded, plan
from kvpress.kernels.triton.merge import merged, partials


@triton.jit(do_not_specialize=["M", "width", "causal"])
def _kernel(
    Q, KEYS, VALUES, LISTED, STARTS, LENGTHS, BIAS, OUT, LSE, key_stride, value_stride, M, width, causal, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)  # 64 bits: row * stride overflows int32 at 128k rows of 8 heads
    m = tl.program_id(2) * BM + tl.arange(0, BM)
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

    largest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DVP], tl.float32)
    first, last = online.share(length, BN)
    for at in tl.range(first, last, BN):
        live = at + i < last
        if LISTED is None:
            row = start + at + i
        else:
            row = tl.load(LISTED + n * width + at + i, mask=live, other=0).to(tl.int64)
        keys = tl.load(KEYS + row[None, :] * key_stride + d[:, None], mask=live[None, :] & live_d[:, None], other=0.0)
        logits = online.to_logits(tl.dot(q, keys, input_precision="ieee"), scale, softcap)
        if BIAS is not None:
            logits += tl.load(BIAS + row, mask=live, other=0.0)[None, :] * online.LOG2E
        logits = tl.where(live[None, :] & (at + i[None, :] < limit[:, None]), logits, -float("inf"))
        weights, keep, largest, total = online.update(logits, largest, total)
        values = tl.load(
            VALUES + row[:, None] * value_stride + dv[None, :], mask=live[:, None] & live_dv[None, :], other=0.0
        )
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")

    out_row = (n * tl.num_programs(1) + tl.program_id(1)) * M + m
    norm = online.store_lse(LSE, out_row, live_m, largest, total)
    mask = live_m[:, None] & live_dv[None, :]
    tl.store(OUT + out_row[:, None] * DV + dv[None, :], acc * norm[:, None], mask=mask)


@on_device
def dense_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    causal: int = 0,
    bias: Tensor | None = None,
    capacity: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to the rows ``starts[n] .. starts[n] + lengths[n]``, as `kvpress.kernels.dense_decode` does.

    Args:
        q: queries [N, M, D].
        keys: rows [R, D].
        values: rows [R, Dv].
        starts: int64 [N].
        lengths: int64 [N]; read on the device, so streams outside the storage are not refused.
        scale: factor of the logits.
        softcap: bound of the logits.
        causal: number of new tokens.
        bias: float32 [R].
        capacity: most rows that a stream can have, all by default; it bounds the number of splits.

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    check(q, keys, values, softcap, causal, bias)
    checks.streams(starts, lengths, q)
    capacity = keys.shape[0] if capacity is None else capacity
    return _launch(q, keys, values, None, starts, lengths, scale, softcap, causal, bias, capacity)


@on_device
def dense_select(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    counts: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to the first ``counts[n]`` rows listed in ``rows [N, K]``, as `kvpress.kernels.dense_select` does."""
    check(q, keys, values, softcap, 0, bias)
    checks.selection(rows, counts, q)
    return _launch(q, keys, values, rows, None, counts, scale, softcap, 0, bias, rows.shape[1])


def _launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor,
    scale: float,
    softcap: float | None,
    causal: int,
    bias: Tensor | None,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    D, DV = keys.shape[1], values.shape[1]
    DP, DVP = padded(D), padded(DV)
    block = block_rows(DP + DVP, keys.element_size())
    grid = plan(q, capacity, block)
    out, lse = partials(q, grid.splits, DV)
    if lse.numel():
        _kernel[grid.programs](
            q.contiguous(),
            keys,
            values,
            None if rows is None else rows.contiguous(),
            None if starts is None else starts.contiguous(),
            lengths.contiguous(),
            None if bias is None else bias.contiguous(),
            out,
            lse,
            keys.stride(0),
            values.stride(0),
            q.shape[1],
            0 if rows is None else rows.shape[1],
            causal if causal > 1 else None,  # one new token, the last row of its stream, sees every row
            scale,
            softcap,
            D,
            DV,
            DP,
            DVP,
            grid.rows,
            block,
            num_warps=4,
            num_stages=3,
        )
    return merged(out, lse)
