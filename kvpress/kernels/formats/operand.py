# SPDX-License-Identifier: Apache-2.0
"""Operands of kernels: stored `Rows`, the rows of each stream (`Ranges` or `Listed`), and `Options` of the logits.

A stream is one row of the batch and one KV head; its queries are the query heads of the GQA group times the new tokens.
A ragged cache passes the offsets of its segments; a rectangular window [B, H, capacity, D] is viewed as
[B * H * capacity, D] with ``starts = n * capacity`` plus the left padding.

    N streams, M = G * Q query rows (row ``g * Q + t``), R stored rows, D key and Dv value channels

    q [N, M, D]      keys [R, D]      values [R, Dv]
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.basis import Basis
from kvpress.kernels.formats.coded import Coded
from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.fields import DTYPES, Field, packed
from kvpress.kernels.formats.offset import Offset
from kvpress.kernels.formats.packed import Packed
from kvpress.kernels.formats.rotary import UNTURNED

Side: TypeAlias = Dense | Packed | Coded

_WEIGHTS = torch.float32, torch.float16


class Caching:
    """Base of dataclasses that cache their packed C struct; copies drop the cache, which holds addresses of tensors."""

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rows(Caching):
    """Stored pairs of keys and values, both in the same format.

    Reuse the object for rows that are read many times: it caches its argument checks and its packed C struct.
    """

    keys: Side
    """Keys [R, D]."""
    values: Side
    """Values [R, Dv]."""
    log_weight: Tensor | None = None
    """Added to the logit of each row, float32 or float16 [R]: log n for a row that stands for n equal ones."""
    key_basis: Basis | None = None
    """Basis that keys are stored in."""
    value_basis: Basis | None = None
    """Basis that values are stored in."""
    key_offset: Offset | None = None
    """Vector added to keys, outside of their basis, rotated to the positions of rows."""

    def __post_init__(self) -> None:
        if self.log_weight is not None and not self.log_weight.is_contiguous():
            object.__setattr__(self, "log_weight", self.log_weight.contiguous())

    @property
    def count(self) -> int:
        """Number R of stored rows."""
        return self.keys.storage.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether a kernel reads the pairs as they are stored, without a basis or an offset."""
        return self.key_basis is None and self.value_basis is None and self.key_offset is None

    def fields(self) -> tuple[Field, ...]:
        """Return the last fields of ``Problem`` in cpu/problem.h, or of ``CodedProblem`` in cpu/coded_problem.h: both sides."""
        angles: tuple[Field, ...] = ()
        if isinstance(self.keys, Coded):
            angles = UNTURNED if self.keys.rotary is None else self.keys.rotary.fields()
        return (*angles, *self.keys.fields(), *self.values.fields())

    @cached_property
    def structure(self) -> bytes:
        """C struct of `fields`, packed."""
        return packed(self.fields())

    @property
    def has_basis(self) -> bool:
        """Whether keys or values are stored in another basis."""
        return self.key_basis is not None or self.value_basis is not None

    def bases(self) -> tuple[bytes, tuple[Field, ...]]:
        """Return the struct ``Bases`` of cpu/basis.h, packed, and its fields, which keep the tensors alive.

        Both are cached, unless tensors had to be copied for it, which would take memory between calls.
        """
        cached: tuple[bytes, tuple[Field, ...]] | None = vars(self).get("_bases")
        if cached is not None:
            return cached
        sides = (self.key_basis, self.keys.channels), (self.value_basis, self.values.channels)
        made = tuple(field for basis, channels in sides for field in (basis or Basis()).fields(channels))
        result = packed(made), made
        stored = [tensor for basis, _ in sides if basis is not None for tensor in basis.tensors()]
        if all(any(field is tensor for tensor in stored) for field in made if isinstance(field, Tensor)):
            vars(self)["_bases"] = result
        return result

    @property
    def caches_bases(self) -> bool:
        """Whether `bases` was called, and its result is cached."""
        return "_bases" in vars(self)

    @cached_property
    def _fits(self) -> set[tuple[int, torch.device]]:
        """Head dimensions and devices of queries that these rows were checked with."""
        return set()

    def check(self, q: Tensor) -> None:
        """Refuse rows that do not fit queries [N, M, D], or each other."""
        query = q.shape[2], q.device
        if query not in self._fits:
            self._check(q)
            self._fits.add(query)

    def _check(self, q: Tensor) -> None:
        keys, values, rows = self.keys, self.values, self.count
        if type(keys) is not type(values):
            raise TypeError(f"keys and values must have one format, got {keys.name} keys and {values.name} values")
        rotated = self.key_basis is not None and self.key_basis.rotation is not None
        keys.check("keys", rows, None if rotated else q.shape[2])
        values.check("values", rows)
        if isinstance(keys, Dense) and keys.data.dtype != values.storage.dtype:
            raise ValueError(f"values must be {keys.data.dtype} like keys, got {values.storage.dtype}")
        if isinstance(values, Packed) and values.row_scale is not None:
            raise ValueError("values.row_scale must be None: only keys have a factor per row besides their scales")
        if isinstance(keys, Coded) and isinstance(values, Coded):
            if values.book.shape[0] != keys.book.shape[0]:
                books = keys.book.shape[0]
                raise ValueError(f"values.book must hold {books} books like keys.book, got {values.book.shape[0]}")
            if values.rotary is not None:
                raise ValueError("values.rotary must be None: only keys are rotated by their positions")
        checks.same_device(q, *keys.tensors(), *values.tensors(), self.log_weight)
        if self.log_weight is not None:
            checks.shape("log_weight", self.log_weight, (rows,), *_WEIGHTS)
        sides = ("key_basis", keys, self.key_basis, q.shape[2]), ("value_basis", values, self.value_basis, "Dv")
        for name, side, basis, outer in sides:
            if basis is not None:
                basis.check(name, side.channels, outer)
                checks.same_device(q, *basis.tensors())
        if self.key_offset is not None:
            self.key_offset.check("key_offset", rows, q.shape[2])
            checks.same_device(q, *self.key_offset.tensors())

    def check_streams(self, stream: Tensor | None, streams: int) -> None:
        """Refuse a stream index, or a number of streams, that does not fit the operands with an entry per stream."""
        operands: list[tuple[str, Tensor]] = []
        for name, basis in (("key_basis", self.key_basis), ("value_basis", self.value_basis)):
            for field in ("scale", "centre"):
                if basis is not None and (tensor := getattr(basis, field)) is not None:
                    operands.append((f"{name}.{field}", tensor))
        if isinstance(self.keys, Coded) and self.keys.rotary is not None:
            operands.append(("keys.rotary.shift", self.keys.rotary.shift))
        if self.key_offset is not None:
            operands.append(("key_offset.centre", self.key_offset.centre))
            operands.append(("key_offset.rotary.shift", self.key_offset.rotary.shift))
        if stream is None:
            for name, operand in operands:
                checks.shape(name, operand, (streams, *operand.shape[1:]), operand.dtype)
        elif not stream.is_cuda and len(stream):  # reading an index on a GPU would wait for it
            limit = min((len(operand) for _, operand in operands), default=2**31)
            low, high = int(stream.min()), int(stream.max())
            if low < 0 or high >= limit:
                raise ValueError(f"stream must be in [0, {limit}), got {low} .. {high}")

    def check_stored(self, listed: list[Tensor], streams: list[int]) -> None:
        """Refuse streams whose rows, int64 [S] each, refer to groups, corrections or positions that are not stored."""
        self.keys.check_stored("keys", listed, streams)
        self.values.check_stored("values", listed, streams)
        if self.key_offset is not None:
            self.key_offset.check_stored(listed, streams)


