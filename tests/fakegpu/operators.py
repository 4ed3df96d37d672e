# SPDX-License-Identifier: Apache-2.0
"""Every operator that launches Triton kernels, called at any size on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.kernels import STEP, Basis, Coded, Correction, Dense, Listed, Options, Packed, Ranges, Rotary, Rows, Where
from kvpress.kernels.prefill.contract import Lists

CHUNK = 32
"""Rows of a group of keys, and channels of a group of values."""


@dataclass(frozen=True)
class Shape:
    """Size of a problem with N = batch x heads streams."""

    batch: int = 2
    """Rows of the batch."""
    heads: int = 4
    """KV heads."""
    tokens: int = 512
    """Stored rows of a stream."""
    queries: int = 4
    """Queries M of a GQA group."""
    channels: int = 64
    """Head dim D."""

    @property
    def streams(self) -> int:
        return self.batch * self.heads

    @property
    def rows(self) -> int:
        return self.streams * self.tokens


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def queries(s: Shape) -> Tensor:
    return empty(s.streams, s.queries, s.channels)


def ranges(s: Shape) -> Ranges:
    return Ranges(*(empty(s.streams, dtype=torch.int64) for _ in range(2)))


def listed(s: Shape) -> Listed:
    return Listed(empty(s.streams, -(-s.tokens // 16), dtype=torch.int32), empty(s.streams, dtype=torch.int64))


def packed(s: Shape, group: tuple[int, int], bits: int = 4) -> Packed:
    scale = empty(-(-s.rows // group[0]), s.channels // group[1], dtype=torch.float16)
    return Packed(empty(s.rows, s.channels * bits // 8, dtype=torch.uint8), scale, scale, bits, group)


def correction(s: Shape) -> Correction:
    factor, basis = empty(s.rows, 2, dtype=torch.float16), empty(9, 2, s.channels, dtype=torch.float16)
    first, channel = empty(s.rows + 1, dtype=torch.int32), empty(99, dtype=torch.uint8)
    return Correction(factor, basis, empty(s.rows, dtype=torch.int32), first, channel, empty(99, dtype=torch.float16))


def bases(s: Shape) -> dict[str, Basis]:
    scale, rotation = (empty(n, s.channels, dtype=torch.float32) for n in (s.streams, s.channels))
    return {name: Basis(scale, rotation) for name in ("key_basis", "value_basis")}


def dense(s: Shape) -> Rows:
    return Rows(*(Dense(empty(s.rows, s.channels)) for _ in range(2)), empty(s.rows, dtype=torch.float32))


def uniform(s: Shape) -> Rows:
    return Rows(packed(s, (CHUNK, 1)), packed(s, (1, CHUNK)))


def corrected(s: Shape) -> Rows:
    keys, values = (replace(packed(s, group), correction=correction(s)) for group in ((CHUNK, 1), (1, CHUNK)))
    keys = replace(keys, group_lengths=empty(len(keys.scale), dtype=torch.int32))
    return Rows(keys, values, empty(s.rows, dtype=torch.float32), **bases(s))


def coded(s: Shape) -> Rows:
    coupled = 4
    shift, positions = empty(s.streams, dtype=torch.int64), empty(s.rows, dtype=torch.int32)
    coarse, fine = (empty(blocks, 2, s.channels // 2, dtype=torch.float32) for blocks in (-(-s.tokens // STEP), STEP))
    codes = empty(s.rows, s.channels // coupled, dtype=torch.uint8)
    book = empty(2, s.channels // coupled, 256, coupled, dtype=torch.float32)
    side = Coded(codes, book, 8, empty(s.rows, dtype=torch.float32))
    turned = replace(side, rotary=Rotary(coarse, fine, shift, positions))
    return Rows(turned, side, empty(s.rows, dtype=torch.float32), **bases(s))


def attend(s: Shape, rows: Rows, where: Where) -> None:
    sinks = empty(s.streams, s.queries, dtype=torch.float32)
    kernels.decode(queries(s), rows, where, Options(0.1, softcap=3.0, sinks=sinks))


def mass(s: Shape) -> None:
    weight = empty(s.streams, s.queries, dtype=torch.float32)
    kernels.column_mass(queries(s), dense(s), ranges(s), Options(0.1, sinks=weight), query_weight=weight)


def pages(s: Shape) -> None:
    low, high = (empty(-(-s.rows // 16), s.channels) for _ in range(2))
    kernels.page_bounds(queries(s), low, high, ranges(s), capacity=-(-s.tokens // 16))


def labels(s: Shape) -> None:
    kernels.label_scores(queries(s), packed(s, (1, s.channels)), ranges(s), capacity=s.tokens)


def merge(s: Shape) -> None:
    """Merge two results with the splits of a launch."""
    from kvpress.kernels.attention.triton import as_partials, merge_partials
    from kvpress.kernels.attention.triton.merge import partials
    from kvpress.kernels.triton.grid import plan

    result = empty(s.streams, s.queries, s.channels, dtype=torch.float32), empty(s.streams, s.queries).float()
    grid = plan(result[0], s.tokens, 64, 8)
    merge_partials(result[0], [*as_partials([result]), partials(result[0], grid, ranges(s).lengths, 64, s.channels)])


def turned(s: Shape) -> None:
    """Enter the basis of keys, and leave that of values."""
    from kvpress.kernels.attention.triton import basis as kernels

    matrix = empty(s.channels, s.channels, dtype=torch.float32)
    basis = Basis(empty(s.streams, s.channels).float(), matrix, empty(s.streams, s.channels))
    q, shift = kernels.enter(queries(s), basis, None, 0.1)
    kernels.leave(q, empty(s.streams, s.queries).float(), basis, None, shift)


def selection(s: Shape) -> None:
    """Choose the best sixteenth of all pages, and list their rows."""
    pages = -(-s.tokens // 16)
    counts, where = empty(s.streams, dtype=torch.int64), ranges(s)
    rows, _ = kernels.top_rows(empty(s.streams, pages, dtype=torch.float32), where, -(-pages // 16), first=1, last=1)
    kernels.rows_of_blocks(Listed(rows, counts), where, where, 16, longest=s.tokens)


def quantise(s: Shape) -> None:
    from kvpress.kernels.quantisation.triton import encode

    for group in ((CHUNK, 1), (1, CHUNK)):
        encode(empty(s.rows, s.channels), 4, group)


def prefill(s: Shape) -> None:
    """Run prefill with four query heads to a KV head; every query block reads 8 tiles."""
    from kvpress.kernels.prefill.triton import attend

    heads, block = 4 * s.heads, 64
    q, side = empty(s.batch, heads, s.tokens, s.channels), empty(s.batch, s.heads, s.tokens, s.channels)
    lists = s.batch * heads * -(-s.tokens // block)
    tiles = Lists(empty(lists, dtype=torch.int64), empty(8 * lists, dtype=torch.int32), block)
    attend(q, side, side, tiles, empty(s.batch, s.tokens, dtype=torch.bool), 0.1, None)


OPERATORS: dict[str, Callable[[Shape], Any]] = {
    "dense": lambda s: attend(s, dense(s), ranges(s)),
    "dense, listed": lambda s: attend(s, dense(s), listed(s)),
    "packed": lambda s: attend(s, uniform(s), ranges(s)),
    "packed, corrected": lambda s: attend(s, corrected(s), ranges(s)),
    "packed, listed": lambda s: attend(s, corrected(s), listed(s)),
    "coded": lambda s: attend(s, coded(s), ranges(s)),
    "coded, listed": lambda s: attend(s, coded(s), listed(s)),
    "mass": mass,
    "pages": pages,
    "labels": labels,
    "merge": merge,
    "bases": turned,
    "selection": selection,
    "quantise": quantise,
    "prefill": prefill,
}

LARGE = {
    "a million tokens": Shape(batch=1, heads=8, tokens=2**20),
    "32 rows of 128k": Shape(batch=32, heads=8, tokens=2**17),
    "128 heads": Shape(batch=1, heads=128, tokens=2**17, queries=1),
    "batch of 64": Shape(batch=64, heads=8, tokens=2**15, queries=4 * 64),
}
"""Sizes at which a grid or an index may overflow. The last has the queries of a window of 64 tokens."""
