"""Column statistics of softmax; the contract and the float32 reference are those of `kvpress.kernels.columns`.

One program holds a block of keys and recomputes the weights of all queries against it from their log-sum-exps, so there is
no matrix of weights, no atomic addition, and the result is deterministic. Keys are read once; products of 16-bit keys run on
tensor cores with float32 sums, with queries rounded to the dtype of the keys.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.columns import check
from kvpress.kernels.columns import reference as reference
from kvpress.kernels.triton import online
from kvpress.kernels.triton.dense import dense_decode
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import padded

BLOCK = 64


@triton.jit(do_not_specialize=["M", "causal"])
def _kernel(
    Q, KEYS, QUERY_LSE, STARTS, LENGTHS, OUT, key_stride, M, causal, scale, softcap,
    STATISTIC: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)  # 64 bits: row * stride overflows int32 at 128k rows of 8 heads
    length = tl.load(LENGTHS + n).to(tl.int32)
    i = tl.program_id(1) * BN + tl.arange(0, BN)
    d = tl.arange(0, DP)
    live, live_d = i < length, d < D
    row = tl.load(STARTS + n) + i
    keys = tl.load(KEYS + row[None, :] * key_stride + d[:, None], mask=live[None, :] & live_d[:, None], other=0.0)
    out = tl.zeros([BN], tl.float32)
    queries = tl.where(tl.program_id(1) * BN < length, M, 0)  # blocks past the end of the stream have nothing to do
    for first in tl.range(0, queries, BM):
        m = first + tl.arange(0, BM)
        live_m = m < M
        q = tl.load(Q + (n * M + m[:, None]) * D + d[None, :], mask=live_m[:, None] & live_d[None, :], other=0.0)
        lse = tl.load(QUERY_LSE + n * M + m, mask=live_m, other=-float("inf")) * online.LOG2E
        counts = lse != -float("inf")
        logits = online.to_logits(tl.dot(q.to(keys.dtype), keys, input_precision="ieee"), scale, softcap)
        limit = online.visible(m, length, causal)
        visible = counts[:, None] & (i[None, :] < limit[:, None])
        weights = tl.exp2(tl.where(visible, logits - tl.where(counts, lse, 0.0)[:, None], -float("inf")))
        if STATISTIC == "max":
            out = tl.maximum(out, tl.max(weights, 0))
        elif STATISTIC == "squares":
            out += tl.sum(weights * weights, 0)
        else:
            out += tl.sum(weights, 0)
    tl.store(OUT + row, out, mask=live)


@on_device
def columns(
    q: Tensor,
    keys: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    lse: Tensor | None = None,
    softcap: float | None = None,
    causal: int = 0,
    sinks: Tensor | None = None,
    row_weights: Tensor | None = None,
    statistic: str = "sum",
    *,
    capacity: int | None = None,
) -> Tensor:
    """Statistics of the weights that the queries give to the rows of their stream.

    Args:
        q: queries [N, M, D]: a window of the last tokens, or all of them.
        keys: rows [R, D].
        starts: first row of each stream, int64 [N]. Streams must not share rows, which is not checked.
        lengths: number of rows of each stream, int64 [N]; read on the device.
        scale: factor of the logits.
        lse: log-sum-exp of every query, float32 [N, M]; without it, another pass over the keys computes it.
        softcap: bound of the logits.
        causal: number of new tokens, or 0.
        sinks: float32 [N, M].
        row_weights: float32 [N, M].
        statistic: sum, squares or max.
        capacity: most rows that a stream can have, all by default; rows past it are not visited.

    Returns:
        Float32 [R].
    """
    if statistic not in ("sum", "squares", "max"):
        raise ValueError(f"statistic must be sum, squares or max, got {statistic!r}")
    check(q, keys, starts, lengths, lse, softcap, causal, sinks, row_weights)
    if lse is None:
        _, lse = dense_decode(q, keys, keys, starts, lengths, scale, softcap=softcap, causal=causal, capacity=capacity)
        lse = lse if sinks is None else torch.logaddexp(lse, sinks)
    if row_weights is not None:
        # w * exp(x - lse) = exp(x - (lse - log w)); a query without weight sees nothing.
        lse = (lse - row_weights.log()).masked_fill(row_weights == 0, float("-inf"))
    streams, queries, D = q.shape
    capacity = keys.shape[0] if capacity is None else capacity
    out = q.new_zeros(keys.shape[0], dtype=torch.float32)
    if streams and capacity:
        _kernel[(streams, -(-capacity // BLOCK))](
            q.contiguous(),
            keys,
            lse.contiguous(),
            starts.contiguous(),
            lengths.contiguous(),
            out,
            keys.stride(0),
            queries,
            causal if causal > 1 else None,  # one new token, the last row of its stream, sees every row
            scale,
            softcap,
            statistic,
            D,
            padded(D),
            min(64, padded(queries)),
            BLOCK,
            num_warps=4,
            num_stages=2,
        )
    return out
