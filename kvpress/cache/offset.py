# SPDX-License-Identifier: Apache-2.0
"""Key offset: a vector that all keys of a stream share before their rotary embedding, subtracted before encoding.

Some models add a large bias to their keys. The rotary embedding rotates it to a different vector at every position, so that
rotated keys have no common part, and the bias determines the scales of a codec. Before rotation the bias is a single vector,
the mean of the unrotated keys. It is stored once per stream, subtracted from the keys at the angle of their position, and added
in attention by the same angles (`kvpress.kernels.formats.offset`). The addition undoes the subtraction exactly, so that a poor
mean costs precision of the codes only.

`kvpress.cache.key_bias` decides which streams get an offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.rotation import KeyRotation, Placed
from kvpress.cache.storage import Held, derived, part, per_layer, per_pair, per_stream

Spread: TypeAlias = Literal["length", "stream", "tile"]
"""Statistic of keys that the error of a codec grows with: length, or distance from the mean of a stream or tile."""

SHIFT = "shift"
"""Name of the per-pair array with the positions by which keys were rotated away from their own."""


@dataclass(eq=False)
class KeyOffset(Held):
    """Vectors to add to the keys of a segment: the centre of each stream, rotated to the position of each key."""

    centre: Annotated[Tensor, per_stream("scales")]
    """Centres `[N, D]`, with channels in `order`."""
    rotation: Annotated[KeyRotation, part()]
    """Positions and angles."""
    order: Annotated[Tensor | None, per_layer("tables")] = None
    """Order of channels `[D]` in which the rotary embedding rotates two halves; None for the order of the keys."""
    positions: Annotated[Tensor | None, per_pair("indexes")] = None
    """Positions, int32 [total], for parts of a segment, which have no slots."""
    _shift: Annotated[Tensor | None, derived("indexes")] = field(default=None, init=False)
    """`KeyRotation.shift` of the segment."""

    def operand(self, segment: Placed) -> kernels.Offset:
        """Return the offset as operand of operators."""
        angles, positions = self.rotation.angles, self.positions_of(segment)
        if self.computes_positions(segment):
            shift = torch.zeros(len(self.centre), dtype=torch.int64, device=self.centre.device)
        else:
            if self._shift is None:  # cached, since a recorded step must not copy from the host
                stored = self.positions is not None
                self._shift = (
                    torch.zeros_like(self.centre[:, 0], dtype=torch.int64) if stored else self.rotation.shift(segment)
                )
            shift = self._shift
        rotary = kernels.Rotary(angles.coarse, angles.fine, shift, positions)
        return kernels.Offset(self.centre, rotary, self.order)

    def computes_positions(self, segment: Placed) -> bool:
        """Whether `positions_of` returns a new tensor at each call."""
        if self.positions is not None:
            return False
        return SHIFT in segment.side or (self.rotation.places is None and not segment.contiguous)

    def positions_of(self, segment: Placed) -> Tensor | None:
        """Return the positions of the pairs of a segment, int32 [total]; None where they follow from its row numbers."""
        if self.computes_positions(segment):
            return positions_of(segment, self.rotation)
        return self.rotation.places if self.positions is None else self.positions

    def of_part(self, segment: Placed, rows: Tensor) -> KeyOffset:
        """Return the offset for a part with some `rows` of a segment."""
        positions = self.positions_of(segment)
        if positions is None:
            positions = positions_of(segment, self.rotation)
        return replace(self, rotation=KeyRotation(self.rotation.angles), positions=positions[rows])

    def of_rows(self, segment: Placed, rows: Tensor) -> Tensor:
        """Return the offset of the keys in some `rows [n]` of a segment, float32 `[n, D]`."""
        return self.operand(segment).rows(segment.layout.streams_of(rows), rows)


def common_offset(parts: Sequence[tuple[Placed, KeyOffset | None]], order: Tensor) -> KeyOffset | None:
    """Return the offset of segments in one, from the offset of each, oldest first; None if none has any.

    The first pairs of a stream decide about its centre, which is 0 if their segment has no offset. `order [total]` lists the
    rows of the segments, back to back, in the order of the joined segment.
    """
    offsets = [offset for _, offset in parts if offset is not None]
    if not offsets:
        return None
    centre, unset = torch.zeros_like(offsets[-1].centre), set(range(len(offsets[-1].centre)))
    for segment, offset in parts:
        begun = sorted(n for n in unset if segment.layout.lengths[n])
        if offset is not None:
            centre[begun] = offset.centre[begun]
        unset.difference_update(begun)
    rotation = offsets[-1].rotation
    if not all(rotation.places_alike(offset.rotation) for offset in offsets):
        positions = [
            torch.zeros_like(segment.slots()) if offset is None else offset.rotation.positions(segment)
            for segment, offset in parts
        ]
        rotation = KeyRotation(rotation.angles, None, torch.cat(positions)[order].clamp_min(0).to(torch.int32))
    return replace(offsets[-1], centre=centre, rotation=rotation)


def positions_of(segment: Placed, rotation: KeyRotation) -> Tensor:
    """Return the positions that the keys of a segment are rotated to, int32 [total]; at least 0."""
    positions = rotation.positions(segment)
    if SHIFT in segment.side:
        positions = positions + segment.side[SHIFT].round().int()
    return positions.clamp_min(0).to(torch.int32)  # pairs without a token have a negative slot
