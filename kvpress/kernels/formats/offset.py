# SPDX-License-Identifier: Apache-2.0
"""A vector that all keys of a stream share before their rotary embedding, stored once instead of in every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.fields import Field
from kvpress.kernels.formats.rotary import STEP, Rotary


@dataclass(frozen=True)
class Offset:
    """Offset of keys: key r of stream n is the stored row plus ``rotate(centre[n])`` at the position of the row.

    The product of a query with the rotated centre depends on the position only. One matrix product per query computes it for
    all positions, in any format of rows, and kernels look it up.
    """

    centre: Tensor
    """Centre of each stream, float32, bfloat16 or float16 [streams, D]; the leading channels are rotated as two halves."""
    rotary: Rotary
    """Angles, and positions of the rows."""
    order: Tensor | None = None
    """Channel of keys and queries that each channel of the centre belongs to, int64 [D]; None for the same one."""

    @property
    def places(self) -> int:
        """Number of positions that angles, and so products, exist for."""
        return STEP * len(self.rotary.coarse)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors."""
        return self.centre, *self.rotary.tensors(), self.order

    def check(self, name: str, rows: int, channels: int) -> None:
        """Refuse a centre and angles that do not fit keys of `channels` channels."""
        checks.shape(f"{name}.centre", self.centre, ("streams", channels), *checks.FLOATS)
        self.rotary.check(f"{name}.rotary", rows, channels)
        if self.order is not None:
            checks.shape(f"{name}.order", self.order, (channels,), torch.int64)

    def rows(self, stream: int | Tensor, rows: Tensor) -> Tensor:
        """Return the rotated centre of rows [S] of one stream, or of a stream for each row, float32 [S, D]."""
        at = self.rotary.at(stream, rows)
        rotated = self.rotary.rotate(self.centre[stream].float().expand(len(rows), -1), at)
        return rotated if self.order is None else torch.empty_like(rotated).index_copy_(1, self.order, rotated)

    def products(self, q: Tensor, stream: Tensor | None) -> Products:
        """Multiply queries [N, M, D] with the centre of their stream, rotated to every position that has angles."""
        centre = (self.centre if stream is None else self.centre[stream]).float()[:, None]
        q = q.float() if self.order is None else q.float()[..., self.order]
        coarse, fine = self.rotary.coarse, self.rotary.fine
        half = fine.shape[2]
        (low, high), (a, b) = (x[..., : 2 * half].unflatten(-1, (2, half)).unbind(-2) for x in (q, centre))
        # Rotating the centre by t changes a product into cos(t) x + sin(t) y. Coarse angles are applied first, then fine ones.
        x, y = (low * a + high * b)[:, :, None], (high * a - low * b)[:, :, None]
        cos, sin = coarse.unbind(1)
        blocks = torch.cat([x * cos + y * sin, y * cos - x * sin], dim=-1)
        by_position = (blocks @ fine.flatten(1).T).flatten(2)
        if 2 * half < q.shape[2]:
            by_position += (q[..., 2 * half :] * centre[..., 2 * half :]).sum(dim=-1, keepdim=True)
        shift = self.rotary.shift if stream is None else self.rotary.shift[stream]
        return Products(by_position, shift, self.rotary.positions)

    def check_stored(self, listed: list[Tensor], streams: list[int]) -> None:
        """Refuse streams with a row whose position has no angles."""
        self.rotary.check_stored(listed, streams)


NO_PRODUCTS: tuple[Field, ...] = (None, None, None, 0)
"""Fields of ``Added`` in cpu/problem.h for keys without an offset."""


@dataclass(frozen=True)
class Products:
    """Numbers that are added to the products of queries with rows, by the position of the row.

    The position of row r of stream n is ``positions[r] + shift[n]``.
    """

    by_position: Tensor
    """Product of each query with the offset at each position, float32 [N, M, P]."""
    shift: Tensor
    """Added to the positions of each stream's rows, int64 [N]."""
    positions: Tensor | None
    """Position of each row before the shift, int32 [R]; None for the row number."""

    def fields(self) -> tuple[Field, ...]:
        """Return the fields of ``Added`` in cpu/problem.h."""
        return self.by_position.contiguous(), self.shift.contiguous(), self.positions, self.by_position.shape[2]

    def of(self, n: int, rows: Tensor) -> Tensor:
        """Return the products for rows [S] of stream n, float32 [M, S]."""
        at = (rows if self.positions is None else self.positions[rows]).long() + self.shift[n]
        return self.by_position[n][:, at]