@dataclass(frozen=True)
class Ranges:
    """Range of rows ``starts[n] .. starts[n] + lengths[n]`` that each stream attends to."""

    starts: Tensor
    """First row of each stream, int64 [N]."""
    lengths: Tensor
    """Rows of each stream, int64 [N]."""
    stream: Tensor | None = None
    """Stream whose books, scales and shifts are used, int64 [N]; None for n itself."""
    longest: int | None = None
    """Upper bound of `lengths`, None if unknown; limits the grid on a GPU. Only the reference refuses longer streams."""

    def check(self, q: Tensor) -> None:
        """Refuse other shapes and devices than those of queries [N, M, D]."""
        checks.shape("starts", self.starts, (q.shape[0],), torch.int64)
        checks.shape("lengths", self.lengths, (q.shape[0],), torch.int64)
        _check_index(self.stream, q)
        checks.same_device(q, self.starts, self.lengths)

    def most_rows(self, stored: int) -> int:
        """Return an upper bound of the rows of a stream, from the number of stored rows, without waiting for a GPU."""
        return stored if self.longest is None else min(stored, self.longest)

    def streams(self, first: int, last: int) -> Ranges:
        """Return the ranges of the streams first .. last - 1, which use the same books, scales and shifts as before."""
        return Ranges(self.starts[first:last], self.lengths[first:last], _owners(self)[first:last], self.longest)

    def check_stored(self, rows: int) -> None:
        """Refuse streams that leave the storage, or are longer than `longest`."""
        limit = self.most_rows(rows)
        for n, (start, length) in enumerate(zip(self.starts.tolist(), self.lengths.tolist(), strict=True)):
            if start < 0 or length < 0 or start + length > rows:
                raise ValueError(f"stream {n} must lie in the {rows} stored rows, got {start} .. {start + length}")
            if length > limit:
                raise ValueError(f"stream {n} must have at most longest={limit} rows, got {length}")

    def numbers(self) -> list[Tensor]:
        """Return the row numbers of each stream, int64."""
        pairs = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return [torch.arange(start, start + length, device=self.starts.device) for start, length in pairs]


