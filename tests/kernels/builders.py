# SPDX-License-Identifier: Apache-2.0
"""Random problems for the decode operators, and a packer for their layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import STEP, Coded, Correction, Dense, Listed, Packed, Ranges, Rotary, Rows
from kvpress.kernels import pack as pack_codes


@dataclass
class Streams:
    """Queries of N streams, and the place of each stream in the flat storage."""

    q: Tensor
    """[N, M, D]."""
    starts: Tensor
    """First row of each stream, [N]."""
    lengths: Tensor
    """Rows of each stream, [N]."""
    rows: int
    """Rows of the storage."""

    @property
    def where(self) -> Ranges:
        """Return all rows of every stream."""
        return Ranges(self.starts, self.lengths)

    def listed(self) -> Listed:
        """Return the same rows as a list."""
        numbers = self.where.numbers()
        width = max(map(len, numbers))
        padded = [torch.cat([rows, rows.new_zeros(width - len(rows))]) for rows in numbers]
        return Listed(torch.stack(padded), self.lengths)

    def unused(self) -> Tensor:
        """Return a mask of the stored rows that belong to no stream, bool [rows]."""
        unused = torch.ones(self.rows, dtype=torch.bool)
        unused[torch.cat(self.where.numbers())] = False
        return unused


def dense(keys: Tensor, values: Tensor, log_weight: Tensor | None = None) -> Rows:
    """Return dense rows."""
    return Rows(Dense(keys), Dense(values), log_weight)


def decoded(rows: Rows) -> Rows:
    """Return the same pairs as dense rows in float32."""
    every = torch.arange(rows.count)
    return dense(rows.keys.read(every), rows.values.read(every), rows.log_weight)


def streams(lengths: list[int], queries: int, dim: int, dtype: torch.dtype = torch.float32, gap: int = 3) -> Streams:
    """Return streams of the given lengths, with unused rows before each of them."""
    length = torch.tensor(lengths)
    starts = (length + gap).cumsum(0) - length
    q = torch.randn(len(lengths), queries, dim).to(dtype)
    return Streams(q, starts, length, int(starts[-1] + length[-1]) + gap)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [R, D], one per channel, into uint8 [R, D * bits / 8]."""
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], dim=-1)
    packed = torch.zeros_like(codes[:, : codes.shape[1] * bits // 8])
    for part, piece in enumerate(codes.chunk(8 // bits, dim=-1)):
        packed |= piece << (bits * part)
    return packed


def quantise(x: Tensor, bits: int, group: tuple[int, int], dtype: torch.dtype = torch.float16) -> tuple[Packed, Tensor]:
    """Round to nearest with the range of each group; return the packed rows and their exact float32 values."""
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


def quantise_centred(
    x: Tensor, bits: int, width: int | None = None, dtype: torch.dtype = torch.float16
) -> tuple[Packed, Tensor]:
    """Round to even steps around zero, with one step for `width` channels of a row; else like `quantise`."""
    blocks, middle = x.unflatten(1, (-1, width or x.shape[1])), (2**bits - 1) / 2
    scale = (blocks.abs().amax(2, keepdim=True) / middle).to(dtype)
    codes = (blocks / scale.float().clamp_min(1e-8) + middle).round().clamp(0, 2 * middle)
    values = ((codes - middle) * scale.float()).flatten(1)
    packed = pack(codes.flatten(1).to(torch.uint8), bits)
    return Packed(packed, scale[..., 0].contiguous(), None, bits, (1, blocks.shape[2]), zero_point=middle), values


def correction(
    rows: int, dim: int, rank: int, density: float, chunk_rows: int = 37, dtype: torch.dtype = torch.float16
) -> tuple[Correction, Tensor]:
    """Return random terms of rank `rank` (0: none) and outliers (density 0: none), and their exact float32 sum."""
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


def coded(
    rows: int,
    dim: int,
    coupled: int,
    bits: int,
    *,
    entries: int = 0,
    books: int = 3,
    dtype: torch.dtype = torch.float16,
    shared: bool = False,
) -> Coded:
    """Return random codes and codebooks of ``2 ** bits`` entries by default; with `shared`, all groups read one codebook."""
    entries = entries or 2**bits
    codes = torch.randint(0, entries, (rows, dim // coupled))
    book = torch.randn(books, 1 if shared else dim // coupled, entries, coupled).to(dtype)
    return Coded(pack_codes(codes, bits), book, bits)


def frequencies(rotated: int) -> Tensor:
    """Return the angles per position of the pairs among `rotated` channels."""
    return 100.0 ** -torch.linspace(0, 1, rotated // 2, dtype=torch.float64)


def angle_tables(rotated: int, length: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return coarse and fine angles of the positions before `length`; cosines and sines have the norm `factor`."""
    coarse, fine = (at[:, None] * frequencies(rotated) for at in (torch.arange(0, length, STEP), torch.arange(STEP)))
    coarse, fine = (torch.stack([f * x.cos(), f * x.sin()], 1).float() for x, f in ((coarse, factor), (fine, 1.0)))
    return coarse, fine


def rotary(s: Streams, rotated: int, length: int = 300, factor: float = 1.0) -> Rotary:
    """Return angles of rows at neighbouring positions first, across blocks, then at scattered ones; streams are shifted."""
    run = torch.arange(min(s.rows, length - 9))
    at = torch.cat([run, torch.randint(0, length - 9, (s.rows - len(run),))])
    return Rotary(*angle_tables(rotated, length, factor), torch.randint(0, 10, (len(s.lengths),)), at.int())


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Return the largest difference as a fraction of the largest reference value."""
    return float((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-30))


def assert_same_lse(ours: Tensor, reference: Tensor, tolerance: float) -> None:
    """Check that log-sum-exps agree to a fraction of the largest one, with minus infinity in the same places."""
    assert torch.equal(ours.isneginf(), reference.isneginf())
    live = ~reference.isneginf()
    assert (
        not live.any() or ((ours - reference)[live].abs() <= tolerance * reference[live].abs().clamp_min(1).max()).all()
    )
