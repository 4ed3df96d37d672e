# SPDX-License-Identifier: Apache-2.0
"""Decode attention in C++."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvpress.kernels.counting import count
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
    return DecodeCall(q, parts, options, others, level, added).run(q, parts)


class DecodeCall:
    """Packed arguments of `decode_parts` but for queries and results: it runs for all queries of one shape and dtype.

    It refers to parts weakly, so that the last part can cache it, see `cached_call`.
    """

    def __init__(
        self,
        q: Tensor,
        parts: Sequence[Part],
        options: Options,
        others: Sequence[Result] = (),
        level: str | None = None,
        added: Sequence[Products | None] = (),
    ) -> None:
        """Pack the arguments of `decode_parts`; the object is cached by the last part if all parts cache their structs."""
        streams, queries, _ = q.shape
        channels = parts[0].value_channels
        products = added or [None] * len(parts)
        has_offset = any([offset is not None for offset in products])
        self._out = streams, queries, channels
        self._exact = q.dtype == torch.float32
        self._settings = streams, queries, options.causal, q.dtype == torch.bfloat16, self._exact
        self._logits = float(options.scale), float(options.softcap or 0)
        self._level = level
        self._stored: Part | None = None
        """Part whose fields an entry point of a given level gets one by one."""
        lasts = not others and not has_offset and level is None and options.sinks is None
        if len(parts) == 1 and not others and not parts[0].rows.has_basis:
            (part,), (offset,) = parts, products
            self._entry = _ENTRIES[part.rows.keys.name]
            self._added = NO_PRODUCTS if offset is None else offset.fields()
            self._rest = (_NO_PRODUCTS if offset is None else packed(self._added)) + part.structure
            self._stored = part if level is not None else None
        else:
            pieces = _pieces(others)
            several = [_part_structure(*each, level) for each in zip(parts, products, strict=True)]
            merging = packed((channels, len(others), len(parts), *pieces))
            self._entry, self._added = _PARTS, NO_PRODUCTS
            self._rest = _NO_PRODUCTS + merging + b"".join([structure for structure, _ in several])
            self._kept = pieces, several
            lasts = lasts and all(kept is None for _, kept in several)
        if lasts:
            self._shape, self._dtype, self._options = q.shape, q.dtype, options
            self._earlier = [weakref.ref(part) for part in parts[:-1]]
            self._last = weakref.ref(parts[-1])
            vars(parts[-1])["_call"] = self

    def fits(self, q: Tensor, parts: Sequence[Part], options: Options) -> bool:
        """Whether a cached call was packed for such queries, these options and parts, of which the last caches it."""
        return (
            options is self._options
            and q.shape == self._shape
            and q.dtype == self._dtype
            and q.is_cpu
            and len(parts) == len(self._earlier) + 1
            and all([earlier() is part for earlier, part in zip(self._earlier, parts, strict=False)])
        )

    def repeat(self, q: Tensor) -> Result | None:
        """Attend again from queries in memory order [N, M, D], whose shape and dtype the caller has checked.

        Only for a cached call. Returns None where a part was freed.
        """
        parts = [part for part in (*[earlier() for earlier in self._earlier], self._last()) if part is not None]
        return self.run(q, parts) if len(parts) > len(self._earlier) else None

    def run(self, q: Tensor, parts: Sequence[Part]) -> Result:
        """Attend from `q [N, M, D]` to the packed parts; result and errors as in `decode_parts`."""
        for part in parts:
            count(part.kernel)
        out = torch.empty(*self._out, dtype=torch.float32)
        lse = torch.empty(*self._out[:2], dtype=torch.float32)
        read = q if self._exact and q.is_contiguous() else q.to(torch.float32).contiguous()
        settings = *self._settings, torch.get_num_threads(), *self._logits
        if self._stored is None:
            request = _REQUEST.pack(read.data_ptr(), out.data_ptr(), lse.data_ptr(), *settings)
            failure = launch.call(*self._entry, request + self._rest, self._level)
        else:
            fields = read, out, lse, *settings, *self._added, *self._stored.fields
            failure = launch.run(*self._entry, *fields, stored=self._stored.rows, level=self._level)
        if failure >= 0:
            index, stream = divmod(failure, self._out[0])
            _refuse(stream, parts[index])
        return out, lse


def packed_call(last: Part) -> DecodeCall | None:
    """Return the packed call that the last part of a call caches; None without one."""
    call: DecodeCall | None = vars(last).get("_call")
    return call


def cached_call(q: Tensor, parts: Sequence[Part], options: Options) -> DecodeCall | None:
    """Return the packed call that the last part caches if it fits the arguments, which then need no check; else None."""
    call = packed_call(parts[-1]) if parts else None
    return call if call is not None and call.fits(q, parts, options) else None


def _refuse(stream: int, part: Part) -> None:
    rows = part.rows
    has_positions = isinstance(rows.keys, Coded) or rows.key_offset is not None
    causes = "positions without angles" if has_positions else "groups or corrections that do not exist"
    raise ValueError(f"stream {stream} refers to rows outside the {rows.count} stored ones, or to {causes}")


def _part_structure(part: Part, products: Products | None, level: str | None) -> tuple[bytes, object]:
    """Return ``Parts::Part`` of cpu/parts.h and the fields of the entry point of a part, and what keeps its tensors alive.

    Cached by the part, which then keeps the tensors alive, where its rows have no offset and cache their bases.
    """
    cached: bytes | None = vars(part).get("_part_structure")
    if cached is not None and products is None and level is None:
        return cached, None
    entry = launch.address(*_ENTRIES[part.rows.keys.name], level=level)
    bases, fields = part.rows.bases()
    added = NO_PRODUCTS if products is None else products.fields()
    structure = part.structure_of(entry, added, bases)
    if products is None and level is None and part.rows.caches_bases:
        vars(part)["_part_structure"] = structure
        return structure, None
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
