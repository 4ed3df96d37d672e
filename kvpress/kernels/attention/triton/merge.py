# SPDX-License-Identifier: Apache-2.0
"""Merge partial attention over disjoint rows by its log-sum-exps, in one launch.

    out [N, M, Dv]    lse [N, M]    of parts s with outputs [M, Dv] and log-sum-exps [M] each, float32

    lse = log sum_s exp(lse_s),   out = sum_s exp(lse_s - lse) out_s

Parts of a stream are the splits of one or several decode launches, and results [N, M, Dv]; none is copied. Parts without rows
have ``lse = -inf`` and are ignored; where all have it, ``out = 0`` and ``lse = -inf``.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels.triton import online
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import LaunchGrid, padded
from kvpress.kernels.triton.online import LN2, LOG2E

SPLIT_BLOCK, CHANNELS = 128, 32
"""Splits that are read at a time, all that most streams have, and channels of a program."""

REGISTERS = 128
"""Most registers per thread: without a limit, ptxas spills in order to run more programs than there are."""


@dataclass(frozen=True)
class Partials:
    """Results of the programs of one launch, before they are merged."""

    out: Tensor
    """Outputs of each program, float32 [P, M, Dv]; P is N where a program reads a whole stream."""
    lse: Tensor
    """Log-sum-exps of each program, float32 [P, M]."""
    lengths: Tensor | None = None
    """Rows of each stream, int64 [N]; None where a program reads a whole stream."""
    splits: int = 0
    """Programs among which the rows are divided, and the rows per block; see `online.splits_of`."""
    block: int = 1


def partials(q: Tensor, grid: LaunchGrid, lengths: Tensor, block: int, channels: int) -> Partials:
    """Allocate the results of a grid for queries [N, M, D] and outputs of `channels` channels."""
    shape = (grid.results, q.shape[1])
    out, lse = q.new_empty(*shape, channels, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)
    return Partials(out, lse, lengths.contiguous() if grid.splits else None, grid.splits, block)


@triton.jit(do_not_specialize=["streams", "M"])
def _kernel(
    OUTS, LSES, LENGTHS, OUT, LSE, streams, M, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, COUNT: tl.constexpr,
    NP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge some channels of a query row over the parts of COUNT launches."""
    row = tl.program_id(0).to(tl.int64)
    n, m = row // M, row % M
    d = tl.program_id(1) * DVP + tl.arange(0, DVP)
    live_d = d < DV
    largest = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([DVP], tl.float32)
    for i in tl.static_range(COUNT):
        if LENGTHS[i] is None:
            lse, part = _load(LSES[i], OUTS[i], row + tl.arange(0, 1), row + 1, 0, 1, d, live_d, DV)
            largest, total, acc = _merged(largest, total, acc, lse, part)
        else:
            counts = online.splits_of(LENGTHS[i], streams, SPLITS[i], BLOCKS[i], NP)
            start, count = online.own_splits(counts, n, NP)
            end = start + count
            for first in tl.range(start, end, BLOCK):
                s = (first + tl.arange(0, BLOCK)).to(tl.int64)
                split_lse, split_part = _load(LSES[i], OUTS[i], s, end, m, M, d, live_d, DV)
                largest, total, acc = _merged(largest, total, acc, split_lse, split_part)
    seen = total != 0  # NaN counts as seen and stays NaN
    safe_total = tl.where(seen, total, 1.0)
    tl.store(OUT + row * DV + d, acc / safe_total, mask=live_d)
    index = tl.arange(0, 1)
    lse = tl.where(seen, largest + tl.log2(safe_total) * LN2, -float("inf"))
    tl.store(LSE + row + index, lse, mask=index == tl.program_id(1))


@triton.jit
def _load(LSE, OUT, s, end, m, M, d, live_d, DV: tl.constexpr):
    """Load the log-sum-exps of parts s and their outputs: those of a part without rows need not be finite."""
    at, live = s * M + m, s < end
    lse = tl.load(LSE + at, mask=live, other=-float("inf"))
    out = tl.load(OUT + at[:, None] * DV + d[None, :], mask=live[:, None] & live_d[None, :], other=0.0)
    return lse, tl.where((lse == -float("inf"))[:, None], 0.0, out)


@triton.jit
def _merged(largest, total, acc, lse, part):
    """Add parts with log-sum-exps `lse` to the sums; differences are rounded less than the sums themselves would be."""
    new = tl.maximum(largest, tl.max(lse, 0))
    safe = tl.where(new == -float("inf"), 0.0, new)
    keep, weights = tl.exp2((largest - safe) * LOG2E), tl.exp2((lse - safe) * LOG2E)
    return new, total * keep + tl.sum(weights, 0), acc * keep + tl.sum(part * weights[:, None], 0)


@on_device
def merge_partials(shape: Tensor, parts: Sequence[Partials]) -> tuple[Tensor, Tensor]:
    """Merge the parts of every stream.

    Args:
        shape: a tensor [N, M, ...], such as the queries.
        parts: results of launches on the same queries.

    Returns:
        Outputs [N, M, Dv] and log-sum-exp [N, M], float32.
    """
    first, (streams, queries) = parts[0], shape.shape[:2]
    if len(parts) == 1 and first.lengths is None:
        return first.out, first.lse
    channels = first.out.shape[-1]
    out, lse = first.out.new_empty(streams, queries, channels), first.lse.new_empty(streams, queries)
    if out.numel():
        is_split = any(part.lengths is not None for part in parts)
        width = min(CHANNELS, padded(channels))
        _kernel[(streams * queries, -(-channels // width))](
            tuple(part.out for part in parts),
            tuple(part.lse for part in parts),
            tuple(part.lengths for part in parts),
            out,
            lse,
            streams,
            queries,
            tuple(part.splits for part in parts),
            tuple(part.block for part in parts),
            len(parts),
            padded(streams, 1) if is_split else 0,
            channels,
            width,
            SPLIT_BLOCK,
            maxnreg=REGISTERS,
        )
    return out, lse


def as_partials(results: Sequence[tuple[Tensor, Tensor]]) -> list[Partials]:
    """Return results [N, M, Dv] and [N, M] as parts."""
    return [Partials(out.detach().contiguous(), lse.detach().contiguous()) for out, lse in results]
