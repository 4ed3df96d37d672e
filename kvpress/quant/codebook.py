# SPDX-License-Identifier: Apache-2.0
"""Pairs stored as codes into books of centroids; keys optionally as they were before their rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.layout import Layout, row_numbers
from kvpress.cache.rotation import KeyRotation
from kvpress.cache.segment import OfStreams, Segment
from kvpress.cache.storage import Held, derived, part, per_layer, per_pair
from kvpress.kernels import Coded, Rotary, pack
from kvpress.quant.kmeans import assign
from kvpress.quant.residual import Residual


@dataclass(eq=False)
class CodedRows(Held):
    """Rows of codes, uint8 [R, groups * bits / 8], into books [heads, groups, E, c], each times its `row_scale [R]`.

    Outliers in `residual` are added to what the codes stand for.
    """

    codes: Annotated[Tensor, per_pair("codes")]
    book: Annotated[Tensor, per_layer("tables")]
    bits: int
    row_scale: Annotated[Tensor | None, per_pair("scales")] = None
    residual: Annotated[Residual | None, part("corrections")] = None

    @classmethod
    def encode(cls, vectors: Tensor, book: Tensor, bits: int, layout: Layout) -> CodedRows:
        """Code `vectors [total, D]` by their nearest centroids, stream by stream."""
        heads, groups, _, coupled = book.shape
        codes = torch.empty(layout.total, groups, dtype=torch.int16 if bits > 8 else torch.uint8, device=vectors.device)
        for n in range(layout.streams):
            rows = layout.rows(n)
            points = vectors[rows].float().unflatten(1, (groups, coupled)).transpose(0, 1)
            codes[rows] = assign(points, book[n % heads].float())[0].T.to(codes.dtype)
        return cls(pack(codes, bits), book, bits)

    def read(self, rows: Tensor, head: Tensor) -> Tensor:
        """Return float32 rows `[n, D]`, each with the book of its `head [n]`."""
        side = self.operand()
        found = torch.empty(len(rows), side.channels, device=rows.device)
        for h in head.unique().tolist():
            found[head == h] = side.read(rows[head == h], h)
        return found

    def operand(self, rotary: Rotary | None = None) -> Coded:
        """As the operators take it."""
        correction = None if self.residual is None else self.residual.operand(len(self.codes))
        return Coded(self.codes, self.book, self.bits, self.row_scale, rotary, correction)


@dataclass(eq=False, repr=False)
class CodedSegment(Segment):
    """Pairs as codes; a book holds the centroids of every kv head, and stream n belongs to head `n % heads`.

    With `rotation`, keys were coded before their rotary embedding and are rotated when they are read. What was coded are keys
    and values times `key_basis` and `value_basis` [D, C], orthonormal, or for keys two orthonormal ones side by side.
    """

    keys: Annotated[CodedRows, part()]
    values: Annotated[CodedRows, part()]
    layout: OfStreams
    dtype: torch.dtype
    rotation: Annotated[KeyRotation | None, part()] = None
    key_basis: Annotated[Tensor | None, per_layer("tables")] = None
    value_basis: Annotated[Tensor | None, per_layer("tables")] = None
    _shift: Annotated[Tensor | None, derived("indexes")] = field(default=None, init=False)

    @property
    def lists_slots(self) -> bool:  # type: ignore[override]
        return self.rotation is not None

    def _rotary(self) -> Rotary | None:
        if self.rotation is None:
            return None
        if self._shift is None:  # made once: a step that is recorded copies nothing from the host
            self._shift = self.rotation.shift(self)
        return self.rotation.rotary(self._shift, self.positions)

    def _tables(self) -> Tensor | None:
        return super()._tables() if self.rotation is None else self.rotation.angles.coarse

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = row_numbers(rows, self.layout.total, self.device)
        streams = self.layout.streams_of(rows)
        head = streams % self.keys.book.shape[0]
        keys, values = self.keys.read(rows, head), self.values.read(rows, head)
        rotary = self._rotary()
        keys = keys if rotary is None else rotary.rotate(keys, rotary.at(streams, rows))
        keys = keys if self.key_basis is None else keys @ self.key_basis.T
        values = values if self.value_basis is None else values @ self.value_basis.T
        return keys.to(self.dtype), values.to(self.dtype)

    def operand(self) -> kernels.Rows:
        keys, values = (
            None if one is None else kernels.Basis(rotation=one) for one in (self.key_basis, self.value_basis)
        )
        return kernels.Rows(self.keys.operand(self._rotary()), self.values.operand(), self.log_weight, keys, values)
