# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of stored keys: tables of angles that all layers share, and the positions of pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.layout import Layout
from kvpress.cache.storage import Held, per_layer, per_pair, per_stream
from kvpress.kernels import STEP, Rotary, rotate_halves

Rotate: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotates vectors `[B, heads, n, D]` by cosines and sines `[B, n, d]`, and is linear in these."""

TOLERANCE = 1e-2
"""Largest deviation of the tables from the model's cosines and sines, beyond rounding."""


@dataclass(frozen=True)
class RotaryChannels:
    """Pairs of channels that a rotary embedding rotates together."""

    index: Tensor
    """Entry of the model's cosines and sines for every rotary pair, int64."""
    order: Tensor | None
    """Order of channels `[D]`, int64, in which i and i + h of the first 2 h are a rotary pair; None for the given order."""

    @classmethod
    def of(cls, rotate: Rotate | None, cos: Tensor, sin: Tensor, dim: int) -> RotaryChannels | None:
        """Detect rotary pairs by rotating each of `dim` unit vectors; return None where the model rotates no pairs.

        `rotate` is the model's function, None for rotation of two halves; `cos` and `sin [1, 1, d]` belong to one position.
        """
        entries, device = cos.shape[-1], cos.device
        own_order = torch.arange(dim, device=device)
        if rotate is None:
            half = kernels.per_pair(cos).shape[-1]
            return cls(own_order[:half], None)
        alone = torch.eye(dim, device=device)[None, None]
        numbers = torch.arange(1, entries + 1, device=device).float().expand(1, dim, entries)
        kept = rotate(alone, numbers, 0 * numbers)[0, 0].diagonal()
        crossed = rotate(alone, 0 * numbers, numbers)[0, 0].fill_diagonal_(0)
        low, high = (crossed > 0).nonzero().unbind(1)  # by the sine, channel `low` adds to channel `high`
        order = torch.cat([low, high, _others(torch.cat([low, high]), dim)])
        index = kept[low].round().long() - 1
        if len(order) != dim or not bool(((index >= 0) & (index < entries)).all()):
            return None
        rotated = rotate(alone, cos.expand(1, dim, -1), sin.expand(1, dim, -1))[0, 0]
        expected = rotate_halves(alone[0, 0][:, order], cos[0, :, index], sin[0, :, index])
        if not torch.allclose(rotated[:, order], expected, atol=1e-3):
            return None
        return cls(index, None if torch.equal(order, own_order) else order)


