# SPDX-License-Identifier: Apache-2.0
"""Rows stored in another basis: queries and outputs are transformed instead of rows, so that kernels need no change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.fields import DTYPES, Field


@dataclass(frozen=True)
class Basis:
    """Scale, rotation and centre that were taken off keys or values before they were stored.

        key or value of stream n = (row * scale[n]) @ rotation.T + centre[n]

    It costs nothing per row: queries are transformed to the basis of the keys, and outputs back from that of the values. A
    centre adds the same amount to all logits of a query, or to its output.
    """

    scale: Tensor | None = None
    """Factor of each channel of a stream's rows, float32 [streams, C]."""
    rotation: Tensor | None = None
    """Matrix, float32 [D, C] for rows of C channels; orthonormal where C = D, several bases side by side where C > D."""
    centre: Tensor | None = None
    """Centre of each stream, float32, bfloat16 or float16 [streams, D]; with a centre of keys, logits have no softcap."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors."""
        return self.scale, self.rotation, self.centre

    def check(self, name: str, channels: int, outer: int | str) -> None:
        """Refuse tensors that do not fit rows of `channels` channels and heads of `outer`, a string where any size fits."""
        if self.scale is not None:
            checks.shape(f"{name}.scale", self.scale, ("streams", channels), torch.float32)
        if self.rotation is not None:
            checks.shape(f"{name}.rotation", self.rotation, (outer, channels), torch.float32)
        if self.centre is not None:
            checks.shape(f"{name}.centre", self.centre, ("streams", self.outer(channels)), *checks.FLOATS)

    def outer(self, channels: int) -> int:
        """Return the channels of a key or value whose stored row has `channels`."""
        return channels if self.rotation is None else self.rotation.shape[0]

    def fields(self, channels: int) -> tuple[Field, ...]:
        """Return the fields of ``Basis`` in cpu/basis.h, for rows of `channels` channels."""
        scale, rotation, centre = (None if tensor is None else tensor.contiguous() for tensor in self.tensors()[:3])
        dtypes = [0 if tensor is None else DTYPES[tensor.dtype] for tensor in (rotation, centre)]
        return scale, rotation, centre, *self.digits(), *dtypes, self.outer(channels), channels, *self.turned(channels)

    def digits(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the channel and the weight of each entry of a row where entries are digits, int16 and float32."""
        return None, None

    def turned(self, channels: int) -> tuple[int, int]:
        """Return the number of channels that the rotation turns, and of rotations, for rows of `channels` channels."""
        return channels, 1

    def enter(self, q: Tensor, stream: Tensor | None) -> Tensor:
        """Transform queries [N, M, D] so that their products with stored rows are those with the keys less the centre."""
        if self.rotation is not None:
            q = q.float() @ self.rotation
        return q if self.scale is None else q * _of(self.scale, stream)

    def leave(self, out: Tensor, stream: Tensor | None) -> Tensor:
        """Transform weighted sums of stored rows [N, M, C] into those of the values [N, M, D]."""
        if self.scale is not None:
            out = out * _of(self.scale, stream)
        if self.rotation is not None:
            out = out @ self.rotation.T
        return out if self.centre is None else out + _of(self.centre, stream).to(out.dtype)

    def products(self, q: Tensor, stream: Tensor | None) -> Tensor:
        """Return the products [N, M] of queries [N, M, D] with the centre of the keys."""
        assert self.centre is not None  # noqa: S101 - for the type checker; the caller has checked it
        return (q.float() * _of(self.centre, stream).float()).sum(dim=-1)


def _of(tensor: Tensor, stream: Tensor | None) -> Tensor:
    """Return the entry of each stream, [N, 1, D]."""
    return (tensor if stream is None else tensor[stream])[:, None]
