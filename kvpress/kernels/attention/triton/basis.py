# SPDX-License-Identifier: Apache-2.0
"""Queries and outputs in the basis of stored rows, `kvpress.kernels.formats.basis.Basis`, each in one launch.

Products are float32 on plain cores: a GPU's matrix library would take several launches, and tiles much larger than the few
queries of a decode step.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.formats.basis import Basis
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import padded

BM, BC, BK = 16, 32, 32
"""Rows and columns of a tile, and channels that are multiplied at a time."""


@triton.jit
def _tile(STREAM, BM: tl.constexpr, BC: tl.constexpr):
    """Return the stream of this program, the stream whose scale and centre it uses, its query rows and its columns."""
    n = tl.program_id(0).to(tl.int64)
    stream = n
    if STREAM is not None:
        stream = tl.load(STREAM + n)
    return n, stream, tl.program_id(2) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)


@triton.jit
def _product(
    X, ROTATION, SCALE, row, live_m, column, stream, K: tl.constexpr, C: tl.constexpr,
    ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return rows of X [., K], times a scale of each channel, times the matrix [K, C]: float32 [BM, BC]."""
    live_c = column < C
    if ROTATION is None:
        out = tl.load(X + row[:, None] * K + column[None, :], mask=live_m[:, None] & live_c[None, :], other=0.0)
        out = out.to(tl.float32)
        if SCALE is not None:
            out *= tl.load(SCALE + stream * K + column, mask=live_c, other=0.0)[None, :]
    else:
        out = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
        for first in tl.range(0, K, BK):
            k = first + tl.arange(0, BK)
            live_k = k < K
            x = tl.load(X + row[:, None] * K + k[None, :], mask=live_m[:, None] & live_k[None, :], other=0.0)
            x = x.to(tl.float32)
            if SCALE is not None:
                x *= tl.load(SCALE + stream * K + k, mask=live_k, other=0.0)[None, :]
            at = k[:, None] * ROW_STRIDE + column[None, :] * COLUMN_STRIDE
            matrix = tl.load(ROTATION + at, mask=live_k[:, None] & live_c[None, :], other=0.0)
            out = tl.dot(x, matrix, out, input_precision="ieee")
    return out


@triton.jit(do_not_specialize=["M", "factor"])
def _enter_kernel(
    Q, ROTATION, SCALE, CENTRE, STREAM, OUT, SHIFT, M, factor,
    D: tl.constexpr, C: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n, stream, m, column = _tile(STREAM, BM, BC)
    live_m = m < M
    out = _product(Q, ROTATION, None, n * M + m, live_m, column, stream, D, C, C, 1, BK)
    if SCALE is not None:
        out *= tl.load(SCALE + stream * C + column, mask=column < C, other=0.0)[None, :]
    at = (n * M + m[:, None]) * C + column[None, :]
    tl.store(OUT + at, out, mask=live_m[:, None] & (column < C)[None, :])
    if CENTRE is not None:
        is_first = live_m & (m * 0 + tl.program_id(1) == 0)
        d = tl.arange(0, DP)
        q = tl.load(Q + (n * M + m[:, None]) * D + d[None, :], mask=is_first[:, None] & (d < D)[None, :], other=0.0)
        centre = tl.load(CENTRE + stream * D + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(SHIFT + n * M + m, factor * tl.sum(q.to(tl.float32) * centre[None, :], 1), mask=is_first)


@triton.jit(do_not_specialize=["M"])
def _leave_kernel(
    X, ROTATION, SCALE, CENTRE, STREAM, LSE, SHIFT, OUT, SHIFTED, M,
    D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n, stream, m, column = _tile(STREAM, BM, BC)
    live_m = m < M
    out = _product(X, ROTATION, SCALE, n * M + m, live_m, column, stream, C, D, 1, C, BK)
    lse = tl.load(LSE + n * M + m, mask=live_m, other=0.0)
    if CENTRE is not None:
        centre = tl.load(CENTRE + stream * D + column, mask=column < D, other=0.0).to(tl.float32)
        out = tl.where((lse == -float("inf"))[:, None], 0.0, out + centre[None, :])
    at = (n * M + m[:, None]) * D + column[None, :]
    tl.store(OUT + at, out, mask=live_m[:, None] & (column < D)[None, :])
    if SHIFT is not None:
        is_first = live_m & (m * 0 + tl.program_id(1) == 0)
        tl.store(SHIFTED + n * M + m, lse + tl.load(SHIFT + n * M + m, mask=is_first, other=0.0), mask=is_first)


@on_device
def enter(q: Tensor, basis: Basis, stream: Tensor | None, factor: float) -> tuple[Tensor, Tensor | None]:
    """Transform queries to the basis of the keys.

    Args:
        q: queries [N, M, D]; float32, bfloat16 or float16.
        basis: the basis of the keys.
        stream: stream whose scale and centre are used, int64 [N]; None for n itself.
        factor: factor of the products with the centre.

    Returns:
        Queries, float32 [N, M, C], and `factor` times their products with the centre, float32 [N, M]; None without a centre.
    """
    streams, queries, D = q.shape
    C = D if basis.rotation is None else basis.rotation.shape[1]
    out = torch.empty(streams, queries, C, dtype=torch.float32, device=q.device)
    shift = None if basis.centre is None else torch.empty(streams, queries, dtype=torch.float32, device=q.device)
    if out.numel():
        _enter_kernel[(streams, -(-C // BC), -(-queries // BM))](
            q.contiguous(), *_tensors(basis, stream), out, shift, queries, factor, D, C, padded(D, 1), BM, BC, BK
        )
    return out, shift


@on_device
def leave(out: Tensor, lse: Tensor, basis: Basis, stream: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """Transform outputs back from the basis of the values, and add the shift of the logits.

    Args:
        out: sums of stored rows, float32 [N, M, C].
        lse: log-sum-exp of the logits without the shift, float32 [N, M].
        basis: the basis of the values.
        stream: as in `enter`.
        shift: second result of `enter`.

    Returns:
        Outputs, float32 [N, M, D], 0 where a query sees no row, and log-sum-exp, float32 [N, M].
    """
    streams, queries, C = out.shape
    D = basis.outer(C)
    result = torch.empty(streams, queries, D, dtype=torch.float32, device=out.device)
    shifted = lse if shift is None else torch.empty_like(lse)
    if result.numel():
        _leave_kernel[(streams, -(-D // BC), -(-queries // BM))](
            out.contiguous(), *_tensors(basis, stream), lse, shift, result, shifted, queries, D, C, BM, BC, BK
        )
    return result, shifted


def _tensors(basis: Basis, stream: Tensor | None) -> list[Tensor | None]:
    tensors = (basis.rotation, basis.scale, basis.centre, stream)
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
