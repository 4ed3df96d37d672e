# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of keys that are stored without them: rotate-half layout, of all channels or of the leading ones only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.fields import Field

STEP = 64
"""Positions that share a row of the coarse angles; cpu/coded_problem.h and the Triton kernel use the same number."""


def per_pair(angles: Tensor) -> Tensor:
    """Return cosines or sines `[..., rotary / 2]` by pair of channels, also from those of both channels, `[..., rotary]`."""
    half = angles.shape[-1] // 2
    return angles[..., :half] if torch.equal(angles[..., :half], angles[..., half:]) else angles


def rotate_halves(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + rotary / 2 of keys [..., D] as pairs by angles [..., rotary / 2]; further channels stay."""
    half = cos.shape[-1]
    low, high, unrotated = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, unrotated], dim=-1)


@dataclass(frozen=True)
class Rotary:
    """Tables of angles, and positions of rows: the position of row r of stream n is ``positions[r] + shift[n]``.

    The rotation to a position is the product of a coarse and a fine rotation; as complex numbers, with a cosine and a sine for
    each pair of channels,

        e(p) = coarse[p // STEP] * fine[p % STEP]
    """

    coarse: Tensor
    """Cosines, then sines of every `STEP`-th position, float32 [P / STEP, 2, rotary / 2]."""
    fine: Tensor
    """Cosines, then sines of the positions 0 to `STEP` - 1, float32 [STEP, 2, rotary / 2]."""
    shift: Tensor
    """Added to the positions of each stream's rows, int64 [streams]."""
    positions: Tensor | None = None
    """Position of each row before the shift, int32 [R]; None for the row number."""

    def at(self, stream: int | Tensor, rows: Tensor) -> Tensor:
        """Return the positions of rows [S] of one stream, or of a stream for each row, int64 [S]."""
        return (rows if self.positions is None else self.positions[rows]).long() + self.shift[stream]

    def angles(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines at positions [S], float32 [S, rotary / 2] each."""
        (a, b), (c, d) = self.coarse[at // STEP].unbind(1), self.fine[at % STEP].unbind(1)
        return a * c - b * d, a * d + b * c

    def rotate(self, keys: Tensor, at: Tensor) -> Tensor:
        """Rotate keys [S, D] to positions [S]."""
        return rotate_halves(keys, *self.angles(at))

    def rotate_back(self, keys: Tensor, at: Tensor) -> Tensor:
        """Return keys [S, D] without their rotation to positions [S], float32; a factor in cosines and sines is removed too."""
        cos, sin = self.angles(at)
        scale = cos.square() + sin.square()
        return rotate_halves(keys.float(), cos / scale, -sin / scale)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order of the fields."""
        return self.coarse, self.fine, self.shift, self.positions

    def check(self, name: str, rows: int, channels: int) -> None:
        """Refuse tables, shifts and positions whose shapes or dtypes do not match."""
        checks.shape(f"{name}.fine", self.fine, (STEP, 2, "rotary / 2"), torch.float32)
        half = self.fine.shape[2]
        if 2 * half > channels:
            raise ValueError(f"{name}.fine must rotate at most {channels} channels, got {2 * half}")
        checks.shape(f"{name}.coarse", self.coarse, ("P / STEP", 2, half), torch.float32)
        checks.shape(f"{name}.shift", self.shift, ("streams",), torch.int64)
        if self.positions is not None:
            checks.shape(f"{name}.positions", self.positions, (rows,), torch.int32)
        for field, tensor in vars(self).items():
            if tensor is not None:
                checks.contiguous(f"{name}.{field}", tensor)

    def check_stored(self, listed: list[Tensor], streams: list[int]) -> None:
        """Refuse streams with a row whose position has no angles."""
        limit = STEP * self.coarse.shape[0]
        for n, (rows, stream) in enumerate(zip(listed, streams, strict=True)):
            at = self.at(stream, rows)
            if len(at) and not 0 <= int(at.min()) <= int(at.max()) < limit:
                raise ValueError(f"stream {n} has positions outside the {limit} of the angles")

    def fields(self) -> tuple[Field, ...]:
        """Return the fields of angles in ``CodedProblem`` of cpu/coded_problem.h."""
        return (*self.tensors(), self.coarse.shape[0], 2 * self.fine.shape[2])


UNTURNED = (0,) * 6
"""Fields as those of `Rotary.fields`, for keys without a rotary embedding."""
