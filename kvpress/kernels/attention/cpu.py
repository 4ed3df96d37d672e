# SPDX-License-Identifier: Apache-2.0
"""Decode attention in C++."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.coded import Coded
from kvpress.kernels.formats.fields import Field
from kvpress.kernels.formats.offset import Products
from kvpress.kernels.formats.operand import Options, Part, Rows, Where

Result: TypeAlias = tuple[Tensor, Tensor]
"""Outputs [N, M, Dv] and log-sum-exp [N, M], float32."""

_ENTRIES = {
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
    added: Products | None = None,
) -> Result:
    """Run the kernel on checked arguments.

    Args:
        q: queries [N, M, D].
        rows: what is stored; bases are left to the caller.
        where: the rows of each stream.
        options: of the logits; sinks are left to the caller.
        level: instruction-set level; the best one by default.
        model_dtype: dtype of the queries before a basis; float32 asks for products as exact as that. That of `q` by default.
        added: products of the queries with what all keys of a stream share, by position.

    Raises:
        ValueError: a stream refers to something that is not stored.
    """
    part = Part(rows, where)
    asked, out, lse = _asked(q, options, rows.values.channels, 1, (model_dtype or q.dtype) == torch.float32, added)
    stream = launch.run(*_ENTRIES[rows.keys.name], *asked, *part.fields, stored=rows, level=level)
    _check_stored(stream, part)
    return out[0], lse[0]


def decode_parts(
    q: Tensor, parts: Sequence[Part], options: Options, others: Sequence[Result] = (), level: str | None = None
) -> Result:
    """Run the kernels of several parts without bases, and merge what they find with `others`, in one call; else as `decode`."""
    channels = parts[0].rows.values.channels
    asked, outs, lses = _asked(q, options, channels, len(parts), q.dtype == torch.float32)
    out, lse = torch.empty(outs.shape[1:]), torch.empty(lses.shape[1:])
    stored = _Parts.of(parts, level)
    told = out, lse, channels, len(others), len(parts), *_pieces(others)
    found = launch.run("decode.cpp", "kvpress_parts", *asked, *told, stored=stored, level=level)
    if found >= 0:
        part, stream = divmod(found, q.shape[0])
        _check_stored(stream, parts[part])
    return out, lse


def _asked(
    q: Tensor, options: Options, channels: int, parts: int, exact: bool, added: Products | None = None
) -> tuple[tuple[Field, ...], Tensor, Tensor]:
    """Return the fields of ``Asked`` of cpu/problem.h, and the results [parts, N, M, Dv] and [parts, N, M] that they name."""
    streams, queries, _ = q.shape
    out = torch.empty(parts, streams, queries, channels, dtype=torch.float32)
    lse = torch.empty(parts, streams, queries, dtype=torch.float32)
    asked = q.to(torch.float32).contiguous(), out, lse, streams, queries
    how = options.causal, q.dtype == torch.bfloat16, exact, torch.get_num_threads()
    logits = float(options.scale), float(options.softcap or 0)
    return (*asked, *how, *logits, *_added(added)), out, lse


def _added(added: Products | None) -> tuple[Field, ...]:
    """Return the fields of ``Added`` of cpu/problem.h."""
    if added is None:
        return None, None, None, 0
    return added.by_position.contiguous(), added.shift.contiguous(), added.positions, added.by_position.shape[2]


def _check_stored(stream: int, part: Part) -> None:
    if stream >= 0:
        rows = part.rows
        turned = isinstance(rows.keys, Coded) or rows.key_offset is not None
        what = "positions without angles" if turned else "groups or corrections that do not exist"
        raise ValueError(f"stream {stream} refers to rows outside the {rows.count} stored ones, or to {what}")


@dataclass(frozen=True)
class _Parts:
    """Parts as ``kvpress_parts`` of cpu/decode.cpp reads them: for each its entry point, how many bytes tell it, and these."""

    parts: Sequence[Part]
    structure: bytes

    @classmethod
    def of(cls, parts: Sequence[Part], level: str | None) -> _Parts:
        told = []
        for part in parts:
            entry = launch.address(*_ENTRIES[part.rows.keys.name], level=level)
            told += [struct.pack("qq", entry, len(part.structure)), part.structure]
        return cls(parts, b"".join(told))


def merge(parts: Sequence[Result], level: str | None = None) -> Result:
    """Combine results over disjoint rows, those of `kvpress.kernels.merge`."""
    out, lse = parts[0]
    whole, total = torch.empty(out.shape), torch.empty(lse.shape)
    # No part is to be asked.
    nothing = None, None, None, *lse.shape, 0, False, False, torch.get_num_threads(), 1.0, 0.0, *_added(None)
    told = whole, total, whole.shape[-1], len(parts), 0, *_pieces(parts)
    launch.run("decode.cpp", "kvpress_parts", *nothing, *told, level=level)
    return whole, total


def _pieces(parts: Sequence[Result]) -> list[Field]:
    """``Piece`` of cpu/split.h for each result, without a stream and a range."""
    return [field for out, lse in parts for field in (None, None, None, out.contiguous(), lse.contiguous())]
