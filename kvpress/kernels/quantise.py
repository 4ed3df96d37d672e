"""Quantise rows to the nearest of ``2 ** bits`` levels between the extremes of each group, and pack the codes.

Layout and decoding are those of `kvpress.kernels.packed`. With minimum and maximum over the group, in float32:

    zero = rounded(min),   scale = rounded((max - zero) / (2 ** bits - 1)),   code = round((x - zero) / scale)

Codes come from the *rounded* scale and zero, to the nearest, halves to even, within 0 and ``2 ** bits - 1``. A group of
equal values has scale 0 and codes 0. Every backend gives the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.counting import count
from kvpress.kernels.cpu import launch
from kvpress.kernels.packed import BITS, pack, row_step
from kvpress.kernels.triton import device

WIDEST = torch.finfo(torch.float16).max / 2
"""Rows with values this large have float32 scales and zeros: their range may not fit into float16."""


def quantise(
    x: Tensor, bits: int, group: tuple[int, int], *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise rows in groups of (rows, channels); the last group of rows may be shorter.

    Scales and zeros are float16, which carries more digits than bfloat16, or float32 where rows decode to float32 or reach
    `WIDEST`.

    Args:
        x: rows [R, D]; float32, bfloat16 or float16; rows may be strided, elements of a row may not.
        bits: bits per code: 1, 2, 3, 4 or 8.
        group: rows and channels (gr, gc) that share a scale.
        dtype: what the rows will be decoded to, the dtype of x by default.

    Returns:
        Codes uint8 [R, D * bits / 8], scale and zero [ceil(R / gr), D / gc].

    Raises:
        ValueError: for values that are not finite.
    """
    check(x, bits, group)
    parameters = torch.float32 if (dtype or x.dtype) == torch.float32 else torch.float16
    *quantised, largest = _quantise(x, bits, list(group), parameters)
    size = float(largest)
    if not math.isfinite(size):
        raise ValueError("cannot quantise keys or values with infinite entries; use a wider model dtype")
    if size >= WIDEST and parameters == torch.float16:
        *quantised, _ = _quantise(x, bits, list(group), torch.float32)
    codes, scale, zero = quantised
    return codes, scale, zero


def check(x: Tensor, bits: int, group: tuple[int, int]) -> None:
    """Refuse rows that cannot be packed or cut into groups."""
    checks.shape("x", x, ("R", "D"), *checks.FLOATS)
    checks.rows_layout("x", x)
    channels = x.shape[1]
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, got {bits}")
    if channels % row_step(bits):
        raise ValueError(f"channels must be a multiple of {row_step(bits)} for {bits} bits, got {channels}")
    if group[0] < 1 or group[1] < 1 or channels % group[1]:
        raise ValueError(f"group must be (rows >= 1, a divisor of {channels} channels), got {tuple(group)}")


def reference(
    x: Tensor, bits: int, group: tuple[int, int], parameters: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ground truth in float32: codes, scale, zero, and the largest magnitude, which is finite when all values are."""
    rows, channels = x.shape
    blocks = torch.cat([x, x[-1:].expand(-rows % group[0], channels)]).float()
    blocks = blocks.view(-1, group[0], channels // group[1], group[1])
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    zero = low.to(parameters)
    scale = ((high - zero.float()) / (2**bits - 1)).clamp_min(0).to(parameters)
    step = torch.where(scale == 0, 1.0, scale.float())[:, None, :, None]
    codes = ((blocks - zero.float()[:, None, :, None]) / step).round_().clamp_(0, 2**bits - 1)
    return pack(codes.to(torch.uint8).view(-1, channels)[:rows], bits), scale, zero, _largest(x)


@torch.library.custom_op("kvpress::quantise", mutates_args=())
def _quantise(x: Tensor, bits: int, group: list[int], parameters: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if launch.available(x):
        count("quantise")
        return _launch(x, bits, group, parameters)
    if device.available(x):
        from kvpress.kernels.triton import pack as gpu

        count("quantise")
        side = gpu.quantise(x, bits, (group[0], group[1]), parameters)
        return side.codes, side.scale, side.zero, _largest(x)
    return reference(x, bits, (group[0], group[1]), parameters)


@_quantise.register_fake
def _empty(x: Tensor, bits: int, group: list[int], parameters: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, channels = x.shape
    codes = x.new_empty(rows, channels * bits // 8, dtype=torch.uint8)
    scale = x.new_empty(-(-rows // group[0]), channels // group[1], dtype=parameters)
    return codes, scale, torch.empty_like(scale), x.new_empty((), dtype=torch.float32)


def _launch(
    x: Tensor, bits: int, group: list[int], parameters: torch.dtype, level_name: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _empty(x, bits, group, parameters)
    launch.run(
        "quantise.cpp",
        "kvpress_quantise",
        x,
        *results,
        *x.shape,
        x.stride(0),
        launch.DTYPES[x.dtype],
        bits,
        *group,
        launch.DTYPES[parameters],
        torch.get_num_threads(),
        level_name=level_name,
    )
    return results


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
