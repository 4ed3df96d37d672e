# SPDX-License-Identifier: Apache-2.0
"""Split-KV decode attention on packed codes.

Products are float16 with float32 sums; `packed_kernel` describes how codes are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvpress.kernels.attention.triton import correction
from kvpress.kernels.attention.triton.merge import Partials, partials
from kvpress.kernels.attention.triton.operand import causal, offsets, positions, streams, width
from kvpress.kernels.attention.triton.packed_kernel import decode_kernel
from kvpress.kernels.formats.correction import Correction
from kvpress.kernels.formats.offset import Products
from kvpress.kernels.formats.operand import Options, Ranges, Rows, Where
from kvpress.kernels.formats.packed import NARROW, Packed
from kvpress.kernels.triton.grid import padded, plan, resident

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])

LEAST_ROWS = 4
"""Fewest query rows of a tile, a power of two: each costs registers and work on scales, unlike with dense rows."""

RESIDENT = 8
"""Most programs on a multiprocessor: as many as fit with 128 registers per thread and the shared memory of sm_90."""

WARPS, STAGES = 2, 3
"""Two warps repeat less work than more would, and still copy a block of codes in pieces of 128 bits."""


@dataclass(frozen=True)
class LaunchLimits:
    """Largest tile that fits into registers without a spill."""

    queries: int
    """Most query rows of a tile."""
    block: int
    """Most cached rows of a tile."""
    registers: int
    """Most registers per thread: `resident` counts on them, so that all splits run at once."""
    warps: int = WARPS
    """Warps of a program."""


def limits(
    channels: int, corrected: bool, levelled: bool = False, listed: bool = False, short: bool = False, few: bool = False
) -> LaunchLimits:
    """Return the limits for a number of key and value channels together.

    Args:
        channels: channels of keys and values together.
        corrected: rows have corrections.
        levelled: codes have levels.
        listed: rows are listed.
        short: groups of keys have fewer rows than the largest tile.
        few: tiles have few queries, and codes no third bit.
    """
    if corrected:
        if channels <= 256:
            return LaunchLimits(8, 32, 255)
        # With two warps, older versions spill; with four, newer ones spill on sm_120.
        return LaunchLimits(4, 16, 255) if TRITON >= (3, 8) else LaunchLimits(4, 32, 255, 2 * WARPS)
    if channels > 256:
        return LaunchLimits(16, 32 if levelled else 64, 255)
    if channels <= 128:
        return LaunchLimits(16, 64, 128)
    if levelled:
        return LaunchLimits(16, 64, 232)
    if short and not listed:
        return LaunchLimits(16, 64, 192 if TRITON >= (3, 8) else 128 if few else 168)
    return LaunchLimits(16, 64, 208 if listed else 168)


@dataclass(frozen=True)
class ByteChunks:
    """Chunks in which the bytes of a row are read."""

    chunks: int
    """Number of chunks of a row."""
    width: int
    """Bytes of a chunk."""
    padded: int
    """Bytes of a chunk, padded to a power of two."""
    parts: int
    """Channels of a byte."""


def byte_chunks(channels: int, bits: int, group: int | None) -> ByteChunks:
    """Return one chunk per channel group where groups have at least 16 bytes and divide a part, else all bytes at once."""
    parts = 4 if bits == 3 else 8 // bits
    width = channels // parts
    if group is not None and group == padded(group) and width % group == 0:
        return ByteChunks(width // group, group, group, parts)
    return ByteChunks(1, width, padded(width), parts)


def block_rows(group_rows: int, contiguous: bool, limit: int = 64) -> tuple[int, bool]:
    """Return the rows per block, at most `limit`, and whether every block lies inside one row group of the keys."""
    if contiguous:
        for block in (64, 32, 16):
            if block <= limit and group_rows % block == 0:
                return block, True
    return limit, False


def rank(terms: Correction) -> int:
    """Return the rank of the low-rank terms, 0 without any."""
    return 0 if terms.factor is None else terms.factor.shape[1]


def padded_rank(rank: int) -> int:
    """Return the rank, padded to the shortest inner dimension that triton accepts in a float32 product."""
    return padded(rank, 8 if TRITON >= (3, 8) else 16)


def outlier_tiles(channels: int) -> int:
    """Return the number of tiles of `correction.LOW` channels in the outliers of a row."""
    tile: int = correction.LOW.value
    return padded(channels) // tile


def launch(q: Tensor, rows: Rows, where: Where, options: Options, added: Products | None = None) -> Partials:
    """Run the kernel; arguments as in `kvpress.kernels.attention.triton.launch`."""
    keys, values = rows.keys, rows.values
    assert isinstance(keys, Packed) and isinstance(values, Packed)  # noqa: S101, PT018 - for the type checker
    D, DV = keys.channels, values.channels
    key_terms, value_terms = keys.correction or Correction(), values.correction or Correction()
    key_group, value_group = row_group(keys), row_group(values)
    terms = (*key_terms.tensors(), *value_terms.tensors())
    contiguous, corrected = isinstance(where, Ranges), any(term is not None for term in terms)
    short, few = key_group is None and keys.group[0] % 64 in (16, 32, 48), q.shape[1] <= LEAST_ROWS and keys.bits != 3
    bounds = limits(D + DV, corrected, keys.levels is not None, not contiguous, short, few)
    block, fold = block_rows(keys.group[0], contiguous and key_group is None, bounds.block)
    key = byte_chunks(D, keys.bits, None if fold else keys.group[1])
    value = byte_chunks(DV, values.bits, values.group[1])
    key_rank, value_rank = rank(key_terms), rank(value_terms)
    fitting = resident(bounds.warps, bounds.registers, RESIDENT)
    grid = plan(q, where.most_rows(rows.count), block, fitting, LEAST_ROWS, bounds.queries)
    results = partials(q, grid, where.lengths, block, DV)
    if results.lse.numel():
        decode_kernel[grid.programs](
            q.contiguous(),
            keys.codes,
            scales(keys),
            keys.zero,
            values.codes,
            scales(values),
            values.zero,
            key_group,
            value_group,
            *streams(where),
            rows.log_weight,
            tuple(key_terms.tensors()),
            tuple(value_terms.tensors()),
            keys.levels,
            values.levels,
            keys.row_scale,
            offsets(added),
            results.out,
            results.lse,
            q.shape[1],
            grid.streams,
            grid.splits,
            width(where),
            positions(added),
            causal(options),
            options.scale,
            options.softcap,
            D,
            keys.bits,
            *keys.group,
            DV,
            values.bits,
            *values.group,
            key.chunks,
            key.width,
            key.padded,
            key.parts,
            fold,
            value.chunks,
            value.width,
            value.padded,
            value.parts,
            grid.rows,
            block,
            grid.padded_streams,
            key_rank,
            padded_rank(key_rank),
            value_rank,
            padded_rank(value_rank),
            outlier_tiles(DV),
            NARROW.get(keys.scale.dtype, 0),
            NARROW.get(values.scale.dtype, 0),
            float(keys.zero_point),
            float(values.zero_point),
            num_warps=bounds.warps,
            num_stages=STAGES,
            maxnreg=bounds.registers,
        )
    return results


def scales(side: Packed) -> Tensor:
    """Return the scales as the kernel reads them: eight-bit scales as bytes, which every chip can load."""
    return side.scale.view(torch.uint8) if side.scale.dtype in NARROW else side.scale


def row_group(side: Packed) -> Tensor | None:
    """Return the group of each row, int32 [R]; None where it follows from the row number."""
    if side.group_lengths is None:
        return None
    return torch.repeat_interleave(side.group_lengths, output_size=len(side.codes))
