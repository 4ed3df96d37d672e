# SPDX-License-Identifier: Apache-2.0
"""Pairs stored as codes into books of centroids; keys optionally as they were before their rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.held import Held, derived, part, per_layer, per_pair, per_stream
from kvpress.cache.layout import Layout, row_numbers
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.kernels import STEP, Coded, Rotary, pack, rotate_halves
from kvpress.quant.kmeans import assign
from kvpress.quant.residual import Residual

TOLERANCE = 1e-2
"""Largest difference of an embedding that counts as linear from the model's cosines and sines, rounding apart."""


@dataclass(eq=False)
class Angles(Held):
    """Angles of a rotary embedding in the two tables of `Rotary`: one pair of tables for all layers of a cache.

    The model rounds position times frequency to float32, which moves its angles at position 32k by up to 2e-3 rad and those
    of the tables by another amount; a key that is rotated back and forth by the same tables does not see the difference.
    A copied cache shares the tables, and grows them without changing those of the other.
    """

    coarse: Annotated[Tensor, per_layer("tables")] = field(default_factory=lambda: torch.zeros(0, 2, 0))
    fine: Annotated[Tensor, per_layer("tables")] = field(default_factory=lambda: torch.zeros(0, 2, 0))

    def grow(
        self,
        positions: int,
        compute: Callable[[Tensor], tuple[Tensor, Tensor]],
        device: torch.device,
        owner: str,
    ) -> None:
        """Hold at least that many positions.

        Args:
            positions: number of positions.
            compute: maps positions `[1, n]` to `(cos, sin)` of the model, `[1, n, rotary]` or `[1, n, rotary / 2]` each.
            device: where the positions go and the tables lie.
            owner: what is embedded so, for the message of the error.

        Raises:
            NotImplementedError: the angles are not linear in the position.
        """
        held = STEP * len(self.coarse)
        if held >= positions:
            return
        starts = torch.arange(held, positions, STEP, device=device)
        # One call, which asks for no position past the last: some embeddings choose their frequencies by the largest.
        probes = (starts[[0, len(starts) // 2, -1]] + STEP - 1).clamp_max(positions - 1)
        parts = torch.arange(STEP, device=device), starts, probes
        cos, sin = compute(torch.cat(parts)[None])
        table = torch.stack([kernels.per_pair(cos[0]), kernels.per_pair(sin[0])], dim=1).float()
        fine, coarse, expected = table.split([len(part) for part in parts])
        if held:
            fine, coarse = self.fine, torch.cat([self.coarse, coarse])
        else:
            # Scaled embeddings (YaRN) carry a factor in cos and sin, which stays in the coarse table.
            fine, coarse = fine / fine[:1, :1], coarse.contiguous()
        found = torch.stack(Rotary(coarse, fine, shift=probes).angles(probes), dim=1)
        # Three entries are rounded to the dtype of the model, and the product of position and frequency to float32.
        rounding = 2 * torch.finfo(cos.dtype).eps + positions * torch.finfo(torch.float32).eps
        if (found - expected).abs().max() > TOLERANCE + rounding:
            raise NotImplementedError(
                f"the rotary embedding of {owner} is not linear in the position; its keys cannot be coded"
            )
        self.coarse, self.fine = coarse, fine


def angle_bytes(positions: int, rotary: int) -> int:
    """Bytes of the tables of so many positions."""
    return 4 * rotary * (STEP + -(-positions // STEP))


@dataclass(eq=False)
class KeyRotation(Held):
    """Where the pairs of a segment stand: the pair in slot i of stream n has position ``i - pads[n]``."""

    angles: Annotated[Angles, per_layer("tables")]
    pads: Annotated[Tensor | None, per_stream("indexes")] = None

    def rotary(self, shift: Tensor, positions: Tensor | None) -> Rotary:
        """Angles of all pairs of a segment, as the operators take them."""
        return Rotary(self.angles.coarse, self.angles.fine, shift, positions)

    def shift(self, segment: Segment) -> Tensor:
        """Position minus row number of each stream, or minus slot where a segment lists them, int64 [N]."""
        starts, _ = segment.layout.on(segment.device)
        shift = segment.first_slot() - starts if segment.contiguous else torch.zeros_like(starts)
        return shift if self.pads is None else shift - self.pads

    def unrotate(self, segment: DenseSegment) -> Tensor:
        """Keys of a segment as they were before their rotary embedding, float32 [total, D]."""
        rotary = self.rotary(self.shift(segment), segment.positions)
        keys = torch.empty(segment.keys.shape, device=segment.device)
        for n in range(segment.layout.streams):
            rows = segment.layout.rows(n)
            cos, sin = rotary.angles(rotary.at(n, torch.arange(rows.start, rows.stop, device=segment.device)))
            scale = cos.square() + sin.square()
            keys[rows] = rotate_halves(segment.keys[rows].float(), cos / scale, -sin / scale)
        return keys


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
        return None if self.rotation is None else self.rotation.angles.coarse

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
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
        bases = [None if one is None else kernels.Basis(rotation=one) for one in (self.key_basis, self.value_basis)]
        return kernels.Rows(self.keys.operand(self._rotary()), self.values.operand(), self.log_weight, *bases)
