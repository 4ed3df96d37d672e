# SPDX-License-Identifier: Apache-2.0
"""Packed codes: their layout, packing and unpacking in plain torch.

A row of D codes of b bits, uint8 [R, D * b / 8], is laid out so that a load, a shift and a mask yield neighbouring
codes. With P = 8 / b parts:

    byte j holds code ``p * (D / P) + j`` at bit ``b * p``             b in {1, 2, 4, 8}
    the low two bits as above, then the high bit as above              b = 3
    the low eight bits, a byte per code, then the high bits as above   b in {9, 10, 12}
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

BITS = (1, 2, 3, 4, 8)
"""Bits of a code of uniform quantisation."""

CODE_BITS = (*BITS, 9, 10, 12)
"""Bits of a code that is the index of an entry of a codebook."""


def row_step(bits: int) -> int:
    """Return the number that the codes of a row must be a multiple of to fill whole bytes."""
    return 8 // gcd(bits, 8)


def check_packing(dim: int, bits: int) -> None:
    """Refuse bit widths and row lengths that do not pack into whole bytes."""
    if bits not in CODE_BITS:
        raise ValueError(f"bits must be one of {list(CODE_BITS)}, got {bits}")
    if dim % row_step(bits):
        raise ValueError(f"{bits}-bit codes need rows of a multiple of {row_step(bits)} codes, got {dim}")


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integer codes [..., D] below ``2 ** bits`` into uint8 [..., D * bits / 8]."""
    check_packing(codes.shape[-1], bits)
    if low := _low_bits(bits):
        return torch.cat([pack(codes & ((1 << low) - 1), low), pack(codes >> low, bits - low)], dim=-1)
    parts = codes.to(torch.uint8).unflatten(-1, (8 // bits, -1)).unbind(-2)
    packed: Tensor = parts[0].clone()
    for p, part in enumerate(parts[1:], start=1):
        packed |= part << (bits * p)
    return packed


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Unpack rows uint8 [..., D * bits / 8] into codes [..., D]: uint8, or int16 above 8 bits."""
    if low := _low_bits(bits):
        width = codes.shape[-1] * low // bits
        high = unpack(codes[..., width:], bits - low)
        return unpack(codes[..., :width], low) | ((high.to(torch.int16) if bits > 8 else high) << low)
    return torch.cat([(codes >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-1)


def _low_bits(bits: int) -> int:
    """Return the number of low bits that are packed before the high bits, 0 where all are packed together."""
    return 8 if bits > 8 else 2 if bits == 3 else 0
