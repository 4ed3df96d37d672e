"""Bit packing of codes.

A row of D codes is split into parts that share bytes, so that unpacking needs shifts and masks but no shuffles: with P =
8 / bits parts, byte j of the row holds channels ``p * D / P + j`` at bit ``bits * p``. Three bits are stored as a row of
their low two bits followed by a row of their high bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (1, 2, 3, 4, 8)


def packed_width(dim: int, bits: int) -> int:
    """Bytes of a packed row of `dim` codes."""
    check_packing(dim, bits)
    return dim * bits // 8


def check_packing(dim: int, bits: int) -> None:
    """Refuse bit widths and row lengths that do not pack into whole bytes."""
    if bits not in BITS:
        raise ValueError(f"bits must be one of {list(BITS)}, got {bits}")
    parts = {1: 8, 2: 4, 3: 8, 4: 2, 8: 1}[bits]
    if dim % parts:
        raise ValueError(f"{bits}-bit codes need rows of a multiple of {parts} channels, got {dim}")


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes `[..., D]` into uint8 `[..., D * bits / 8]`."""
    check_packing(codes.shape[-1], bits)
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], dim=-1)
    parts = codes.unflatten(-1, (8 // bits, -1)).unbind(-2)
    packed = parts[0].clone()
    for p, part in enumerate(parts[1:], start=1):
        packed |= part << (bits * p)
    return packed


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Return the uint8 codes `[..., D]` of packed rows."""
    if bits == 8:
        return packed
    if bits == 3:
        low = unpack(packed[..., : dim // 4], 2, dim)
        return low | (unpack(packed[..., dim // 4 :], 1, dim) << 2)
    mask = 2**bits - 1
    return torch.cat([(packed >> (bits * p)) & mask for p in range(8 // bits)], dim=-1)
