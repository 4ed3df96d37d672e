"""Rows of quantised keys or values: their layout, and their decoding in plain torch.

A row of codes of b bits, uint8 [R, D * b / 8], is laid out so that a load, a shift and a mask yield neighbouring
channels. With P = 8 / b parts:

    byte j holds channel ``p * (D / P) + j`` at bit ``b * p``          b in {1, 2, 4, 8}
    the low two bits as above, then the high bit as above              b = 3

Scale and zero belong to groups of (gr, gc) rows and channels, usually (32, 1) for keys and (1, 32) for values:

    value[r, c] = code[r, c] * scale[r // gr, c // gc] + zero[r // gr, c // gc]      scale, zero [ceil(R / gr), D / gc]

``row_group`` replaces ``r // gr`` wherever gr > 1: rows that survived an eviction keep the group they were coded with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks

BITS = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Packed:
    """One side of a quantised cache: codes uint8 [R, channels * bits / 8] with their scales and zeros."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    group: tuple[int, int]


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., D * bits / 8] as one code per channel, uint8 [..., D]."""
    if bits == 3:
        low = codes.shape[-1] * 2 // 3
        return unpack(codes[..., :low], 2) | (unpack(codes[..., low:], 1) << 2)
    return torch.cat([(codes >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-1)


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
    step = {3: 8}.get(side.bits, 8 // side.bits)
    if channels % step:
        raise ValueError(f"{name} channels must be a multiple of {step} for {side.bits} bits, got {channels}")
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
