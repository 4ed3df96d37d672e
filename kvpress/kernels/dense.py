"""Decode attention over dense keys and values, for streams of any length in one flat storage.

A stream is one batch row and one key-value head; its queries are the query heads of the group times the new tokens.
A ragged cache passes the offsets of its segments; a rectangular window [B, H, capacity, D] is viewed as
[B * H * capacity, D] with ``starts = n * capacity`` plus the left padding.

    N streams, M = G * Q query rows (row ``g * Q + t``), R stored rows, D key and Dv value channels

    q [N, M, D]      keys [R, D]      values [R, Dv]      out float32 [N, M, Dv]      lse float32 [N, M]

    logit[m, r] = softcap(scale * q[m] . keys[r]) + bias[r],   out = softmax(logit) values,   lse = log sum exp(logit)

All sums are float32. A stream without visible rows has ``out = 0`` and ``lse = -inf``, the neutral element of an LSE merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels import reference as plain
from kvpress.kernels.counting import count
from kvpress.kernels.cpu import launch
from kvpress.kernels.sinks import with_sinks
from kvpress.kernels.triton import device


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
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to the rows ``starts[n] .. starts[n] + lengths[n]``.

    Args:
        q: queries [N, M, D]; float32, bfloat16 or float16.
        keys: rows [R, D] of the same dtypes; rows may be strided, elements of a row may not.
        values: rows [R, Dv] of the dtype of keys.
        starts: first row of each stream, int64 [N].
        lengths: number of rows of each stream, int64 [N].
        scale: factor of the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        causal: number Q of new tokens, the last Q rows of every stream: row m of q sees the first
            ``lengths[n] - Q + m % Q + 1`` rows. 0 lets every query see every row.
        bias: added to the logit of each row, float32 [R].
        sinks: logits without a value that take part in the softmax, float32 [N, M].

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    check(q, keys, values, softcap, causal, bias)
    checks.streams(starts, lengths, q)
    out, lse = _dense_decode(q, keys, values, starts, lengths, scale, softcap, causal, bias)
    return with_sinks(out, lse, sinks)


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
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to listed rows only; arguments as in `dense_decode`.

    Args:
        q: queries [N, M, D].
        keys: rows [R, D].
        values: rows [R, Dv].
        rows: row numbers, int32 or int64 [N, K]; entries past ``counts[n]`` are not read.
        counts: how many row numbers of each stream are valid, int64 [N].
        scale: factor of the logits.
        softcap: bound of the logits.
        bias: float32 [R].
        sinks: float32 [N, M].

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    check(q, keys, values, softcap, 0, bias)
    checks.selection(rows, counts, q)
    out, lse = _dense_select(q, keys, values, rows, counts, scale, softcap, bias)
    return with_sinks(out, lse, sinks)


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: list[Tensor],
    scale: float,
    softcap: float | None = None,
    causal: int = 0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Ground truth in float32: stream n attends to ``keys[rows[n]]``."""
    return plain.attend(q, rows, lambda r: keys[r].float(), lambda r: values[r].float(), scale, softcap, causal, bias)


@torch.library.custom_op("kvpress::dense_decode", mutates_args=())
def _dense_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None,
    causal: int,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if launch.available(keys):
        count("dense_decode")
        return launch.attend(q, keys, values, lengths, scale, starts=starts, softcap=softcap, causal=causal, bias=bias)
    if device.available(keys):
        from kvpress.kernels.triton import dense as gpu

        count("dense_decode")
        return gpu.dense_decode(q, keys, values, starts, lengths, scale, softcap=softcap, causal=causal, bias=bias)
    checks.in_range(starts, lengths, keys.shape[0])
    return reference(q, keys, values, plain.ranges(starts, lengths), scale, softcap, causal, bias)


@torch.library.custom_op("kvpress::dense_select", mutates_args=())
def _dense_select(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    counts: Tensor,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if launch.available(keys):
        count("dense_select")
        return launch.attend(q, keys, values, counts, scale, rows=rows, softcap=softcap, bias=bias)
    if device.available(keys):
        from kvpress.kernels.triton import dense as gpu

        count("dense_select")
        return gpu.dense_select(q, keys, values, rows, counts, scale, softcap=softcap, bias=bias)
    checks.listed_in_range(rows, counts, keys.shape[0])
    return reference(q, keys, values, plain.listed(rows, counts), scale, softcap, 0, bias)


def _fake(q: Tensor, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    streams, queries = q.shape[:2]
    out = q.new_empty(streams, queries, values.shape[1], dtype=torch.float32)
    return out, q.new_empty(streams, queries, dtype=torch.float32)


_dense_decode.register_fake(_fake)
_dense_select.register_fake(_fake)


def check(q: Tensor, keys: Tensor, values: Tensor, softcap: float | None, causal: int, bias: Tensor | None) -> None:
    """Refuse queries and dense rows that do not belong together."""
    checks.options(q, keys.shape[0], softcap, causal, bias)
    checks.shape("keys", keys, ("R", q.shape[2]), *checks.FLOATS)
    checks.shape("values", values, (keys.shape[0], "Dv"), keys.dtype)
    checks.rows_layout("keys", keys)
    checks.rows_layout("values", values)
    checks.same_device(q, keys, values, bias)
