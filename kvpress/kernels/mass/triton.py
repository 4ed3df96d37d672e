# SPDX-License-Identifier: Apache-2.0
"""Statistics of softmax weights in Triton.

One program reads a block of keys once and recomputes the weights of all queries on it from their log-sum-exps. There is no
matrix of weights and no atomic addition, so the result is deterministic. Products of 16-bit keys run on tensor cores with
float32 sums, with queries rounded to the dtype of the keys.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.attention.triton import decode
from kvpress.kernels.formats.operand import Options, Ranges, Rows
from kvpress.kernels.mass.contract import Statistic
from kvpress.kernels.triton import online
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import padded

BLOCK = 64


@triton.jit(do_not_specialize=["M", "causal"])
def _kernel(
    Q, KEYS, QUERY_LSE, STARTS, LENGTHS, LOG_WEIGHT, OUT, key_stride, M, causal, scale, softcap,
    STATISTIC: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1).to(tl.int64)  # 64 bits: row * stride overflows int32 at 128k rows of 8 heads
    length = tl.load(LENGTHS + n).to(tl.int32)
    first_key = tl.program_id(0) * BN
    i = first_key + tl.arange(0, BN)
    d = tl.arange(0, DP)
    live, live_d = i < length, d < D
    row = tl.load(STARTS + n) + i
    keys = tl.load(KEYS + row[None, :] * key_stride + d[:, None], mask=live[None, :] & live_d[:, None], other=0.0)
    out = tl.zeros([BN], tl.float32)
    if LOG_WEIGHT is not None:
        log_weight = tl.load(LOG_WEIGHT + row, mask=live, other=0.0).to(tl.float32) * online.LOG2E
    queries = tl.where(first_key < length, M, 0)  # blocks past the end of the stream read no queries
    for first in tl.range(0, queries, BM):
        m = first + tl.arange(0, BM)
        live_m = m < M
        q = tl.load(Q + (n * M + m[:, None]) * D + d[None, :], mask=live_m[:, None] & live_d[None, :], other=0.0)
        lse = tl.load(QUERY_LSE + n * M + m, mask=live_m, other=-float("inf")) * online.LOG2E
        counts = lse != -float("inf")
        logits = online.to_logits(tl.dot(q.to(keys.dtype), keys, input_precision="ieee"), scale, softcap)
        if LOG_WEIGHT is not None:
            logits += log_weight[None, :]
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
def receive(
    q: Tensor,
    rows: Rows,
    where: Ranges,
    options: Options,
    statistic: Statistic,
    lse: Tensor | None = None,
    query_weight: Tensor | None = None,
) -> Tensor:
    """Run the kernel on checked arguments, as in `kvpress.kernels.column_mass`; overlapping streams are not refused."""
    keys = rows.keys.storage
    if lse is None:
        _, lse = decode(q, Rows(rows.keys, rows.keys, rows.log_weight), where, options)
        lse = lse if options.sinks is None else torch.logaddexp(lse, options.sinks)
    if query_weight is not None:
        # w * exp(x - lse) = exp(x - (lse - log w)); a query of weight 0 sees no row.
        lse = (lse - query_weight.log()).masked_fill(query_weight == 0, float("-inf"))
    streams, queries, D = q.shape
    out = q.new_zeros(rows.count, dtype=torch.float32)
    blocks = -(-where.most_rows(rows.count) // BLOCK)
    if streams and blocks:
        _kernel[(blocks, streams)](
            q.contiguous(),
            keys,
            lse.contiguous(),
            where.starts.contiguous(),
            where.lengths.contiguous(),
            rows.log_weight,
            out,
            keys.stride(0),
            queries,
            options.causal if options.causal > 1 else None,  # one new token, the last row, sees every row
            options.scale,
            options.softcap,
            statistic,
            D,
            padded(D),
            min(64, padded(queries)),
            BLOCK,
            num_warps=4,
            num_stages=2,
        )
    return out