def _others(channels: Tensor, dim: int) -> Tensor:
    """Return the channels of `dim` that are not listed, ascending."""
    listed = torch.zeros(dim, dtype=torch.bool, device=channels.device)
    listed[channels] = True
    return (~listed).nonzero().flatten()


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of a layer's keys."""

    angles: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Maps positions `[1, n]` to `(cos, sin)` of the model."""
    kind: str
    """Key of the embedding, which layers of the same kind share."""
    owner: str
    """Name of the attention class in messages."""
    rotate: Rotate | None = None
    """Rotary function of the model; None for rotation of two halves of the first channels."""
    known: bool = True
    """Whether both the angles and the rotary function of the model were located."""

    def channels(self, dim: int, device: torch.device) -> RotaryChannels | None:
        """Return the rotary pairs among `dim` channels; None where the model rotates no pairs."""
        cos, sin = (part[:, 1:].float() for part in self.angles(torch.arange(2, device=device)[None]))
        return RotaryChannels.of(self.rotate, cos, sin, dim)


class Placed(Protocol):
    """Pairs of some streams with slots; every segment implements it."""

    layout: Layout
    side: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""

    @property
    def contiguous(self) -> bool:
        """Whether no stream has gaps."""

    @property
    def positions(self) -> Tensor | None:
        """Slot of every pair, int32 [total], or None where every stream is contiguous."""

    def slots(self) -> Tensor:
        """Slot of every pair, int32 [total]."""

    def first_slot(self) -> Tensor:
        """Slot of the first pair of every stream, int64 [N]."""


class PlacedKeys(Placed, Protocol):
    """Placed pairs with dense keys `[total, D]`."""

    keys: Tensor


class Read(Protocol):
    """Part of `Sealing` that rotary tables need."""

    @property
    def seen(self) -> int:
        """Tokens of the sequence."""

    @property
    def mask(self) -> Tensor | None:
        """Real tokens, bool [B, seen]; None where nothing is padded."""

    @property
    def rotation(self) -> Rotation | None:
        """Rotary embedding of the layer; None where keys are not rotated."""

    @property
    def shared(self) -> dict[str, Any]:
        """State that all layers of the cache share."""


@dataclass(eq=False)
class Angles(Held):
    """Angles of a rotary embedding in the two tables of `Rotary`: one pair of tables for all layers of a cache.

    The model rounds position times frequency to float32, an error of up to 2e-3 rad at position 32k, and the tables have a
    different error. It cancels, since a key is rotated back and forth by the same tables.
    A copied cache shares the tables; growing replaces them in one cache only.
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
        """Extend the tables to at least `positions` positions.

        Args:
            positions: number of positions.
            compute: maps positions `[1, n]` to `(cos, sin)` of the model, `[1, n, rotary]` or `[1, n, rotary / 2]` each.
            device: device of positions and tables.
            owner: name of the attention class in messages.

        Raises:
            NotImplementedError: the angles are not linear in the position.
        """
        num_stored = STEP * len(self.coarse)
        if num_stored >= positions:
            return
        starts = torch.arange(num_stored, positions, STEP, device=device)
        # One call without positions past the last, since some embeddings choose frequencies by the largest position.
        probes = (starts[[0, len(starts) // 2, -1]] + STEP - 1).clamp_max(positions - 1)
        parts = torch.arange(STEP, device=device), starts, probes
        cos, sin = compute(torch.cat(parts)[None])
        table = torch.stack([kernels.per_pair(cos[0]), kernels.per_pair(sin[0])], dim=1).float()
        fine, coarse, expected = table.split([len(part) for part in parts])
        if num_stored:
            fine, coarse = self.fine, torch.cat([self.coarse, coarse])
        else:
            # Scaled embeddings (YaRN) have a factor in cos and sin, which stays in the coarse table.
            fine, coarse = fine / fine[:1, :1], coarse.clone()  # a view would keep the whole table
        computed = torch.stack(Rotary(coarse, fine, shift=probes).angles(probes), dim=1)
        # Three entries are rounded to the dtype of the model, and the product of position and frequency to float32.
        rounding = 2 * torch.finfo(cos.dtype).eps + positions * torch.finfo(torch.float32).eps
        if (computed - expected).abs().max() > TOLERANCE + rounding:
            raise NotImplementedError(
                f"the rotary embedding of {owner} is not linear in the position; its keys cannot be encoded"
            )
        self.coarse, self.fine = coarse, fine


def angle_bytes(positions: int, rotary: int) -> int:
    """Return the bytes of tables for so many positions."""
    return 4 * rotary * (STEP + -(-positions // STEP))


@dataclass(eq=False)
class KeyRotation(Held):
    """Positions and angles of the pairs of a segment: the pair in slot i of stream n has position `i - pads[n]`.

    Positions are stored for each pair where padding lies between the tokens of a row, as in a later turn of a batch, and where
    a pair has no token; its position is 0 then.
    """

    angles: Annotated[Angles, per_layer("tables")]
    """Tables of angles."""
    pads: Annotated[Tensor | None, per_stream("indexes")] = None
    """Padding before the pairs of each stream, int64 [N]; None for zeros."""
    places: Annotated[Tensor | None, per_pair("indexes")] = None
    """Position of each pair, int32 [total]; None where it follows from its slot and `pads`."""

    @classmethod
    def of(cls, angles: Angles, segment: Placed, mask: Tensor | None) -> KeyRotation:
        """Return the positions of the pairs of a segment; `mask [B, seen]` marks real tokens, None for all."""
        rotation = cls(angles) if mask is None else cls._beside_padding(angles, segment, mask)
        if rotation.places is None and not segment.contiguous:
            positions = rotation.positions(segment)
            if int(positions.min()) < 0:  # pairs without a token
                return cls(angles, None, positions.clamp_min(0).to(torch.int32))
        return rotation

    @classmethod
    def _beside_padding(cls, angles: Angles, segment: Placed, mask: Tensor) -> KeyRotation:
        layout, device = segment.layout, segment.device
        heads = layout.streams // len(mask)
        before = (~mask).cumsum(dim=1)  # also behind the last token of a row, as for left padding
        if bool(((before == before[:, -1:]) | ~mask).all()):
            return cls(angles, before[:, -1].to(device).repeat_interleave(heads))
        stream, slots = layout.stream_of_row.to(device), segment.slots().long()
        padding = before.to(device)[stream // heads, slots.clamp_min(0)]
        lowest, highest = (
            torch.zeros(layout.streams, dtype=torch.int64, device=device).scatter_reduce_(
                0, stream, padding, reduction, include_self=False
            )
            for reduction in ("amin", "amax")
        )
        if torch.equal(lowest, highest):
            return cls(angles, lowest)
        return cls(angles, None, (slots - padding).clamp_min(0).to(torch.int32))

    def _move(self, moves: Tensor) -> KeyRotation:
        if self.places is not None:
            return self
        return replace(self, pads=moves if self.pads is None else self.pads + moves)

    def places_alike(self, other: KeyRotation) -> bool:
        """Return whether slots have the same positions in both, which then store none."""
        if self.places is not None or other.places is not None:
            return False
        if self.pads is None or other.pads is None:
            return self.pads is other.pads
        return torch.equal(self.pads, other.pads)

    def rotary(self, shift: Tensor, positions: Tensor | None) -> Rotary:
        """Return the angles of all pairs of a segment as operand of operators, from its `shift` and its `positions`."""
        return Rotary(self.angles.coarse, self.angles.fine, shift, positions if self.places is None else self.places)

    def positions(self, segment: Placed) -> Tensor:
        """Return the position of every pair of a segment, integers [total]; negative for pairs without a token."""
        if self.places is not None:
            return self.places
        slots = segment.slots()
        if self.pads is None:
            return slots
        lengths = segment.layout.on(slots.device)[1]
        return slots - self.pads.repeat_interleave(lengths, output_size=segment.layout.total)

    def shift(self, segment: Placed) -> Tensor:
        """Return position minus row number of each stream, or minus the stored position or slot of its pairs, int64 [N]."""
        starts, _ = segment.layout.on(segment.device)
        if self.places is not None:
            return torch.zeros_like(starts)
        shift = segment.first_slot() - starts if segment.contiguous else torch.zeros_like(starts)
        return shift if self.pads is None else shift - self.pads

    def unrotate(self, segment: PlacedKeys) -> Tensor:
        """Return the keys of a segment before their rotary embedding, float32 [total, D]."""
        rotary = self.rotary(self.shift(segment), segment.positions)
        keys = torch.empty(segment.keys.shape, device=segment.device)
        for n in range(segment.layout.streams):
            rows = segment.layout.rows(n)
            at = rotary.at(n, torch.arange(rows.start, rows.stop, device=segment.device))
            keys[rows] = rotary.rotate_back(segment.keys[rows], at)
        return keys


def rotation_of(sealing: Read, segment: Placed, index: Tensor | None = None) -> KeyRotation | None:
    """Return positions and angles of the pairs of a segment; None where keys are not rotated, and outside a model.

    `index` lists the entries of the model's cosines and sines by rotary pair, None for all.

    Raises:
        NotImplementedError: the angles are not linear in the position.
    """
    rotation, device = sealing.rotation, segment.device
    if rotation is None:
        return None

    def compute(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotation.angles(positions)
        return (cos, sin) if index is None else (cos[..., index], sin[..., index])

    angles: Angles = sealing.shared.setdefault(f"angles {rotation.kind} {device}", Angles())
    angles.grow(sealing.seen, compute, device, rotation.owner)
    return KeyRotation.of(angles, segment, sealing.mask)
