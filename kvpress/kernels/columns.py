"""What every stored row receives from the attention of many queries, beside flash attention: no queries x rows matrix.

Streams and queries are those of `kvpress.kernels.dense`. With the softmax of each query over the rows that it sees,

    p[n, m, r] = exp(softcap(scale * q[n, m] . keys[r]) - lse[n, m])

    column_mass[r] = sum over m of p[n, m, r] ** power      column_max[r] = max over m of p[n, m, r]

Rows of no stream get 0. Logits are float32 whatever the dtype of queries and keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.counting import count
from kvpress.kernels.cpu import launch
from kvpress.kernels.triton import device

BLOCK = 2**22
"""Most logits that the reference holds at once."""

_STATISTICS = {"sum": 0, "squares": 1, "max": 2}


def column_mass(
    q: Tensor,
    keys: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    lse: Tensor | None = None,
    softcap: float | None = None,
    causal: int = 0,
    sinks: Tensor | None = None,
    row_weights: Tensor | None = None,
    power: int = 1,
) -> Tensor:
    """Sum the softmax weights, or their squares, that each stored row gets from all queries of its stream.

    Args:
        q: queries [N, M, D]; float32, bfloat16 or float16.
        keys: rows [R, D] of the same dtypes; rows may be strided, elements of a row may not.
        starts: first row of each stream, int64 [N]; streams must not overlap.
        lengths: number of rows of each stream, int64 [N].
        scale: factor of the logits.
        lse: log-sum-exp of every query over all it attends to, float32 [N, M]; computed over the stream when None.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        causal: number Q of new tokens, the last Q rows of every stream: row m of q sees the first
            ``lengths[n] - Q + m % Q + 1`` rows. 0 lets every query see every row.
        sinks: learned sink logit of every query, float32 [N, M], which takes part in the softmax; not with lse.
        row_weights: factor of the softmax weights of every query, float32 [N, M], not negative; 1 by default.
        power: 1 for the sum, 2 for the sum of squares.

    Returns:
        Float32 [R].
    """
    if power not in (1, 2):
        raise ValueError(f"power must be 1 or 2, got {power}")
    check(q, keys, starts, lengths, lse, softcap, causal, sinks, row_weights)
    statistic = "sum" if power == 1 else "squares"
    return _columns(q, keys, starts, lengths, scale, lse, softcap, causal, sinks, row_weights, statistic)


def column_max(
    q: Tensor,
    keys: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    lse: Tensor | None = None,
    softcap: float | None = None,
    causal: int = 0,
    sinks: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Return the largest softmax weight that each stored row gets, float32 [R]; arguments as in `column_mass`.

    Args:
        q: queries [N, M, D].
        keys: rows [R, D].
        starts: first row of each stream, int64 [N].
        lengths: number of rows of each stream, int64 [N].
        scale: factor of the logits.
        lse: float32 [N, M].
        softcap: bound of the logits.
        causal: number of new tokens, or 0.
        sinks: float32 [N, M].
        row_weights: float32 [N, M].

    Returns:
        Float32 [R].
    """
    check(q, keys, starts, lengths, lse, softcap, causal, sinks, row_weights)
    return _columns(q, keys, starts, lengths, scale, lse, softcap, causal, sinks, row_weights, "max")


