# SPDX-License-Identifier: Apache-2.0
"""A vector that all keys of a stream share before their rotary embedding, stored once instead of in every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.rotary import STEP, Rotary


@dataclass(frozen=True)
class Offset:
    """Key r of stream n is the stored row plus ``rotate(centre[n])`` at the position of the row.

    Queries meet the rotated centre by position, not by row: their products with it are those of one matrix product for each
    query, whatever the format of the rows, and kernels look them up.

    Args:
        centre: float32, bfloat16 or float16 [streams, D]; the leading channels are rotated as two halves.
        rotary: angles, and where the rows stand.
        order: which channel of keys and queries stands at each channel of the centre, int64 [D]; None for the same one.
    """

    centre: Tensor
    rotary: Rotary
    order: Tensor | None = None

    @property
    def places(self) -> int:
        """Positions that a query has a product for."""
        return STEP * len(self.rotary.coarse)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors."""
        return self.centre, *self.rotary.tensors(), self.order

    def check(self, name: str, rows: int, channels: int) -> None:
        """Refuse a centre and angles that do not fit keys of so many channels."""
        checks.shape(f"{name}.centre", self.centre, ("streams", channels), *checks.FLOATS)
        self.rotary.check(f"{name}.rotary", rows, channels)
        if self.order is not None:
            checks.shape(f"{name}.order", self.order, (channels,), torch.int64)

    def rows(self, stream: int | Tensor, rows: Tensor) -> Tensor:
        """Return the rotated centre of rows [S] of one stream, or of a stream for each row, float32 [S, D]."""
        at = self.rotary.at(stream, rows)
        turned = self.rotary.rotate(self.centre[stream].float().expand(len(rows), -1), at)
        return turned if self.order is None else torch.empty_like(turned).index_copy_(1, self.order, turned)

    def products(self, q: Tensor, stream: Tensor | None) -> Products:
        """Multiply queries [N, M, D] with the centre of their stream at every position of the angles."""
        centre = (self.centre if stream is None else self.centre[stream]).float()[:, None]
        q = q.float() if self.order is None else q.float()[..., self.order]
        coarse, fine = self.rotary.coarse, self.rotary.fine
        half = fine.shape[2]
        (low, high), (a, b) = (x[..., : 2 * half].unflatten(-1, (2, half)).unbind(-2) for x in (q, centre))
        # A rotation by an angle t turns the product into cos(t) x + sin(t) y; that by a coarse angle comes first.
        x, y = (low * a + high * b)[:, :, None], (high * a - low * b)[:, :, None]
        cos, sin = coarse.unbind(1)
        blocks = torch.cat([x * cos + y * sin, y * cos - x * sin], dim=-1)
        by_position = (blocks @ fine.flatten(1).T).flatten(2)
        if 2 * half < q.shape[2]:
            by_position += (q[..., 2 * half :] * centre[..., 2 * half :]).sum(dim=-1, keepdim=True)
        shift = self.rotary.shift if stream is None else self.rotary.shift[stream]
        return Products(by_position, shift, self.rotary.positions)

    def check_stored(self, listed: list[Tensor], streams: list[int]) -> None:
        """Refuse streams with a row whose angles are not in the tables."""
        self.rotary.check_stored(listed, streams)


@dataclass(frozen=True)
class Products:
    """Numbers that are added to the products of queries with rows, by the position of the row.

    Row r of stream n stands at ``positions[r] + shift[n]``.

    Args:
        by_position: float32 [N, M, P].
        shift: int64 [N].
        positions: int32 [R], or None for the row numbers themselves.
    """

    by_position: Tensor
    shift: Tensor
    positions: Tensor | None

    def of(self, n: int, rows: Tensor) -> Tensor:
        """Return those of rows [S] of stream n, float32 [M, S]."""
        at = (rows if self.positions is None else self.positions[rows]).long() + self.shift[n]
        return self.by_position[n][:, at]
