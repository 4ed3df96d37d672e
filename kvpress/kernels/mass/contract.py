# SPDX-License-Identifier: Apache-2.0
"""Attention mass of every stored row over many queries, to use beside flash attention: there is no queries x rows matrix.

With the softmax of each query over the rows that it sees,

    p[n, m, r] = exp(softcap(scale * q[n, m] . keys[r]) + log_weight[r] - lse[n, m])

    sum[r] = sum over m of p[n, m, r]      squares[r] = sum over m of p[n, m, r] ** 2      max[r] = max over m of p[n, m, r]

Rows of no stream get 0. Logits are float32 for all dtypes of queries and keys. Keys are dense, and values are not read.

Every back end has a function ``receive(q, rows, where, options, statistic, lse, query_weight)``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.operand import Options, Ranges, Rows

Statistic: TypeAlias = Literal["sum", "squares", "max"]


def check(
    q: Tensor, rows: Rows, where: Ranges, options: Options, lse: Tensor | None, query_weight: Tensor | None
) -> None:
    """Refuse rows, queries and per-query tensors that do not match."""
    checks.shape("q", q, ("N", "M", "D"), *checks.FLOATS)
    if not isinstance(rows.keys, Dense):
        raise TypeError(f"keys must be dense, got {rows.keys.name} keys")
    if rows.key_basis is not None:
        raise ValueError("rows.key_basis must be None: keys must be stored in the model's basis")
    rows.check(q)
    where.check(q)
    options.check(q)
    for name, tensor in (("lse", lse), ("query_weight", query_weight)):
        if tensor is not None:
            checks.shape(name, tensor, tuple(q.shape[:2]), torch.float32)
    if lse is not None and options.sinks is not None:
        raise ValueError("sinks must not be given with lse, which includes them")
    checks.same_device(q, lse, query_weight)


def check_apart(where: Ranges) -> None:
    """Refuse streams that share rows: the result has one entry per row."""
    end = 0
    starts, lengths = where.starts.tolist(), where.lengths.tolist()
    for start, length, n in sorted(zip(starts, lengths, range(len(starts)), strict=True)):
        if length > 0 and start < end:
            raise ValueError(f"streams must not share rows, but stream {n} begins inside another")
        end = max(end, start + length)
