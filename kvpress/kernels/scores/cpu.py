# SPDX-License-Identifier: Apache-2.0
"""Page bounds and label scores in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.fields import DTYPES, Field
from kvpress.kernels.formats.operand import Ranges
from kvpress.kernels.formats.packed import Packed


def score(
    q: Tensor,
    low: Dense | None,
    high: Dense | Packed,
    where: Ranges,
    reduce: str,
    capacity: int,
    level: str | None = None,
) -> Tensor:
    """Run the kernel on checked arguments; if `low` is None, `high` holds labels."""
    out = torch.empty(len(q), capacity)
    entry = "kvpress_labels" if low is None else "kvpress_bounds"
    stream = launch.run("scores.cpp", entry, *fields(q, low, high, where, reduce, capacity, out), level=level)
    if stream >= 0:
        raise refusal(stream, len(high.storage))
    return out


def fields(
    q: Tensor, low: Dense | None, high: Dense | Packed, where: Ranges, reduce: str, capacity: int, out: Tensor | None
) -> list[Field]:
    """Return the fields of the problem in scores_problem.h."""
    if reduce == "sum":  # the sum of products is the product of the sum
        q = q.float().sum(1, keepdim=True)
    stored, (scale, zero, zero_point, bits) = high.storage, (None, None, 0.0, 0)
    if isinstance(high, Packed):
        scale, zero, zero_point, bits = high.scale, high.zero, float(high.zero_point), high.bits
    streams, queries, channels = q.shape
    return [
        q.contiguous(),
        None if low is None else low.data,
        stored,
        scale,
        zero,
        zero_point,
        where.starts.contiguous(),
        where.lengths.contiguous(),
        out,
        len(stored),
        streams,
        queries,
        channels,
        stored.stride(0),
        DTYPES[stored.dtype if scale is None else scale.dtype],
        DTYPES[q.dtype],
        bits,
        capacity,
        torch.get_num_threads(),
    ]


def refusal(stream: int, stored: int) -> ValueError:
    """Return the error for a stream with rows outside of the `stored` ones."""
    return ValueError(f"stream {stream} refers to rows outside the {stored} stored rows")
