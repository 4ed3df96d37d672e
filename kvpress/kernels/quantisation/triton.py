# SPDX-License-Identifier: Apache-2.0
"""Quantise rows and pack their codes in Triton, bit for bit equal to the reference."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.formats.packed import Packed
from kvpress.kernels.quantisation.contract import largest_magnitude
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import padded

TILE = 4096
"""Elements of a tile: 32 registers of each thread of a program."""


@triton.jit(do_not_specialize=["R"])
def _ranges_kernel(
    X, SCALE, ZERO, R, stride, LEVELS: tl.constexpr, GROUPS: tl.constexpr, GR: tl.constexpr, GC: tl.constexpr,
    GCP: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * (BR if GR == 1 else GR)
    group = tl.program_id(1) * BG + tl.arange(0, BG)
    c = tl.arange(0, GCP)
    live_c = (group[:, None] < GROUPS) & (c[None, :] < GC)
    channel = group[:, None] * GC + c[None, :]
    low = tl.full([1 if GR > 1 else BR, BG], float("inf"), tl.float32)
    high = -low
    for at in tl.range(0, GR, BR):
        r = at + tl.arange(0, BR)
        row = first + r
        live_r = row < R
        if GR > 1:
            live_r = live_r & (r < GR)
        live = live_r[:, None, None] & live_c[None, :, :]
        x = X + row[:, None, None] * stride + channel[None, :, :]
        block_low = tl.min(tl.load(x, mask=live, other=float("inf")).to(tl.float32), 2)
        block_high = tl.max(tl.load(x, mask=live, other=-float("inf")).to(tl.float32), 2)
        if GR > 1:
            block_low, block_high = tl.min(block_low, 0)[None, :], tl.max(block_high, 0)[None, :]
        low, high = tl.minimum(low, block_low), tl.maximum(high, block_high)
    owner = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live_o = owner * GR < R
    if GR == 1:
        owner = first + tl.arange(0, BR)
        live_o = owner < R
    zero = low.to(ZERO.dtype.element_ty)
    scale = tl.maximum(tl.div_rn(high - zero.to(tl.float32), tl.full(high.shape, LEVELS, tl.float32)), 0.0)
    at = owner[:, None] * GROUPS + group[None, :]
    live = live_o[:, None] & (group < GROUPS)[None, :]
    tl.store(ZERO + at, zero, mask=live)
    tl.store(SCALE + at, scale.to(SCALE.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["R"])
def _codes_kernel(
    X, SCALE, ZERO, CODES, R, stride, C: tl.constexpr, BITS: tl.constexpr, GR: tl.constexpr, GC: tl.constexpr,
    PLANE: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 8 // PLANE
    W: tl.constexpr = C // PARTS
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    column = tl.program_id(1) * BW + tl.arange(0, BW)[None, :]
    live = (row < R) & (column < W)
    byte = tl.zeros([BR, BW], tl.int32)
    for p in tl.static_range(PARTS):
        channel = p * W + column
        at = row // GR * (C // GC) + channel // GC
        scale = tl.load(SCALE + at, mask=live, other=0.0).to(tl.float32)
        zero = tl.load(ZERO + at, mask=live, other=0.0).to(tl.float32)
        x = tl.load(X + row * stride + channel, mask=live, other=0.0).to(tl.float32)
        exact = tl.div_rn(x - zero, tl.where(scale == 0, 1.0, scale))
        exact = tl.minimum(tl.maximum(exact, 0.0), (1 << BITS) - 1.0)
        # Above 2 ** 23 a float32 has no fraction, so adding 2 ** 23 rounds halves to even.
        code = (exact + 8388608.0 - 8388608.0).to(tl.int32)
        byte |= ((code >> SHIFT) & ((1 << PLANE) - 1)) << (PLANE * p)
    tl.store(CODES + row * (C * BITS // 8) + FIRST + column, byte.to(tl.uint8), mask=live)


@on_device
def encode(
    x: Tensor, bits: int, group: tuple[int, int], parameters: torch.dtype = torch.float16
) -> tuple[Packed, Tensor]:
    """Run the kernels on checked arguments; return packed rows and the largest magnitude."""
    (rows, channels), (GR, GC) = x.shape, group
    groups, row_groups = channels // GC, -(-rows // GR)
    scale = x.new_empty(row_groups, groups, dtype=parameters)
    zero = torch.empty_like(scale)
    codes = x.new_empty(rows, channels * bits // 8, dtype=torch.uint8)
    if x.numel():
        blocks = range_blocks((GR, GC), groups)
        owners = -(-rows // blocks["BR"]) if GR == 1 else row_groups
        _ranges_kernel[(owners, -(-groups // blocks["BG"]))](
            x, scale, zero, rows, x.stride(0), 2**bits - 1, groups, GR, GC, **blocks
        )
        # Planes of (bits per code, first bit of the code, first byte of the row).
        planes = [(2, 0, 0), (1, 2, channels // 4)] if bits == 3 else [(bits, 0, 0)]
        for plane, shift, first in planes:
            width = channels * plane // 8
            blocks = code_blocks(channels, plane)
            _codes_kernel[(-(-rows // blocks["BR"]), -(-width // blocks["BW"]))](
                x, scale, zero, codes, rows, x.stride(0), channels, bits, GR, GC, plane, shift, first, **blocks
            )
    return Packed(codes, scale, zero, bits, (GR, GC)), largest_magnitude(x)


def range_blocks(group: tuple[int, int], groups: int) -> dict[str, int]:
    """Return the tile of the kernel of ranges: rows, channel groups, and padded channels of a group."""
    rows, channels = 16 if group[0] == 1 else min(padded(group[0], 1), 64), padded(group[1], 1)
    return {"GCP": channels, "BR": rows, "BG": max(1, min(padded(groups, 1), TILE // (rows * channels)))}


def code_blocks(channels: int, plane: int) -> dict[str, int]:
    """Return the tile of the kernel of codes for one plane: rows and bytes of a row; a byte has 8 / plane channels."""
    block = min(padded(channels * plane // 8), 128)
    return {"BR": TILE * plane // 8 // block, "BW": block}
