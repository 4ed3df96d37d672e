# SPDX-License-Identifier: Apache-2.0
"""Decode attention in C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.coded import Coded
from kvpress.kernels.formats.fields import Field
from kvpress.kernels.formats.offset import NO_PRODUCTS, Products
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
    added: Products | None = None,
) -> Result:
    """Attend to one set of rows; arguments and result as in `decode_parts`."""
    return decode_parts(q, [Part(rows, where)], options, (), level, [added])


def decode_parts(
    q: Tensor,
    parts: Sequence[Part],
    options: Options,
    others: Sequence[Result] = (),
    level: str | None = None,
    added: Sequence[Products | None] = (),
) -> Result:
    """Attend to several parts and merge the results with `others`, in one call of compiled code, on checked arguments.

    Args:
        q: queries [N, M, D].
        parts: stored rows, with their bases, and the rows of each stream.
        options: scale, softcap and causal mask; the caller adds sinks.
        others: results over further disjoint rows.
        level: instruction-set level; the fastest one by default.
        added: products of the queries with the offset of the keys, by position, for each part; empty where none has an offset.

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].

    Raises:
        ValueError: a stream refers to rows, groups, corrections or positions that are not stored.
    """
    streams, queries, _ = q.shape
    channels = parts[0].value_channels
    out = torch.empty(streams, queries, channels, dtype=torch.float32)
    lse = torch.empty(streams, queries, dtype=torch.float32)
    tensors = q.to(torch.float32).contiguous(), out, lse, streams, queries
    settings = options.causal, q.dtype == torch.bfloat16, q.dtype == torch.float32, torch.get_num_threads()
    logits = float(options.scale), float(options.softcap or 0)
    request = *tensors, *settings, *logits
    fields = [NO_PRODUCTS if products is None else products.fields() for products in added] or [NO_PRODUCTS] * len(
        parts
    )
    if len(parts) == 1 and not others and not parts[0].rows.has_basis:
        (part,) = parts
        entry = _ENTRIES[part.rows.keys.name]
        failure = launch.run(*entry, *request, *fields[0], *part.fields, stored=part.rows, level=level)
    else:
        merging = channels, len(others), len(parts), *_pieces(others)
        stored = _Parts.of(parts, fields, level)
        failure = launch.run(
            "decode.cpp", "kvpress_parts", *request, *NO_PRODUCTS, *merging, stored=stored, level=level
        )
    if failure >= 0:
        index, stream = divmod(failure, streams)
        _refuse(stream, parts[index])
    return out, lse


def _refuse(stream: int, part: Part) -> None:
    rows = part.rows
    has_positions = isinstance(rows.keys, Coded) or rows.key_offset is not None
    causes = "positions without angles" if has_positions else "groups or corrections that do not exist"
    raise ValueError(f"stream {stream} refers to rows outside the {rows.count} stored ones, or to {causes}")


@dataclass(frozen=True)
class _Parts:
    """Parts as ``kvpress_parts`` in cpu/decode.cpp reads them."""

    kept: object
    """Parts and fields of their bases, which keep the tensors of the structure alive."""
    structure: bytes
    """``Parts::Part`` of cpu/parts.h and the fields of the entry point, for each part in order."""

    @classmethod
    def of(cls, parts: Sequence[Part], added: Sequence[tuple[Field, ...]], level: str | None) -> _Parts:
        entries = [launch.address(*_ENTRIES[part.rows.keys.name], level=level) for part in parts]
        bases = [part.rows.bases() for part in parts]
        structures = [
            part.structure_of(entry, fields, packed_bases)
            for part, entry, fields, (packed_bases, _) in zip(parts, entries, added, bases, strict=True)
        ]
        return cls((parts, bases), b"".join(structures))


def merge(parts: Sequence[Result], level: str | None = None) -> Result:
    """Merge results over disjoint rows; arguments and results as in `kvpress.kernels.merge`."""
    out, lse = parts[0]
    merged, total = torch.empty(out.shape), torch.empty(lse.shape)
    # No queries: there are results to merge only.
    request = None, merged, total, *lse.shape, 0, False, False, torch.get_num_threads(), 1.0, 0.0, *NO_PRODUCTS
    launch.run("decode.cpp", "kvpress_parts", *request, merged.shape[-1], len(parts), 0, *_pieces(parts), level=level)
    return merged, total


def _pieces(parts: Sequence[Result]) -> list[Field]:
    """Return the fields of ``Piece`` in cpu/split.h for each result, without a stream and a range."""
    return [field for out, lse in parts for field in (None, None, None, out.contiguous(), lse.contiguous())]
