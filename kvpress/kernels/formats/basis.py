"""Rows stored in another basis: undone on queries and outputs, so that no kernel needs to know of it, in any format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks


@dataclass(frozen=True)
class Basis:
    """What one side of a cache was multiplied by before it was stored.

        key or value of stream n = (row * scale[n]) @ rotation.T

    What was stored is the key or value times the rotation, over the scale. It costs nothing per row: queries are taken to
    the basis of the keys, outputs out of that of the values.

    Args:
        scale: factor of each channel of a stream's rows, float32 [streams, D].
        rotation: orthonormal, float32 [D, D].
    """

    scale: Tensor | None = None
    rotation: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields."""
        return self.scale, self.rotation

    def check(self, name: str, channels: int) -> None:
        """Refuse scales and rotations that do not fit rows of `channels`."""
        if self.scale is not None:
            checks.shape(f"{name}.scale", self.scale, ("streams", channels), torch.float32)
        if self.rotation is not None:
            checks.shape(f"{name}.rotation", self.rotation, (channels, channels), torch.float32)

    def enter(self, q: Tensor, stream: Tensor | None) -> Tensor:
        """Queries [N, M, D] whose products with stored rows are those of `q` with the keys."""
        if self.rotation is not None:
            q = q.float() @ self.rotation
        return q if self.scale is None else q * self._scale(stream)

    def leave(self, out: Tensor, stream: Tensor | None) -> Tensor:
        """Weighted sums of the values for those of stored rows [N, M, D]."""
        if self.scale is not None:
            out = out * self._scale(stream)
        return out if self.rotation is None else out @ self.rotation.T

    def _scale(self, stream: Tensor | None) -> Tensor:
        assert self.scale is not None  # noqa: S101 - for the type checker; both callers looked
        return (self.scale if stream is None else self.scale[stream])[:, None]
