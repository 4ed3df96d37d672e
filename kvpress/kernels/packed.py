"""Rows of packed codes: their layout, and the decoding of uniformly quantised rows in plain torch.

A row of D codes of b bits, uint8 [R, D * b / 8], is laid out so that a load, a shift and a mask yield neighbouring
codes. With P = 8 / b parts:

    byte j holds code ``p * (D / P) + j`` at bit ``b * p``             b in {1, 2, 4, 8}
    the low two bits as above, then the high bit as above              b = 3
    the low eight bits, a byte per code, then the others as above      b in {9, 10, 12}

Scale and zero of uniformly quantised rows belong to groups of (gr, gc) rows and channels, usually (32, 1) for keys and
(1, 32) for values:

    value[r, c] = code[r, c] * scale[r // gr, c // gc] + zero[r // gr, c // gc]      scale, zero [ceil(R / gr), D / gc]

``row_group`` replaces ``r // gr`` wherever gr > 1: rows that survived an eviction keep the group they were coded with.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from kvpress.kernels import checks

BITS = (1, 2, 3, 4, 8)
"""Bits of a code that stands for a number: uniform quantisation."""

CODE_BITS = (*BITS, 9, 10, 12)
"""Bits of a code that names an entry of a book."""


@dataclass(frozen=True)
class Packed:
    """One side of a quantised cache: codes uint8 [R, channels * bits / 8] with their scales and zeros."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    group: tuple[int, int]


def row_step(bits: int) -> int:
    """The codes of a row come in multiples of this, so that they fill whole bytes."""
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
    packed = parts[0].clone()
    for p, part in enumerate(parts[1:], start=1):
        packed |= part << (bits * p)
    return packed


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., D] of packed rows uint8 [..., D * bits / 8]: uint8, or int16 above 8 bits."""
    if low := _low_bits(bits):
        width = codes.shape[-1] * low // bits
        high = unpack(codes[..., width:], bits - low)
        return unpack(codes[..., :width], low) | ((high.to(torch.int16) if bits > 8 else high) << low)
    return torch.cat([(codes >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-1)


def _low_bits(bits: int) -> int:
    """How many bits are packed before the others, or 0 where all are packed together."""
    return 8 if bits > 8 else 2 if bits == 3 else 0


def dequantise(side: Packed, rows: Tensor, row_group: Tensor | None = None) -> Tensor:
    """Float32 values [S, D] of the given rows [S]."""
    group_rows, group_channels = side.group
    group = row_group[rows].long() if row_group is not None and group_rows > 1 else rows // group_rows
    scale, zero = (x[group].float().repeat_interleave(group_channels, dim=-1) for x in (side.scale, side.zero))
    return unpack(side.codes[rows], side.bits).float() * scale + zero


def check_side(name: str, side: Packed, rows: int, channels: int, row_group: Tensor | None) -> None:
    """Refuse codes, scales and zeros that do not belong together."""
    if side.bits not in BITS:
        raise ValueError(f"{name}_bits must be one of {BITS}, got {side.bits}")
    if channels % row_step(side.bits):
        raise ValueError(
            f"{name} channels must be a multiple of {row_step(side.bits)} for {side.bits} bits, got {channels}"
        )
    group_rows, group_channels = side.group
    if group_rows < 1 or group_channels < 1 or channels % group_channels:
        raise ValueError(f"{name}_group must be (rows >= 1, a divisor of {channels} channels), got {tuple(side.group)}")
    checks.shape(f"{name}_codes", side.codes, (rows, channels * side.bits // 8), torch.uint8)
    groups: int | str = "G" if row_group is not None and group_rows > 1 else -(-rows // group_rows)
    expected = (groups, channels // group_channels)
    checks.shape(f"{name}_scale", side.scale, expected, torch.float16, torch.float32)
    checks.shape(f"{name}_zero", side.zero, tuple(side.scale.shape), side.scale.dtype)
    for suffix, tensor in (("codes", side.codes), ("scale", side.scale), ("zero", side.zero)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}_{suffix} must be contiguous, got strides {tensor.stride()}")


def check_groups(rows: list[Tensor], row_group: Tensor | None, *sides: Packed) -> None:
    """Refuse streams whose rows name a group that has no scale."""
    if row_group is None:
        return
    for n, listed in enumerate(rows):
        used = row_group[listed]
        for side in sides:
            groups = side.scale.shape[0]
            if len(used) and side.group[0] > 1 and not 0 <= int(used.min()) <= int(used.max()) < groups:
                raise ValueError(f"stream {n} refers to groups outside the {groups} stored ones")
