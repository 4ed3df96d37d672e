# SPDX-License-Identifier: Apache-2.0
"""Block sizes and split counts; they depend on shapes only, so that CUDA graphs can capture them and nothing waits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

SCHEDULERS, REGISTERS = 4, 16384
"""Schedulers of a multiprocessor on every supported chip, and registers of each: a warp has all of its own from one of them."""

MOST_SPLITS, LEAST_BLOCKS = 128, 2
"""Most splits of a stream, and fewest blocks of a split."""

TILE_BYTES = 32 * 1024
"""Most key and value bytes of a pipeline stage: three stages fit into the shared memory of every supported chip."""

MOST_STREAMS = 65535
"""Most streams of a launch that numbers them by the second dimension of its grid, the limit of CUDA."""

WITHOUT_DEVICE = 8
"""Multiprocessors assumed for tensors that are not on a GPU, as under the interpreter."""


@dataclass(frozen=True)
class LaunchGrid:
    """Grid of programs of a split-KV kernel; `online.split_of` assigns streams to them."""

    streams: int
    """Number of streams."""
    splits: int
    """Programs among which the rows of all streams are divided; 0 where one program reads a stream."""
    tiles: int
    """Tiles of each stream's query rows."""
    rows: int
    """Query rows of a tile."""

    @property
    def results(self) -> int:
        """Number of partial results."""
        return self.splits or self.streams

    @property
    def programs(self) -> tuple[int, int]:
        """Size of the grid."""
        return self.results, self.tiles

    @property
    def padded_streams(self) -> int:
        """Number of streams, padded to a power of two; 0 where one program reads a stream."""
        return padded(self.streams, 1) if self.splits else 0


def plan(
    q: torch.Tensor, capacity: int, block: int, resident: int, min_rows: int = 16, max_rows: int = 64
) -> LaunchGrid:
    """Return the grid for queries [N, M, D] over streams of at most ``capacity`` rows.

    Args:
        q: the queries.
        capacity: rows of the longest stream.
        block: rows that a program reads at a time; a split reads at least two blocks.
        resident: programs that fit on a multiprocessor at once. There are no more splits than can run at once, so that none
            begins when others end.
        min_rows: fewest query rows of a tile, a power of two.
        max_rows: most query rows of a tile.
    """
    streams, queries = q.shape[:2]
    rows = min(max_rows, padded(queries, min_rows))
    tiles = -(-queries // rows)
    fitting = resident * multiprocessors(q.device) // max(1, tiles)
    # A stream has a program more than its share, for the rest of its blocks; see `online.splits_of`.
    useful = 1 + capacity // (LEAST_BLOCKS * block)
    splits = min(fitting, useful * streams) if fitting >= 2 * streams and useful > 2 else 0
    return LaunchGrid(streams, splits, tiles, rows)


def launches(streams: int) -> list[slice]:
    """Return the streams of each launch of a kernel whose grid has streams in its second dimension."""
    return [slice(first, min(first + MOST_STREAMS, streams)) for first in range(0, streams, MOST_STREAMS)]


def resident(warps: int, registers: int | None, limit: int) -> int:
    """Return the number of programs, at most `limit`, that fit on a multiprocessor; `limit` where registers are not limited."""
    if registers is None:
        return limit
    fitting = SCHEDULERS * (REGISTERS // (32 * -(-registers // 8) * 8))
    return max(1, min(limit, fitting // warps))


def padded(size: int, minimum: int = 16) -> int:
    """Return the next power of two, for `tl.arange`, at least `minimum`; tensor cores need 16."""
    return max(minimum, 1 << (size - 1).bit_length())


def block_rows(channels: int, itemsize: int) -> int:
    """Return the rows per block for a number of channels of keys and values together."""
    # Products of float32 do not run on tensor cores and need registers.
    limit = TILE_BYTES if itemsize < 4 else TILE_BYTES // 2
    block = 64
    while block > 16 and block * channels * itemsize > limit:
        block //= 2
    return block


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return WITHOUT_DEVICE
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
