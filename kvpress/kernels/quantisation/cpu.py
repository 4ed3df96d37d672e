# SPDX-License-Identifier: Apache-2.0
"""Quantisation in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.fields import DTYPES
from kvpress.kernels.formats.packed import Packed


def encode(
    x: Tensor, bits: int, group: tuple[int, int], parameters: torch.dtype, level: str | None = None
) -> tuple[Packed, Tensor]:
    """Run the kernel on checked arguments; return packed rows and the largest magnitude."""
    rows, channels = x.shape
    codes = torch.empty(rows, channels * bits // 8, dtype=torch.uint8)
    scale = torch.empty(-(-rows // group[0]), channels // group[1], dtype=parameters)
    zero, largest = torch.empty_like(scale), torch.empty((), dtype=torch.float32)
    launch.run(
        "quantise.cpp",
        "kvpress_quantise",
        x,
        codes,
        scale,
        zero,
        largest,
        rows,
        channels,
        x.stride(0),
        DTYPES[x.dtype],
        bits,
        *group,
        DTYPES[parameters],
        torch.get_num_threads(),
        level=level,
    )
    return Packed(codes, scale, zero, bits, group), largest
