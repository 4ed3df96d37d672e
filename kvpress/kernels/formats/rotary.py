# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of keys that are stored without them: rotate-half layout, whole or of the leading channels only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.fields import Field

STEP = 64
"""Positions that share a row of the coarse angles; cpu/coded_problem.h and the Triton kernel know it too."""


def per_pair(angles: Tensor) -> Tensor:
    """Cosines or sines `[..., rotary / 2]` by pair of channels; most models give those of both channels, `[..., rotary]`."""
    half = angles.shape[-1] // 2
    return angles[..., :half] if torch.equal(angles[..., :half], angles[..., half:]) else angles


def rotate_halves(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + rotary / 2 of keys [..., D] as pairs by angles [..., rotary / 2]; the other channels stay."""
    half = cos.shape[-1]
    low, high, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


@dataclass(frozen=True)
class Rotary:
    """Row r of stream n stands at ``positions[r] + shift[n]``.

    A rotation by a position is one by the whole blocks of `STEP` positions before it and one by the rest; as complex
    numbers, with a cosine and a sine for each pair of channels,

        e(p) = coarse[p // STEP] * fine[p % STEP]

    Args:
        coarse: cosines, then sines of every `STEP`-th position, float32 [P / STEP, 2, rotary / 2].
        fine: those of the positions in between, float32 [STEP, 2, rotary / 2].
        shift: what each stream adds to the positions of its rows, int64 [streams].
        positions: int32 [R], or None for the row numbers themselves.
    """

    coarse: Tensor
    fine: Tensor
    shift: Tensor
    positions: Tensor | None = None

    def at(self, stream: int | Tensor, rows: Tensor) -> Tensor:
        """Positions of rows [S] of one stream, or of a stream for each row, int64 [S]."""
        return (rows if self.positions is None else self.positions[rows]).long() + self.shift[stream]

    def angles(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at positions [S], float32 [S, rotary / 2] each."""
        (a, b), (c, d) = self.coarse[at // STEP].unbind(1), self.fine[at % STEP].unbind(1)
        return a * c - b * d, a * d + b * c

    def rotate(self, keys: Tensor, at: Tensor) -> Tensor:
        """Rotate keys [S, D] that stand at positions [S]."""
        return rotate_halves(keys, *self.angles(at))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields in order."""
        return self.coarse, self.fine, self.shift, self.positions

    def check(self, name: str, rows: int, channels: int) -> None:
        """Refuse tables, shifts and positions that do not belong together."""
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
        """Refuse streams with a row whose angles are not in the tables."""
        limit = STEP * self.coarse.shape[0]
        for n, (rows, stream) in enumerate(zip(listed, streams, strict=True)):
            at = self.at(stream, rows)
            if len(at) and not 0 <= int(at.min()) <= int(at.max()) < limit:
                raise ValueError(f"stream {n} has positions outside the {limit} of the angles")

    def fields(self) -> tuple[Field, ...]:
        """What ``CodedProblem`` of cpu/coded_problem.h knows of angles."""
        return (*self.tensors(), self.coarse.shape[0], 2 * self.fine.shape[2])


UNTURNED = (0,) * 6
"""`Rotary.fields` of keys without angles."""
