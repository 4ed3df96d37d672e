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
        rows: stored rows; the caller applies their bases.
        where: rows of each stream.
        options: scale, softcap and causal mask; the caller adds sinks.
        level: instruction-set level; the fastest one by default.
        model_dtype: dtype of the queries before a basis was applied; float32 requires float32 products. That of `q` by default.
        added: products of the queries with the offset of the keys, by position.

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].

    Raises:
        ValueError: a stream refers to rows, groups, corrections or positions that are not stored.
    """
    part = Part(rows, where)
    request, out, lse = _request(q, options, rows.values.channels, 1, (model_dtype or q.dtype) == torch.float32, added)
    stream = launch.run(*_ENTRIES[rows.keys.name], *request, *part.fields, stored=rows, level=level)
    _check_stored(stream, part)
    return out[0], lse[0]


def decode_parts(
    q: Tensor, parts: Sequence[Part], options: Options, others: Sequence[Result] = (), level: str | None = None
) -> Result:
    """Attend to several parts without bases, and merge the results with `others`, in one call; arguments as in `decode`."""
    channels = parts[0].rows.values.channels
    request, outs, lses = _request(q, options, channels, len(parts), q.dtype == torch.float32)
    out, lse = torch.empty(outs.shape[1:]), torch.empty(lses.shape[1:])
    stored = _Parts.of(parts, level)
    merging = out, lse, channels, len(others), len(parts), *_pieces(others)
    failure = launch.run("decode.cpp", "kvpress_parts", *request, *merging, stored=stored, level=level)
    if failure >= 0:
        part, stream = divmod(failure, q.shape[0])
        _check_stored(stream, parts[part])
    return out, lse


def _request(
    q: Tensor, options: Options, channels: int, parts: int, exact: bool, added: Products | None = None
) -> tuple[tuple[Field, ...], Tensor, Tensor]:
    """Return the fields of ``Asked`` in cpu/problem.h, and the tensors for its results, [parts, N, M, Dv] and [parts, N, M]."""
    streams, queries, _ = q.shape
    out = torch.empty(parts, streams, queries, channels, dtype=torch.float32)
    lse = torch.empty(parts, streams, queries, dtype=torch.float32)
    tensors = q.to(torch.float32).contiguous(), out, lse, streams, queries
    settings = options.causal, q.dtype == torch.bfloat16, exact, torch.get_num_threads()
    logits = float(options.scale), float(options.softcap or 0)
    return (*tensors, *settings, *logits, *_added(added)), out, lse


def _added(added: Products | None) -> tuple[Field, ...]:
    """Return the fields of ``Added`` in cpu/problem.h."""
    if added is None:
        return None, None, None, 0
    return added.by_position.contiguous(), added.shift.contiguous(), added.positions, added.by_position.shape[2]


def _check_stored(stream: int, part: Part) -> None:
    if stream >= 0:
        rows = part.rows
        has_positions = isinstance(rows.keys, Coded) or rows.key_offset is not None
        causes = "positions without angles" if has_positions else "groups or corrections that do not exist"
        raise ValueError(f"stream {stream} refers to rows outside the {rows.count} stored ones, or to {causes}")


@dataclass(frozen=True)
class _Parts:
    """Parts as ``kvpress_parts`` in cpu/decode.cpp reads them."""

    parts: Sequence[Part]
    """Parts, which keep the tensors of the structure alive."""
    structure: bytes
    """Address of the entry point, length of the structure in bytes, and the structure, for each part in order."""

    @classmethod
    def of(cls, parts: Sequence[Part], level: str | None) -> _Parts:
        structures = []
        for part in parts:
            entry = launch.address(*_ENTRIES[part.rows.keys.name], level=level)
            structures += [struct.pack("qq", entry, len(part.structure)), part.structure]
        return cls(parts, b"".join(structures))


def merge(parts: Sequence[Result], level: str | None = None) -> Result:
    """Merge results over disjoint rows; arguments and results as in `kvpress.kernels.merge`."""
    out, lse = parts[0]
    merged, total = torch.empty(out.shape), torch.empty(lse.shape)
    # No queries: there are results to merge only.
    request = None, None, None, *lse.shape, 0, False, False, torch.get_num_threads(), 1.0, 0.0, *_added(None)
    merging = merged, total, merged.shape[-1], len(parts), 0, *_pieces(parts)
    launch.run("decode.cpp", "kvpress_parts", *request, *merging, level=level)
    return merged, total


def _pieces(parts: Sequence[Result]) -> list[Field]:
    """Return the fields of ``Piece`` in cpu/split.h for each result, without a stream and a range."""
    return [field for out, lse in parts for field in (None, None, None, out.contiguous(), lse.contiguous())]
