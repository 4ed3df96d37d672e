# SPDX-License-Identifier: Apache-2.0
"""Block sizes and split counts. They depend on shapes only, never on device data: graphs capture them, nothing waits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

REGISTERS = 65536
"""Registers of a multiprocessor, on every supported chip."""

MOST_SPLITS = 128
TILE_BYTES = 32 * 1024
"""Key and value bytes of one pipeline stage: three stages fit into the shared memory of every supported chip."""

WITHOUT_DEVICE = 8
"""Multiprocessors assumed for tensors that are not on a GPU, as under the interpreter."""


@dataclass(frozen=True)
class Grid:
    """Programs [N, splits, query tiles] of ``rows`` query rows each."""

    streams: int
    splits: int
    tiles: int
    rows: int

    @property
    def programs(self) -> tuple[int, int, int]:
        return self.streams, self.splits, self.tiles


def plan(q: torch.Tensor, capacity: int, block: int, resident: int, least: int = 16, most: int = 64) -> Grid:
    """Return the grid for queries [N, M, D] over streams of at most ``capacity`` rows.

    Args:
        q: the queries.
        capacity: rows of the longest stream.
        block: rows that a program reads at a time; a split reads at least two blocks.
        resident: programs that fit on a multiprocessor at once. All splits run at once where streams do, so that none
            begins when the others end.
        least: query rows of a tile at least.
        most: query rows of a tile at most.
    """
    streams, queries = q.shape[:2]
    rows = min(most, padded(queries, least))
    tiles = -(-queries // rows)
    fitting = resident * _multiprocessors(q.device) // max(1, streams * tiles)
    useful = capacity // (2 * block)
    return Grid(streams, max(1, min(fitting, useful, MOST_SPLITS)), tiles, rows)


def resident(warps: int, registers: int | None, most: int) -> int:
    """Programs that fit on a multiprocessor at once by their registers per thread, and at most so many."""
    return most if registers is None else max(1, min(most, REGISTERS // (32 * warps * registers)))


def padded(size: int, least: int = 16) -> int:
    """The next power of two: what `tl.arange` accepts; tensor cores want at least 16."""
    return max(least, 1 << (size - 1).bit_length())


def block_rows(channels: int, itemsize: int) -> int:
    """Rows per block for keys and values of so many channels together."""
    limit = (
        TILE_BYTES if itemsize < 4 else TILE_BYTES // 2
    )  # float32 is not for tensor cores: its products cost registers
    block = 64
    while block > 16 and block * channels * itemsize > limit:
        block //= 2
    return block


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return WITHOUT_DEVICE
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
