"""Vectors as the nearest of a few levels per channel and one scale, for channels that look Gaussian."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvpress.cache.segment import BLOCK_ROWS
from kvpress.kernels import pack
from kvpress.quant.codebook import CodedRows

Scale = Callable[[Tensor, Tensor], Tensor]
"""Maps rows `[n, D]` and the levels that code them `[n, D]` to what the levels are multiplied by, `[n]`."""


def encode(vectors: Callable[[slice], Tensor], rows: int, bits: int, dtype: torch.dtype, scale: Scale) -> CodedRows:
    """Code rows by the nearest levels, in blocks whose float32 copies are small.

    Args:
        vectors: gives some of the rows, float32 [n, D], with channels that are nearly Gaussian and alike.
        rows: how many there are.
        bits: of each channel.
        dtype: of the model.
        scale: what the levels of a row are multiplied by; it is held in 16 bits.
    """
    first = vectors(slice(0, 0))
    book, length, codes, scales = levels(bits, first.device), first.shape[1] ** 0.5, [], []
    edges = (book[0, 0, 1:, 0] + book[0, 0, :-1, 0]) / 2
    for start in range(0, rows, BLOCK_ROWS):
        part = vectors(slice(start, min(start + BLOCK_ROWS, rows)))
        nearest = torch.bucketize(part * (length / part.norm(dim=1, keepdim=True).clamp_min(1e-30)), edges)
        codes.append(pack(nearest, bits))
        scales.append(scale(part, book.flatten()[nearest]))
    # No norm of a float16 model is too large for float16, nor any other for bfloat16.
    held = torch.float16 if dtype == torch.float16 else torch.bfloat16
    return CodedRows(torch.cat(codes), book, bits, torch.cat(scales).to(held))


@cache  # segments can be joined where they hold the same objects
@torch.inference_mode(False)
def levels(bits: int, device: torch.device) -> Tensor:
    """Return the levels that quantise a unit Gaussian with the least mean squared error, float32 [1, 1, E, 1]."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1)
    level = 3**0.5 * normal.icdf((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    for _ in range(1000):  # each level moves to the mean of what it stands for
        edges = torch.cat([level.new_tensor([-torch.inf]), (level[1:] + level[:-1]) / 2, level.new_tensor([torch.inf])])
        level = -normal.log_prob(edges).exp().diff() / normal.cdf(edges).diff()
    return level.float().view(1, 1, -1, 1).to(device)


def table_bytes(bits: tuple[int, ...]) -> int:
    """Bytes of the levels that a layer holds."""
    return sum(4 * 2**b for b in set(bits))
