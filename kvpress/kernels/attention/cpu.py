# SPDX-License-Identifier: Apache-2.0
"""Decode attention in C++."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.coded import Coded
from kvpress.kernels.formats.operand import Listed, Options, Rows, Where

_SOURCES = {
    "dense": ("decode.cpp", "kvpress_dense"),
    "packed": ("decode.cpp", "kvpress_packed"),
    "coded": ("coded.cpp", "kvpress_coded"),
}


def decode(
    q: Tensor,
    rows: Rows,
    where: Where,
    options: Options,
    level: str | None = None,
    model_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on checked arguments.

    Args:
        q: queries [N, M, D].
        rows: what is stored; bases are left to the caller.
        where: the rows of each stream.
        options: of the logits; sinks are left to the caller.
        level: instruction-set level; the best one by default.
        model_dtype: dtype of the queries before a basis; float32 asks for products as exact as that. That of `q` by default.

    Raises:
        ValueError: a stream refers to something that is not stored.
    """
    streams, queries, _ = q.shape
    starts = listed = None
    width = 0
    if isinstance(where, Listed):
        listed, width = where.rows.to(torch.int32).contiguous(), where.rows.shape[1]
    else:
        starts = where.starts.contiguous()
    out = torch.empty(streams, queries, rows.values.channels, dtype=torch.float32)
    lse = torch.empty(streams, queries, dtype=torch.float32)
    source, entry = _SOURCES[rows.keys.name]
    stream = launch.run(
        source,
        entry,
        q.to(torch.float32).contiguous(),
        starts,
        listed,
        where.lengths.contiguous(),
        None if where.stream is None else where.stream.contiguous(),
        rows.weights(),
        out,
        lse,
        rows.count,
        streams,
        queries,
        width,
        options.causal,
        q.dtype == torch.bfloat16,
        (model_dtype or q.dtype) == torch.float32,
        torch.get_num_threads(),
        float(options.scale),
        float(options.softcap or 0),
        rows=rows,
        level=level,
    )
    if stream >= 0:
        what = "positions without angles" if isinstance(rows.keys, Coded) else "groups or corrections that do not exist"
        raise ValueError(f"stream {stream} refers to rows outside the {rows.count} stored ones, or to {what}")
    return out, lse


def merge(parts: Sequence[tuple[Tensor, Tensor]], level: str | None = None) -> tuple[Tensor, Tensor]:
    """Combine results over disjoint rows, those of `kvpress.kernels.merge`."""
    held = [(out.contiguous(), lse.contiguous()) for out, lse in parts]
    whole, total = torch.empty_like(held[0][0]), torch.empty_like(held[0][1])
    shape = total.numel(), whole.shape[-1], torch.get_num_threads(), len(held)
    pieces = [field for out, lse in held for field in (None, None, None, out, lse)]
    launch.run("decode.cpp", "kvpress_merge", whole, total, *shape, *pieces, level=level)
    return whole, total
