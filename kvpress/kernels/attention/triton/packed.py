# SPDX-License-Identifier: Apache-2.0
"""Split-KV decode attention on packed codes.

Products are float16 with float32 sums; `packed_kernel` describes how codes are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

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
from kvpress.kernels.triton.grid import MOST_SPLITS, multiprocessors, padded, plan, resident

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])

LEAST_ROWS = 4
"""Fewest queries of a tile, a power of two; eight fill the columns of a product of tensor cores."""

RESIDENT, MOST_REGISTERS = 24, 255
"""Most programs on a multiprocessor, for which every supported chip has the shared memory, and most registers of a thread."""

NARROWEST = 16
"""Fewest columns of a chunk: the inner dimension of a product of tensor cores."""

WARPS, STAGES = 1, 3
"""A warp alone repeats no work on scales and queries, and waits at no barrier; stages that are prefetched."""


@dataclass(frozen=True)
class LaunchLimits:
    """Largest tile that fits into registers without a spill."""

    queries: int
    """Most queries of a tile."""
    block: int
    """Most cached rows of a tile."""
    registers: int
    """Most registers per thread: `resident` counts on them, so that all splits run at once."""
    warps: int = WARPS
    """Warps of a program."""


def limits(
    channels: int,
    bits: int,
    queries: int,
    corrected: bool = False,
    levelled: bool = False,
    listed: bool = False,
    stepped: bool = False,
    many: bool = False,
) -> LaunchLimits:
    """Return the limits for a number of key and value channels together.

    Args:
        channels: channels of keys and values together.
        bits: bits of a code of the keys.
        queries: queries of a stream.
        corrected: rows have corrections.
        levelled: codes have levels.
        listed: rows are listed.
        stepped: keys have one scale per row.
        many: streams have work for all programs that fit. Then more of them are faster than faster ones, except with 4 bits.
    """
    if corrected:
        short, warps = (32, 2) if channels <= 256 else (16, 4)
        return LaunchLimits(4, short, MOST_REGISTERS, warps)
    warps = 2 if queries > 8 or (levelled and bits == 8) else WARPS
    if channels > 256 or levelled or listed:
        return LaunchLimits(16, 32, MOST_REGISTERS, warps)
    registers = 168 if many and (stepped or bits < 4) else MOST_REGISTERS
    return LaunchLimits(16, 64 if stepped and bits < 4 else 32, registers, warps)


@dataclass(frozen=True)
class Units:
    """Columns in which the units of a row are read."""

    size: int
    """Bytes of a unit."""
    chunks: int
    """Chunks of a row."""
    width: int
    """Units of a chunk."""
    padded: int
    """Units of a chunk, padded to a power of two."""
    parts: int
    """Parts of a byte, each a code, or the two low bits of one where codes have three."""


def units(channels: int, bits: int, group: int | None) -> Units:
    """Return chunks of channels with one scale each where they are as wide as a product of tensor cores, else one chunk.

    Units have two bytes where chunks of them are wide enough.

    Args:
        channels: channels of a row.
        bits: bits of a code.
        group: neighbouring channels with one scale; None where scales are not applied to codes.
    """
    parts = 4 if bits == 3 else 8 // bits
    part = channels // parts
    shared = part if group is None else gcd(part, group)
    whole = channels % (16 if bits == 3 else 2 * parts) == 0  # every plane of a row has an even number of bytes
    size = 2 if whole and shared >= 2 * NARROWEST else 1
    if group is not None and shared == padded(shared):
        return Units(size, part // shared, shared // size, shared // size, parts)
    return Units(size, 1, part // size, padded(part // size), parts)


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
    stepped, levelled = keys.group[1] == D, keys.levels is not None
    many = q.shape[0] * MOST_SPLITS > resident(WARPS, MOST_REGISTERS, RESIDENT) * multiprocessors(q.device)
    bounds = limits(D + DV, keys.bits, q.shape[1], corrected, levelled, not contiguous, stepped, many)
    block, fold = block_rows(keys.group[0], contiguous and key_group is None, bounds.block)
    key = units(D, keys.bits, None if fold else keys.group[1])
    value = units(DV, values.bits, values.group[1])
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
            key.size,
            fold,
            value.chunks,
            value.width,
            value.padded,
            value.parts,
            value.size,
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
