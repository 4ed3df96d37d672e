# SPDX-License-Identifier: Apache-2.0
"""Limits of the chips that the kernels are compiled for, from the CUDA C++ Programming Guide, section Compute Capabilities."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
"""Maximum blocks of a grid on its three axes."""

MOST_THREADS = 1024
REGISTERS = 65536
"""Registers of a multiprocessor, and the maximum of a block."""

REGISTER_UNIT = 256
"""A warp gets registers in multiples of this."""


@dataclass(frozen=True)
class Chip:
    """A GPU."""

    capability: int
    """CUDA compute capability, times ten."""
    multiprocessors: int
    """Multiprocessors of a usual product."""
    shared: int
    """Shared memory that one block may use, in bytes."""


CHIPS = {
    80: Chip(80, 108, 166_912),
    90: Chip(90, 132, 232_448),
    100: Chip(100, 148, 232_448),
    120: Chip(120, 170, 101_376),
}
"""A100, H100, B200, RTX 5090."""
