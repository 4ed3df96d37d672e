"""Bit packing of codes.

The layout is that of the operators, `kvpress.kernels.packed`: a row of D codes is split into parts that share bytes, so that
unpacking needs shifts and masks but no shuffles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.packed import BITS, unpack

__all__ = ["BITS", "check_packing", "pack", "packed_width", "unpack"]


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
