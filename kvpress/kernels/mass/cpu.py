# SPDX-License-Identifier: Apache-2.0
"""Statistics of softmax weights in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.fields import DTYPES
from kvpress.kernels.formats.operand import Options, Ranges, Rows
from kvpress.kernels.mass.contract import Statistic

_STATISTICS = {"sum": 0, "squares": 1, "max": 2}


def receive(
    q: Tensor,
    rows: Rows,
    where: Ranges,
    options: Options,
    statistic: Statistic,
    lse: Tensor | None = None,
    query_weight: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """Run the kernel on checked arguments; arguments and result as in `kvpress.kernels.column_mass`."""
    streams, queries, channels = q.shape
    keys = rows.keys.storage
    out = torch.zeros(rows.count, dtype=torch.float32)
    stream = launch.run(
        "mass.cpp",
        "kvpress_mass",
        q.contiguous(),
        keys,
        where.starts.contiguous(),
        where.lengths.contiguous(),
        None if query_weight is None else query_weight.contiguous(),
        None if options.sinks is None else options.sinks.contiguous(),
        rows.log_weight,
        torch.empty(streams, queries, dtype=torch.float32) if lse is None else lse.contiguous(),
        out,
        rows.count,
        streams,
        queries,
        channels,
        keys.stride(0),
        DTYPES[q.dtype],
        DTYPES[keys.dtype],
        0 if rows.log_weight is None else DTYPES[rows.log_weight.dtype],
        options.causal,
        lse is None,
        _STATISTICS[statistic],
        torch.get_num_threads(),
        float(options.scale),
        float(options.softcap or 0),
        level=level,
    )
    if stream >= 0:
        raise ValueError(f"stream {stream} refers to rows outside the {rows.count} stored rows")
    return out
