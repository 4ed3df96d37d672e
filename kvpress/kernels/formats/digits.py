# SPDX-License-Identifier: Apache-2.0
"""Basis of rows of binary digits: codes of several widths, read as one operand of one-bit codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.basis import Basis


@dataclass(frozen=True, kw_only=True)
class Digits(Basis):
    """Basis of rows whose S entries are binary digits of C channels, for head h = n % heads of stream n.

        key or value of stream n = x @ rotation[h].T,   x[c] = sum over s with channel[h, s] = c of weight[h, s] * row[s]

    A code of b bits is b digits of -1 or 1, whose weights are half a step times 1, 2, .., 2^(b - 1). Each head may divide its S
    digits among channels differently. `scale` and `centre` must be None.
    """

    rotation: Tensor
    """Rotation of each head, float32 or float16 [heads, D, C]."""
    channel: Tensor
    """Channel of each digit, int16 [heads, S]."""
    weight: Tensor
    """Weight of each digit, float32 [heads, S]."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        return *super().tensors(), self.channel, self.weight

    def check(self, name: str, channels: int, outer: int | str) -> None:
        if self.scale is not None or self.centre is not None:
            raise ValueError(f"{name} of digits must have no scale and no centre")
        heads = len(self.rotation)
        checks.shape(f"{name}.rotation", self.rotation, (heads, outer, "C"), torch.float32, torch.float16)
        checks.shape(f"{name}.channel", self.channel, (heads, channels), torch.int16)
        checks.shape(f"{name}.weight", self.weight, (heads, channels), torch.float32)

    def outer(self, channels: int) -> int:
        del channels
        return self.rotation.shape[1]

    def digits(self) -> tuple[Tensor | None, Tensor | None]:
        return self.channel.contiguous(), self.weight.contiguous()

    def turned(self, channels: int) -> tuple[int, int]:
        del channels
        return self.rotation.shape[2], len(self.rotation)

    def enter(self, q: Tensor, stream: Tensor | None) -> Tensor:
        head, q = self._heads(q, stream), self._rotate(q.float(), stream, self.rotation)
        channel = self.channel[head][:, None].long()
        return q.gather(2, channel.expand(-1, q.shape[1], -1)) * self.weight[head][:, None]

    def leave(self, out: Tensor, stream: Tensor | None) -> Tensor:
        head = self._heads(out, stream)
        channel = self.channel[head][:, None].long().expand_as(out)
        values = out.new_zeros(*out.shape[:2], self.rotation.shape[2])
        values.scatter_add_(2, channel, out * self.weight[head][:, None])
        return self._rotate(values, stream, self.rotation.mT)

    def _heads(self, vectors: Tensor, stream: Tensor | None) -> Tensor:
        """Return the head of vectors [N, M, D], int64 [N]."""
        streams = torch.arange(len(vectors), device=vectors.device) if stream is None else stream
        return streams % len(self.rotation)

    def _rotate(self, vectors: Tensor, stream: Tensor | None, matrices: Tensor) -> Tensor:
        """Multiply vectors [N, M, .] by the matrix of their head, of `matrices` [heads, ., .]."""
        if stream is not None or len(vectors) % len(matrices):
            return vectors @ matrices[self._heads(vectors, stream)].float()
        rows = vectors.unflatten(0, (-1, len(matrices)))  # avoids a copy of the matrix for each stream
        return torch.einsum("bhmi,hij->bhmj", rows, matrices.float()).flatten(0, 1)
