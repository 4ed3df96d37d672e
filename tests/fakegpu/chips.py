# SPDX-License-Identifier: Apache-2.0
"""Limits of the chips that the kernels are compiled for, from the CUDA C++ Programming Guide, section Compute Capabilities."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
"""Blocks of a grid on its three axes."""

MOST_THREADS = 1024
REGISTERS = 65536
"""Registers of a multiprocessor, and at most of a block."""

REGISTER_UNIT = 256
"""A warp gets registers in units of that many."""


@dataclass(frozen=True)
class Chip:
    """Multiprocessors of a usual product, and shared memory that one block may use, in bytes."""

    capability: int
    multiprocessors: int
    shared: int


CHIPS = {
    80: Chip(80, 108, 166_912),
    90: Chip(90, 132, 232_448),
    100: Chip(100, 148, 232_448),
    120: Chip(120, 170, 101_376),
}
"""A100, H100, B200, RTX 5090."""
