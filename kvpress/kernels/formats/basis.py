# SPDX-License-Identifier: Apache-2.0
"""Rows stored in another basis: undone on queries and outputs, so that no kernel needs to know of it, in any format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks


@dataclass(frozen=True)
class Basis:
    """What was subtracted from one side of a cache, and what it was multiplied by, before it was stored.

        key or value of stream n = (row * scale[n]) @ rotation.T + centre[n]

    It costs nothing per row: queries are taken to the basis of the keys, outputs out of that of the values, and a centre moves
    all logits of a stream, and its output, by the same amount.

    Args:
        scale: factor of each channel of a stream's rows, float32 [streams, D].
        rotation: float32 [D, C] for rows of C channels; orthonormal where C = D, and several bases side by side where C > D.
        centre: of each stream's keys or values, float32, bfloat16 or float16 [streams, D]; with one of keys, logits have no
            soft cap.
    """

    scale: Tensor | None = None
    rotation: Tensor | None = None
    centre: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields."""
        return self.scale, self.rotation, self.centre

    def check(self, name: str, channels: int, outer: int | str) -> None:
        """Refuse scales and rotations that do not fit rows of `channels` for heads of `outer`, a name where it is free."""
        if self.scale is not None:
            checks.shape(f"{name}.scale", self.scale, ("streams", channels), torch.float32)
        if self.rotation is not None:
            checks.shape(f"{name}.rotation", self.rotation, (outer, channels), torch.float32)
        if self.centre is not None:
            checks.shape(f"{name}.centre", self.centre, ("streams", self.outer(channels)), *checks.FLOATS)

    def outer(self, channels: int) -> int:
        """Channels of a key or value whose stored row has so many."""
        return channels if self.rotation is None else self.rotation.shape[0]

    def enter(self, q: Tensor, stream: Tensor | None) -> Tensor:
        """Queries [N, M, D] whose products with stored rows are those of `q` with the keys."""
        if self.rotation is not None:
            q = q.float() @ self.rotation
        return q if self.scale is None else q * _of(self.scale, stream)

    def leave(self, out: Tensor, stream: Tensor | None) -> Tensor:
        """Weighted sums of the values for those of stored rows [N, M, D]."""
        if self.scale is not None:
            out = out * _of(self.scale, stream)
        if self.rotation is not None:
            out = out @ self.rotation.T
        return out if self.centre is None else out + _of(self.centre, stream).to(out.dtype)

    def products(self, q: Tensor, stream: Tensor | None) -> Tensor:
        """Products [N, M] of queries [N, M, D] with the centre of the keys."""
        assert self.centre is not None  # noqa: S101 - for the type checker; the caller looked
        return (q.float() * _of(self.centre, stream).float()).sum(dim=-1)


def _of(tensor: Tensor, stream: Tensor | None) -> Tensor:
    """Entries [N, 1, D] of a tensor with one for every stream."""
    return (tensor if stream is None else tensor[stream])[:, None]
