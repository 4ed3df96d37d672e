# SPDX-License-Identifier: Apache-2.0
"""Quantise rows to the nearest of ``2 ** bits`` levels between the extremes of each group, and pack the codes.

Layout and decoding are those of `kvpress.kernels.formats.packed`. With minimum and maximum over the group, in float32:

    zero = rounded(min),   scale = rounded((max - zero) / (2 ** bits - 1)),   code = round((x - zero) / scale)

Codes come from the *rounded* scale and zero, to the nearest, halves to even, within 0 and ``2 ** bits - 1``. A group of
equal values has scale 0 and codes 0. Every back end gives the same bits.

Every back end has a function ``encode(x, bits, group, parameters)`` that returns the packed rows, with scales and zeros of the
dtype `parameters`, and the largest magnitude, a float32 scalar which is finite when all values are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.packing import BITS, row_step

WIDEST = torch.finfo(torch.float16).max / 2
"""Rows with values this large have float32 scales and zeros: their range may not fit into float16."""


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
    """Largest magnitude of the rows, 0 without any."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
