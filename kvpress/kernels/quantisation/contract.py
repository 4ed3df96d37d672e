# SPDX-License-Identifier: Apache-2.0
"""Quantise rows to the nearest of ``2 ** bits`` levels between the extremes of each group, and pack the codes.

`kvpress.kernels.formats.packed` defines layout and decoding. With minimum and maximum over the group, in float32:

    zero = rounded(min),   scale = rounded((max - zero) / (2 ** bits - 1)),   code = round((x - zero) / scale)

Codes are computed with the *rounded* scale and zero, rounded to nearest, halves to even, and clamped to 0 and
``2 ** bits - 1``. A group of equal values has scale 0 and codes 0. All back ends return the same bits.

Every back end has a function ``encode(x, bits, group, parameters)`` that returns the packed rows, with scales and zeros of the
dtype `parameters`, and the largest magnitude, a float32 scalar that is finite if all values are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.packing import BITS, row_step

WIDEST = torch.finfo(torch.float16).max / 2
"""Rows with values of at least this magnitude get float32 scales and zeros: their range may not fit float16."""


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


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of the rows, float32, 0 without rows."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
