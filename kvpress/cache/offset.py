# SPDX-License-Identifier: Apache-2.0
"""The vector that all keys of a stream share before their rotary embedding, taken out of them before a codec sees them.

Some models add a large bias to their keys. The rotary embedding makes another vector of it at every position, so that no codec
finds a common part in rotated keys, and their scales are those of the bias instead of those of the keys. Turned back, the bias
is one vector: the mean of the turned keys. It is stored once for each stream, subtracted from the keys at the angle of their
position, and added in attention by the same angles (`kvpress.kernels.formats.offset`). What is subtracted is added again
exactly, so that a poor mean costs precision of the codes, and nothing else.

`kvpress.cache.key_bias` decides which streams get one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.rotation import KeyRotation, Placed
from kvpress.cache.storage import Held, derived, part, per_layer, per_pair, per_stream

Spread: TypeAlias = Literal["length", "stream", "tile"]
"""Size of keys that decides the error of a codec: their length, or their distance from the mean of a stream or of a tile."""

SHIFT = "shift"
"""Name of the per-pair array that says how far keys were rotated away from their positions."""


@dataclass(eq=False)
class KeyOffset(Held):
    """What to add to the keys `[total, D]` of a segment: the centre `[N, D]` of their stream, rotated to their position.

    The centre is stored in the `order` of channels in which the rotary embedding turns two halves, None for that of the keys.
    Parts of a segment do not know where their pairs stand: they are told the `positions`, int32 [total].
    """

    centre: Annotated[Tensor, per_stream("scales")]
    rotation: Annotated[KeyRotation, part()]
    order: Annotated[Tensor | None, per_layer("tables")] = None
    positions: Annotated[Tensor | None, per_pair("indexes")] = None
    _shift: Annotated[Tensor | None, derived("indexes")] = field(default=None, init=False)

    def operand(self, segment: Placed) -> kernels.Offset:
        """As the operators take it."""
        angles, positions = self.rotation.angles, self.positions_of(segment)
        if positions is not None:
            shift = torch.zeros(len(self.centre), dtype=torch.int64, device=self.centre.device)
            rotary = kernels.Rotary(angles.coarse, angles.fine, shift, positions)
        else:
            if self._shift is None:  # made once: a step that is recorded copies nothing from the host
                self._shift = self.rotation.shift(segment)
            rotary = kernels.Rotary(angles.coarse, angles.fine, self._shift)
        return kernels.Offset(self.centre, rotary, self.order)

    def positions_of(self, segment: Placed) -> Tensor | None:
        """Return the positions of the pairs of a segment, int32 [total]; None where they follow from its row numbers."""
        if self.positions is not None:
            return self.positions
        if segment.contiguous and SHIFT not in segment.side:
            return None
        return positions_of(segment, self.rotation.pads)

    def of_part(self, segment: Placed, rows: Tensor) -> KeyOffset:
        """Return the offset of the pairs in some `rows` of a segment, which lie in a segment of their own."""
        positions = self.positions_of(segment)
        if positions is None:
            positions = positions_of(segment, self.rotation.pads)
        return replace(self, positions=positions[rows])

    def of_rows(self, segment: Placed, rows: Tensor) -> Tensor:
        """Return what to add to the keys in some `rows [n]` of a segment, float32 `[n, D]`."""
        return self.operand(segment).rows(segment.layout.streams_of(rows), rows)


def positions_of(segment: Placed, pads: Tensor | None) -> Tensor:
    """Return the positions that the keys of a segment are rotated to, int32 [total]; at least 0."""
    positions = segment.slots()
    if pads is not None:
        lengths = segment.layout.on(positions.device)[1]
        positions = positions - pads.repeat_interleave(lengths, output_size=segment.layout.total)
    if SHIFT in segment.side:
        positions = positions + segment.side[SHIFT].round().int()
    return positions.clamp_min(0).to(torch.int32)  # pairs of no token have a negative slot
