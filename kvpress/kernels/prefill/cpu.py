# SPDX-License-Identifier: Apache-2.0
"""Sparse causal attention in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.fields import DTYPES
from kvpress.kernels.prefill.contract import Lists


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lists: Lists,
    real: Tensor | None,
    scale: float,
    softcap: float | None,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on checked arguments; arguments and results as in `kvpress.kernels.block_prefill`."""
    (batch, heads, queries, channels), (kv_heads, total) = q.shape, keys.shape[1:3]
    keys, values = (side if side.stride(-1) == 1 else side.contiguous() for side in (keys, values))
    out = torch.empty(batch, heads, queries, values.shape[-1], dtype=torch.float32)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32)
    launch.run(
        "prefill.cpp",
        "kvpress_prefill",
        q.contiguous(),
        keys,
        values,
        lists.ends,
        lists.tiles,
        lists.column_ends,
        lists.columns,
        None if real is None else real.contiguous(),
        out,
        lse,
        batch,
        heads,
        kv_heads,
        queries,
        total,
        channels,
        values.shape[-1],
        lists.block,
        *keys.stride()[:3],
        *values.stride()[:3],
        DTYPES[q.dtype],
        torch.get_num_threads(),
        float(scale),
        float(softcap or 0),
        level=level,
    )
    return out, lse
