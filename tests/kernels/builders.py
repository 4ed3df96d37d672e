"""Random problems for the decode operators, and a packer for the layout that they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpress.kernels.correction import Correction
from kvpress.kernels.packed import Packed


@dataclass
class Streams:
    """Queries [N, M, D] and where each of the N streams lies in the flat storage."""

    q: Tensor
    starts: Tensor
    lengths: Tensor
    rows: int


def streams(lengths: list[int], queries: int, dim: int, dtype: torch.dtype = torch.float32, gap: int = 3) -> Streams:
    """Streams of the given lengths, with unused rows before each of them."""
    length = torch.tensor(lengths)
    starts = (length + gap).cumsum(0) - length
    q = torch.randn(len(lengths), queries, dim).to(dtype)
    return Streams(q, starts, length, int(starts[-1] + length[-1]) + gap)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [R, D], one per channel, to uint8 [R, D * bits / 8]."""
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], dim=-1)
    packed = torch.zeros_like(codes[:, : codes.shape[1] * bits // 8])
    for part, piece in enumerate(codes.chunk(8 // bits, dim=-1)):
        packed |= piece << (bits * part)
    return packed


def quantise(x: Tensor, bits: int, group: tuple[int, int], dtype: torch.dtype = torch.float16) -> tuple[Packed, Tensor]:
    """Round to nearest with the range of each group; returns the packed rows and their exact float32 values."""
    rows, channels = x.shape
    group_rows, group_channels = group
    padding = -rows % group_rows
    blocks = torch.cat([x, x[-1:].expand(padding, channels)]).float()
    blocks = blocks.view(-1, group_rows, channels // group_channels, group_channels)
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
    scale, zero = ((high - low) / (2**bits - 1)).to(dtype), low.to(dtype)
    codes = ((blocks - zero.float()) / scale.float().clamp_min(1e-8)).round().clamp(0, 2**bits - 1)
    values = (codes * scale.float() + zero.float()).view(-1, channels)[:rows]
    codes = codes.to(torch.uint8).view(-1, channels)[:rows]
    side = Packed(pack(codes, bits), scale[:, 0, :, 0].contiguous(), zero[:, 0, :, 0].contiguous(), bits, group)
    return side, values


def correction(
    rows: int, dim: int, rank: int, density: float, chunk_rows: int = 37, dtype: torch.dtype = torch.float16
) -> tuple[Correction, Tensor]:
    """Random terms of rank `rank` (0: none) and outliers (density 0: none); returns them and their exact float32 sum."""
    factor, basis, chunk, first, channel, delta = [None] * 6
    exact = torch.zeros(rows, dim)
    if rank:
        chunk = torch.arange(rows, dtype=torch.int32) // chunk_rows
        factor, basis = torch.randn(rows, rank).to(dtype), (torch.randn(int(chunk[-1]) + 1, rank, dim) / rank).to(dtype)
        exact += torch.einsum("rk,rkd->rd", factor.float(), basis.float()[chunk.long()])
    if density:
        # Some rows have no outliers, others many.
        dense = torch.rand(rows, dim) < density * 2 * torch.rand(rows, 1).round()
        first = torch.cat([torch.zeros(1), dense.sum(1).cumsum(0)]).int()
        channel, delta = dense.nonzero()[:, 1].to(torch.uint8), (3 * torch.randn(int(first[-1]))).to(dtype)
        exact[dense] += delta.float()
    return Correction(factor, basis, chunk, first, channel, delta), exact


def flat(keys: Packed, values: Packed) -> dict[str, Any]:
    """The two sides as keyword arguments of the operators."""
    sides = {"key": keys, "value": values}
    return {f"{name}_{field}": getattr(side, field) for name, side in sides.items() for field in vars(side)}


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Largest difference as a fraction of the largest reference value."""
    return float((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-30))


def assert_same_lse(ours: Tensor, reference: Tensor, tolerance: float) -> None:
    """Log-sum-exps agree to a fraction of the largest one, and minus infinity stands exactly where it should."""
    assert torch.equal(ours.isneginf(), reference.isneginf())
    live = ~reference.isneginf()
    assert (
        not live.any() or ((ours - reference)[live].abs() <= tolerance * reference[live].abs().clamp_min(1).max()).all()
    )