@dataclass(frozen=True)
class Listed:
    """List of rows that each stream attends to."""

    rows: Tensor
    """Row numbers, int32 or int64 [N, K]; stream n reads its first ``counts[n]``."""
    counts: Tensor
    """Rows of each stream, int64 [N]."""
    stream: Tensor | None = None
    """Stream whose books, scales and shifts are used, int64 [N]; None for n itself."""

    @property
    def lengths(self) -> Tensor:
        """Rows of each stream, int64 [N]."""
        return self.counts

    def most_rows(self, stored: int) -> int:
        """Return an upper bound of the rows of a stream: the entries of its list."""
        del stored
        return self.rows.shape[1]

    def check(self, q: Tensor) -> None:
        """Refuse other shapes and devices than those of queries [N, M, D]."""
        checks.shape("rows", self.rows, (q.shape[0], "K"), torch.int32, torch.int64)
        checks.shape("counts", self.counts, (q.shape[0],), torch.int64)
        _check_index(self.stream, q)
        checks.same_device(q, self.rows, self.counts)

    def streams(self, first: int, last: int) -> Listed:
        """Return the lists of the streams first .. last - 1, which use the same books, scales and shifts as before."""
        return Listed(self.rows[first:last], self.counts[first:last], _owners(self)[first:last])

    def check_stored(self, rows: int) -> None:
        """Refuse counts above K and listed rows that are not stored."""
        width = self.rows.shape[1]
        for n, count in enumerate(self.counts.tolist()):
            if not 0 <= count <= width:
                raise ValueError(f"counts[{n}] must be in [0, {width}], got {count}")
            used = self.rows[n, :count]
            if count and (int(used.min()) < 0 or int(used.max()) >= rows):
                raise ValueError(f"rows[{n}] must be in [0, {rows}), got {int(used.min())} .. {int(used.max())}")

    def numbers(self) -> list[Tensor]:
        """Return the row numbers of each stream, int64."""
        return [row[:count].long() for row, count in zip(self.rows, self.counts.tolist(), strict=True)]


Where: TypeAlias = Ranges | Listed


def _owners(where: Where) -> Tensor:
    """Return the number of the stream whose books, scales and shifts each stream uses, int64 [N]."""
    return torch.arange(len(where.lengths), device=where.lengths.device) if where.stream is None else where.stream


