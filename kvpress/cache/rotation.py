# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of stored keys: tables of angles that all layers share, and the positions of a segment's pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.layout import Layout
from kvpress.cache.storage import Held, per_layer, per_stream
from kvpress.kernels import STEP, Rotary, rotate_halves

Rotate: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotates vectors `[B, heads, n, D]` by cosines and sines `[B, n, d]`, and is linear in these."""

TOLERANCE = 1e-2
"""Largest difference of an embedding that counts as linear from the model's cosines and sines, rounding apart."""


@dataclass(frozen=True)
class Channels:
    """Which channels a rotary embedding turns together.

    In the `order [D]`, int64, channels i and i + h of the leading 2 h are a pair; None where they are so in the keys. Pair i is
    turned by entry ``index[i]`` of the model's cosines and sines.
    """

    index: Tensor
    order: Tensor | None

    @classmethod
    def of(cls, rotate: Rotate | None, cos: Tensor, sin: Tensor, dim: int) -> Channels | None:
        """Find out which channels belong together by rotating each of `dim` alone; None where no two are turned as a pair.

        `rotate` is the model's own function, None where it turns two halves; `cos` and `sin [1, 1, d]` are those of a position.
        """
        entries, device = cos.shape[-1], cos.device
        place = torch.arange(dim, device=device)
        if rotate is None:
            half = kernels.per_pair(cos).shape[-1]
            return cls(place[:half], None)
        alone = torch.eye(dim, device=device)[None, None]
        numbers = torch.arange(1, entries + 1, device=device).float().expand(1, dim, entries)
        kept = rotate(alone, numbers, 0 * numbers)[0, 0].diagonal()
        crossed = rotate(alone, 0 * numbers, numbers)[0, 0].fill_diagonal_(0)
        low, high = (crossed > 0).nonzero().unbind(1)  # by the sine, channel `low` adds to channel `high`
        order = torch.cat([low, high, _others(torch.cat([low, high]), dim)])
        index = kept[low].round().long() - 1
        if len(order) != dim or not bool(((index >= 0) & (index < entries)).all()):
            return None
        turned = rotate(alone, cos.expand(1, dim, -1), sin.expand(1, dim, -1))[0, 0]
        expected = rotate_halves(alone[0, 0][:, order], cos[0, :, index], sin[0, :, index])
        if not torch.allclose(turned[:, order], expected, atol=1e-3):
            return None
        return cls(index, None if torch.equal(order, place) else order)


def _others(channels: Tensor, dim: int) -> Tensor:
    """Return the channels of `dim` that are not listed, ascending."""
    listed = torch.zeros(dim, dtype=torch.bool, device=channels.device)
    listed[channels] = True
    return (~listed).nonzero().flatten()


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of a layer's keys: `angles` maps positions `[1, n]` to `(cos, sin)` of the model.

    `rotate` is the model's function that turns vectors by them, None where it turns two halves of the leading channels. Layers
    of one `kind` share their embedding; `owner` names the attention in messages. It is not `known` where the model has no
    angles or no function of its own that could be found.
    """

    angles: Callable[[Tensor], tuple[Tensor, Tensor]]
    kind: str
    owner: str
    rotate: Rotate | None = None
    known: bool = True

    def channels(self, dim: int, device: torch.device) -> Channels | None:
        """Return which of `dim` channels are turned together; None where the model is not known to turn pairs of channels."""
        cos, sin = (part[:, 1:].float() for part in self.angles(torch.arange(2, device=device)[None]))
        return Channels.of(self.rotate, cos, sin, dim)


class Placed(Protocol):
    """Pairs of some streams, of which it is known where they stand; every segment is one."""

    layout: Layout
    side: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""

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
    """The same with dense keys `[total, D]`."""

    keys: Tensor


class Read(Protocol):
    """What a cache has read when it encodes: `Sealing` says more."""

    @property
    def seen(self) -> int:
        """Tokens of the sequence."""

    @property
    def mask(self) -> Tensor | None:
        """Which tokens are real, bool [B, seen]; None where nothing is padded."""

    @property
    def rotation(self) -> Rotation | None:
        """The rotary embedding of the layer; None where keys are never rotated."""

    @property
    def shared(self) -> dict[str, Any]:
        """What all layers of the cache have in common."""


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

    def shift(self, segment: Placed) -> Tensor:
        """Position minus row number of each stream, or minus slot where a segment lists them, int64 [N]."""
        starts, _ = segment.layout.on(segment.device)
        shift = segment.first_slot() - starts if segment.contiguous else torch.zeros_like(starts)
        return shift if self.pads is None else shift - self.pads

    def unrotate(self, segment: PlacedKeys) -> Tensor:
        """Keys of a segment as they were before their rotary embedding, float32 [total, D]."""
        rotary = self.rotary(self.shift(segment), segment.positions)
        keys = torch.empty(segment.keys.shape, device=segment.device)
        for n in range(segment.layout.streams):
            rows = segment.layout.rows(n)
            cos, sin = rotary.angles(rotary.at(n, torch.arange(rows.start, rows.stop, device=segment.device)))
            scale = cos.square() + sin.square()
            keys[rows] = rotate_halves(segment.keys[rows].float(), cos / scale, -sin / scale)
        return keys


def rotation_of(sealing: Read, streams: int, device: torch.device, index: Tensor | None = None) -> KeyRotation | None:
    """Return the positions of a layer's pairs; None where its keys are never rotated, or outside a model.

    `index` are the entries of the model's cosines and sines that belong to the pairs of channels, None for all.

    Raises:
        NotImplementedError: the angles are not linear in the position.
    """
    rotation = sealing.rotation
    if rotation is None:
        return None

    def compute(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotation.angles(positions)
        return (cos, sin) if index is None else (cos[..., index], sin[..., index])

    angles: Angles = sealing.shared.setdefault(f"angles {rotation.kind} {device}", Angles())
    angles.grow(sealing.seen, compute, device, rotation.owner)
    if sealing.mask is None:
        return KeyRotation(angles)
    pads = (~sealing.mask).sum(dim=1).to(device)
    return KeyRotation(angles, pads.repeat_interleave(streams // len(pads)))
