# SPDX-License-Identifier: Apache-2.0
"""Quantisation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.formats.packed import Packed
from kvpress.kernels.formats.packing import pack
from kvpress.kernels.quantisation.contract import largest_magnitude


def encode(
    x: Tensor, bits: int, group: tuple[int, int], parameters: torch.dtype = torch.float16
) -> tuple[Packed, Tensor]:
    """Quantise in float32, the ground truth; return packed rows and the largest magnitude."""
    rows, channels = x.shape
    blocks = torch.cat([x, x[-1:].expand(-rows % group[0], channels)]).float()
    blocks = blocks.view(-1, group[0], channels // group[1], group[1])
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    zero = low.to(parameters)
    # A GPU multiplies by the inverse of a divisor that is a number, which rounds differently from a quotient.
    scale = ((high - zero.float()) / torch.full_like(high, 2**bits - 1)).clamp_min(0).to(parameters)
    step = torch.where(scale == 0, 1.0, scale.float())[:, None, :, None]
    codes = ((blocks - zero.float()[:, None, :, None]) / step).round_().clamp_(0, 2**bits - 1)
    packed = pack(codes.to(torch.uint8).view(-1, channels)[:rows], bits)
    return Packed(packed, scale, zero, bits, group), largest_magnitude(x)