@dataclass(frozen=True, eq=False)
class Part(Caching):
    """Stored rows and the rows of each stream; reuse the object for rows that are read many times, as with `Rows`."""

    rows: Rows
    """Stored rows."""
    where: Where
    """Rows that each stream attends to."""

    def __post_init__(self) -> None:
        where = self.where
        if isinstance(where, Listed) and where.rows.dim() == 2 and not where.rows.shape[1]:
            # Kernels expect lists of at least one entry; with counts of 0 it is not read.
            object.__setattr__(self, "where", replace(where, rows=where.rows.new_full((len(where.rows), 1), -1)))

    def check(self, q: Tensor, query: tuple[int, int, torch.device]) -> None:
        """Refuse a part that does not fit queries q [N, M, D]; `query` holds N, D and the device."""
        if vars(self).get("_fits") != query:
            self.rows.check(q)
            self.where.check(q)
            self.rows.check_streams(self.where.stream, q.shape[0])
            vars(self)["_fits"] = query

    @property
    def value_channels(self) -> int:
        """Channels Dv of the output."""
        basis = self.rows.value_basis
        return self.rows.values.channels if basis is None else basis.outer(self.rows.values.channels)

    @cached_property
    def kernel(self) -> str:
        """Name of the kernel that reads the part."""
        return f"{self.rows.keys.name}_{'select' if isinstance(self.where, Listed) else 'decode'}"

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Last fields of ``Attention`` in cpu/problem.h: the rows of each stream."""
        starts = listed = None
        width = 0
        if isinstance(self.where, Listed):
            listed, width = self.where.rows.to(torch.int32).contiguous(), self.where.rows.shape[1]
        else:
            starts = self.where.starts.contiguous()
        stream = None if self.where.stream is None else self.where.stream.contiguous()
        lengths, weight = self.where.lengths.contiguous(), self.rows.log_weight
        dtype = 0 if weight is None else DTYPES[weight.dtype]
        return starts, listed, lengths, stream, weight, self.rows.count, width, dtype

    @cached_property
    def structure(self) -> bytes:
        """C struct of `fields` and of those of the rows, packed."""
        return packed(self.fields) + self.rows.structure

    def structure_of(self, entry: int, added: tuple[Field, ...], bases: bytes) -> bytes:
        """Return the struct ``Parts::Part`` of cpu/parts.h and `structure`, for the entry point at an address.

        `added` holds the fields of ``Added`` in cpu/problem.h, and `bases` is the struct of `Rows.bases`.
        """
        return packed((entry, len(self.structure), *added)) + bases + self.structure


def _check_index(stream: Tensor | None, q: Tensor) -> None:
    if stream is not None:
        checks.shape("stream", stream, (q.shape[0],), torch.int64)
        checks.same_device(q, stream)


@dataclass(frozen=True)
class Options:
    """Settings of the logits ``softcap(scale * q . k)`` and of the softmax."""

    scale: float
    """Factor of the products."""
    softcap: float | None = None
    """Bound of the logits, which become ``softcap * tanh(logits / softcap)``; None for none."""
    causal: int = 0
    """Number Q of new tokens: query row m sees the first ``lengths[n] - Q + m % Q + 1`` rows of its stream; 0 for all rows."""
    sinks: Tensor | None = None
    """Extra logit of each query, without a value, in its softmax, float32 [N, M]."""

    def check(self, q: Tensor) -> None:
        """Refuse options that do not fit queries [N, M, D]."""
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive or None, got {self.softcap}")
        if self.causal < 0 or (self.causal and q.shape[1] % self.causal):
            raise ValueError(f"causal must be 0 or divide the {q.shape[1]} query rows, got {self.causal}")
        if self.sinks is not None:
            checks.shape("sinks", self.sinks, tuple(q.shape[:2]), torch.float32)
            checks.same_device(q, self.sinks)

    def logits(self, products: Tensor, log_weight: Tensor | None, queries: Tensor) -> Tensor:
        """Return the float32 logits of products [S, T] of query rows with the T rows of a stream.

        Args:
            products: float32 [S, T].
            log_weight: log-weights of the T rows, float32 [T], or None.
            queries: numbers of the S query rows, int64 [S].

        Returns:
            Logits [S, T], minus infinity where a query does not see a row.
        """
        logits, length = products * self.scale, products.shape[1]
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if log_weight is not None:
            logits = logits + log_weight
        if self.causal:
            limit = length - self.causal + queries % self.causal + 1
            logits = logits.masked_fill(torch.arange(length, device=queries.device) >= limit[:, None], float("-inf"))
        return logits