def reference(
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
) -> Tensor:
    """Ground truth in float32: the softmax of a block of queries after the other."""
    out = torch.zeros(keys.shape[0], device=q.device)
    queries = q.shape[1]
    for n, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        stored = keys[start : start + length].float()
        for block in torch.arange(queries, device=q.device).split(max(1, BLOCK // max(1, length))):
            logits = q[n, block].float() @ stored.T * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if causal:
                limit = length - causal + block % causal + 1
                hidden = torch.arange(length, device=q.device) >= limit[:, None]
                logits = logits.masked_fill(hidden, float("-inf"))
            if lse is not None:
                whole = lse[n, block]
            else:
                whole = logits.logsumexp(-1)
                if sinks is not None:
                    whole = torch.logaddexp(whole, sinks[n, block])
            # A query that sees nothing has lse = -inf; its weights must be 0, not exp(-inf + inf).
            weights = torch.exp(logits - whole.clamp_min(torch.finfo(torch.float32).min)[:, None])
            if row_weights is not None:
                weights = weights * row_weights[n, block, None]
            part = out[start : start + length]
            if statistic == "max":
                torch.maximum(part, weights.amax(0) if length else part, out=part)
            else:
                part += (weights if statistic == "sum" else weights.square()).sum(0)
    return out


@torch.library.custom_op("kvpress::columns", mutates_args=())
def _columns(
    q: Tensor,
    keys: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    lse: Tensor | None,
    softcap: float | None,
    causal: int,
    sinks: Tensor | None,
    row_weights: Tensor | None,
    statistic: str,
) -> Tensor:
    options = (lse, softcap, causal, sinks, row_weights, statistic)
    if device.available(keys):
        # First, because the checks below would wait for the device.
        from kvpress.kernels.triton import columns as gpu

        count("column_max" if statistic == "max" else "column_mass")
        return gpu.columns(q, keys, starts, lengths, scale, *options)
    _check_apart(starts, lengths)
    if launch.available(keys):
        count("column_max" if statistic == "max" else "column_mass")
        return _launch(q, keys, starts, lengths, scale, *options)
    checks.in_range(starts, lengths, keys.shape[0])
    return reference(q, keys, starts, lengths, scale, *options)


@_columns.register_fake
def _fake(q: Tensor, keys: Tensor, *_: object) -> Tensor:
    return q.new_empty(keys.shape[0], dtype=torch.float32)


def _launch(
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
    level_name: str | None = None,
) -> Tensor:
    streams, queries, channels = q.shape
    out = torch.zeros(keys.shape[0], dtype=torch.float32)
    stream = launch.run(
        "columns.cpp",
        "kvpress_columns",
        q.contiguous(),
        keys,
        starts.contiguous(),
        lengths.contiguous(),
        None if row_weights is None else row_weights.contiguous(),
        None if sinks is None else sinks.contiguous(),
        torch.empty(streams, queries, dtype=torch.float32) if lse is None else lse.contiguous(),
        out,
        keys.shape[0],
        streams,
        queries,
        channels,
        keys.stride(0),
        launch.DTYPES[q.dtype],
        launch.DTYPES[keys.dtype],
        causal,
        int(lse is None),
        _STATISTICS[statistic],
        torch.get_num_threads(),
        float(scale),
        float(softcap or 0),
        level_name=level_name,
    )
    if stream >= 0:
        raise ValueError(f"stream {stream} refers to rows outside the {keys.shape[0]} stored rows")
    return out


def check(
    q: Tensor,
    keys: Tensor,
    starts: Tensor,
    lengths: Tensor,
    lse: Tensor | None,
    softcap: float | None,
    causal: int,
    sinks: Tensor | None,
    row_weights: Tensor | None,
) -> None:
    """Refuse queries, keys and per-query arrays that do not belong together."""
    checks.options(q, keys.shape[0], softcap, causal)
    checks.shape("keys", keys, ("R", q.shape[2]), *checks.FLOATS)
    checks.rows_layout("keys", keys)
    checks.streams(starts, lengths, q)
    for name, tensor, dtype in (
        ("lse", lse, torch.float32),
        ("sinks", sinks, torch.float32),
        ("row_weights", row_weights, torch.float32),
    ):
        if tensor is not None:
            checks.shape(name, tensor, tuple(q.shape[:2]), dtype)
    if lse is not None and sinks is not None:
        raise ValueError("sinks must not be given with lse, which includes them")
    checks.same_device(q, keys, lse, sinks, row_weights)


def _check_apart(starts: Tensor, lengths: Tensor) -> None:
    """Refuse streams that share rows: a row has room for the statistic of one."""
    end = 0
    for start, length, n in sorted(zip(starts.tolist(), lengths.tolist(), range(len(starts)), strict=True)):
        if length > 0 and start < end:
            raise ValueError(f"streams must not share rows, but stream {n} begins inside another")
        end = max(end, start + length)
