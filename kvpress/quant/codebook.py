# SPDX-License-Identifier: Apache-2.0
"""Pairs stored as codes into codebooks of centroids; keys optionally before their rotary embedding."""

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
    """Rows of codes into a codebook of centroids."""

    codes: Annotated[Tensor, per_pair("codes")]
    """Packed codes, uint8 `[R, groups * bits / 8]`."""
    book: Annotated[Tensor, per_layer("tables")]
    """Centroids `[heads, groups, E, c]`."""
    bits: int
    row_scale: Annotated[Tensor | None, per_pair("scales")] = None
    """Factor of each decoded row, `[R]`."""
    residual: Annotated[Residual | None, part("corrections")] = None
    """Outliers, added to decoded rows."""

    @classmethod
    def encode(cls, vectors: Tensor, book: Tensor, bits: int, layout: Layout) -> CodedRows:
        """Encode `vectors [total, D]` by their nearest centroids, stream by stream."""
        heads, groups, _, coupled = book.shape
        codes = torch.empty(layout.total, groups, dtype=torch.int16 if bits > 8 else torch.uint8, device=vectors.device)
        for n in range(layout.streams):
            rows = layout.rows(n)
            points = vectors[rows].float().unflatten(1, (groups, coupled)).transpose(0, 1)
            codes[rows] = assign(points, book[n % heads].float())[0].T.to(codes.dtype)
        return cls(pack(codes, bits), book, bits)

    def read(self, rows: Tensor, head: Tensor) -> Tensor:
        """Return decoded rows, float32 `[n, D]`, each by the codebook of its `head [n]`."""
        side = self.operand()
        decoded = torch.empty(len(rows), side.channels, device=rows.device)
        for h in head.unique().tolist():
            decoded[head == h] = side.read(rows[head == h], h)
        return decoded

    def operand(self, rotary: Rotary | None = None) -> Coded:
        """Return the kernel operand."""
        correction = None if self.residual is None else self.residual.operand(len(self.codes))
        return Coded(self.codes, self.book, self.bits, self.row_scale, rotary, correction)


@dataclass(eq=False, repr=False)
class CodedSegment(Segment):
    """Coded pairs; a codebook holds the centroids of every KV head, and stream n belongs to head `n % heads`."""

    keys: Annotated[CodedRows, part()]
    values: Annotated[CodedRows, part()]
    layout: OfStreams
    dtype: torch.dtype
    rotation: Annotated[KeyRotation | None, part()] = None
    """Rotary embedding, applied to keys after decoding if they were encoded before it."""
    key_basis: Annotated[Tensor | None, per_layer("tables")] = None
    """Matrix that keys were multiplied by before encoding, orthonormal `[D, D]`."""
    value_basis: Annotated[Tensor | None, per_layer("tables")] = None
    """Matrix that values were multiplied by before encoding, orthonormal `[D, D]`."""
    _shift: Annotated[Tensor | None, derived("indexes")] = field(default=None, init=False)

    @property
    def lists_slots(self) -> bool:  # type: ignore[override]
        return self.rotation is not None

    def _rotary(self) -> Rotary | None:
        if self.rotation is None:
            return None
        if self._shift is None:  # computed once, so that a captured CUDA graph copies nothing from the CPU
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

    @property
    def computes_operands(self) -> bool:
        # The tables of a correction by row are computed from counts by chunk.
        return super().computes_operands or any(side.residual is not None for side in (self.keys, self.values))

    def operand(self) -> kernels.Rows:
        keys, values = (
            None if basis is None else kernels.Basis(rotation=basis) for basis in (self.key_basis, self.value_basis)
        )
        return kernels.Rows(self.keys.operand(self._rotary()), self.values.operand(), self.log_weight, keys, values)
