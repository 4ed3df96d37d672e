# SPDX-License-Identifier: Apache-2.0
"""Decode attention in C++."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.coded import Coded
from kvpress.kernels.formats.fields import Field, packed
from kvpress.kernels.formats.offset import NO_PRODUCTS, Products
from kvpress.kernels.formats.operand import Options, Part, Rows, Where

Result: TypeAlias = tuple[Tensor, Tensor]
"""Outputs [N, M, Dv] and log-sum-exp [N, M], float32."""

_REQUEST = struct.Struct("=9q2d")
"""Fields of ``Asked`` in cpu/problem.h up to ``added``."""
_NO_PRODUCTS = packed(NO_PRODUCTS)
_PARTS = "decode.cpp", "kvpress_parts"
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
    exact = q.dtype == torch.float32
    read = q if exact and q.is_contiguous() else q.to(torch.float32).contiguous()
    settings = options.causal, q.dtype == torch.bfloat16, exact, torch.get_num_threads()
    request = read, out, lse, streams, queries, *settings, float(options.scale), float(options.softcap or 0)
    products = added or [None] * len(parts)
    if len(parts) == 1 and not others and not parts[0].rows.has_basis:
        (part,), (offset,) = parts, products
        fields = NO_PRODUCTS if offset is None else offset.fields()
        entry = _ENTRIES[part.rows.keys.name]
        if level is None:
            failure = launch.call(*entry, _packed(request, fields) + part.structure)
        else:
            failure = launch.run(*entry, *request, *fields, *part.fields, stored=part.rows, level=level)
    else:
        pieces, several = _pieces(others), [_part_structure(*each, level) for each in zip(parts, products, strict=True)]
        merging = packed((channels, len(others), len(parts), *pieces))
        structures = b"".join([structure for structure, _ in several])
        failure = launch.call(*_PARTS, _packed(request, NO_PRODUCTS) + merging + structures, level)
    if failure >= 0:
        index, stream = divmod(failure, streams)
        _refuse(stream, parts[index])
    return out, lse


def _refuse(stream: int, part: Part) -> None:
    rows = part.rows
    has_positions = isinstance(rows.keys, Coded) or rows.key_offset is not None
    causes = "positions without angles" if has_positions else "groups or corrections that do not exist"
    raise ValueError(f"stream {stream} refers to rows outside the {rows.count} stored ones, or to {causes}")


def _packed(request: tuple[Field, ...], added: tuple[Field, ...]) -> bytes:
    """Pack the fields of ``Asked`` in cpu/problem.h; faster than `packed`, since their types are known."""
    q, out, lse, *numbers = request
    structure = _REQUEST.pack(q.data_ptr(), out.data_ptr(), lse.data_ptr(), *numbers)  # type: ignore[union-attr]
    return structure + (_NO_PRODUCTS if added is NO_PRODUCTS else packed(added))


def _part_structure(part: Part, products: Products | None, level: str | None) -> tuple[bytes, object]:
    """Return ``Parts::Part`` of cpu/parts.h and the fields of the entry point of a part, and what keeps its tensors alive.

    Cached by the part where its rows have no offset and cache their bases.
    """
    cached: tuple[bytes, object] | None = vars(part).get("_part_structure")
    if cached is not None and products is None and level is None:
        return cached
    entry = launch.address(*_ENTRIES[part.rows.keys.name], level=level)
    bases, fields = part.rows.bases()
    added = NO_PRODUCTS if products is None else products.fields()
    structure = part.structure_of(entry, added, bases)
    if products is None and level is None and part.rows.caches_bases:
        vars(part)["_part_structure"] = structure, None
    return structure, (added, fields)


def merge(parts: Sequence[Result], level: str | None = None) -> Result:
    """Merge results over disjoint rows; arguments and results as in `kvpress.kernels.merge`."""
    out, lse = parts[0]
    merged, total = torch.empty(out.shape), torch.empty(lse.shape)
    # No queries: there are results to merge only.
    request = None, merged, total, *lse.shape, 0, False, False, torch.get_num_threads(), 1.0, 0.0, *NO_PRODUCTS
    launch.run(*_PARTS, *request, merged.shape[-1], len(parts), 0, *_pieces(parts), level=level)
    return merged, total


def _pieces(parts: Sequence[Result]) -> list[Field]:
    """Return the fields of ``Piece`` in cpu/split.h for each result, without a stream and a range."""
    return [field for out, lse in parts for field in (None, None, None, out.contiguous(), lse.contiguous())]
