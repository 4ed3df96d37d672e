# SPDX-License-Identifier: Apache-2.0
"""The rows with the largest scores in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.operand import Ranges
from kvpress.kernels.selection.contract import refusal


def choose(
    scores: Tensor,
    where: Ranges,
    k: int,
    first: int = 0,
    last: int = 0,
    most: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on checked arguments, those of `kvpress.kernels.top_rows`."""
    streams, capacity = scores.shape
    rows = torch.empty(streams, min(k, capacity), dtype=torch.int32)
    counts = torch.empty(streams, dtype=torch.int64)
    stream = launch.run(
        "select.cpp",
        "kvpress_select",
        scores,
        where.starts.contiguous(),
        where.lengths.contiguous(),
        None if most is None else most.contiguous(),
        rows,
        counts,
        streams,
        scores.stride(0),
        capacity,
        rows.shape[1],
        first,
        last,
        torch.get_num_threads(),
        level=level,
    )
    if stream >= 0:
        raise refusal(stream, capacity, most)
    return rows, counts
