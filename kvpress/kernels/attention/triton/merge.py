# SPDX-License-Identifier: Apache-2.0
"""Merge partial attention over disjoint rows by its log-sum-exps, in one launch.

    parts [N, S, M, Dv]    part_lse [N, S, M]    out [N, M, Dv]    lse [N, M]      float32

    lse = log sum_s exp(part_lse[s]),   out = sum_s exp(part_lse[s] - lse) parts[s]

Parts are the splits of one tensor, or several results [N, M, Dv], which are not copied. Parts without rows have ``lse = -inf``
and are ignored; where all have it, ``out = 0`` and ``lse = -inf``.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import padded
from kvpress.kernels.triton.online import LN2, LOG2E

SPLIT_BLOCK = 16
"""Splits that are read at a time."""


def reference(parts: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge in plain torch, float32: the ground truth."""
    lse = part_lse.logsumexp(1)
    weights = torch.exp(part_lse - lse.clamp_min(torch.finfo(torch.float32).min)[:, None])
    return (weights[..., None] * parts).sum(1), lse


@triton.jit(do_not_specialize=["splits", "M"])
def _kernel(
    PARTS, PART_LSES, OUT, LSE, splits, M, COUNT: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Merge the query row of this program over the splits of COUNT results."""
    row = tl.program_id(0).to(tl.int64)
    n, m = row // M, row % M
    d = tl.arange(0, DVP)
    live_d = d < DV
    largest = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([DVP], tl.float32)
    for i in tl.static_range(COUNT):
        for first in tl.range(0, splits, BLOCK):
            s = first + tl.arange(0, BLOCK)
            at = (n * splits + s) * M + m
            lse = tl.load(PART_LSES[i] + at, mask=s < splits, other=-float("inf")) * LOG2E
            new = tl.maximum(largest, tl.max(lse, 0))
            safe = tl.where(new == -float("inf"), 0.0, new)
            keep, weights = tl.exp2(largest - safe), tl.exp2(lse - safe)
            # Outputs of a part without rows are not read: they need not be finite.
            used = (weights > 0)[:, None] & live_d[None, :]
            part = tl.load(PARTS[i] + at[:, None] * DV + d[None, :], mask=used, other=0.0)
            acc = acc * keep + tl.sum(part * weights[:, None], 0)
            total = total * keep + tl.sum(weights, 0)
            largest = new
    seen = total != 0  # NaN counts as seen and stays NaN
    safe_total = tl.where(seen, total, 1.0)
    tl.store(OUT + row * DV + d, acc / safe_total, mask=live_d)
    index = tl.arange(0, 1)
    tl.store(LSE + row + index, tl.where(seen, (largest + tl.log2(safe_total)) * LN2, -float("inf")))


def merge(parts: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge S partial results per stream; shapes as in the module's docstring."""
    checks.shape("parts", parts, ("N", "S", "M", "Dv"), torch.float32)
    checks.shape("part_lse", part_lse, tuple(parts.shape[:3]), torch.float32)
    checks.same_device(parts, part_lse)
    streams, splits, queries, channels = parts.shape
    out, lse = parts.new_empty(streams, queries, channels), parts.new_empty(streams, queries)
    return _launch(out, lse, [(parts, part_lse)], splits, SPLIT_BLOCK)


def merge_results(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge checked results; arguments and results as in `kvpress.kernels.merge`."""
    out, lse = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in results[0])
    return _launch(out, lse, results, 1, 1)


@on_device
def _launch(
    out: Tensor, lse: Tensor, results: Sequence[tuple[Tensor, Tensor]], splits: int, block: int
) -> tuple[Tensor, Tensor]:
    streams, queries, channels = out.shape
    if out.numel():
        _kernel[(streams * queries,)](
            tuple(result[0].detach().contiguous() for result in results),
            tuple(result[1].detach().contiguous() for result in results),
            out,
            lse,
            splits,
            queries,
            len(results),
            channels,
            padded(channels),
            block,
        )
    return out, lse


def partials(q: Tensor, splits: int, channels: int) -> tuple[Tensor, Tensor]:
    """Allocate outputs [N, splits, M, channels] and log-sum-exp [N, splits, M] for the splits of every stream, float32."""
    streams, queries = q.shape[:2]
    shape = (streams, splits, queries)
    return q.new_empty(*shape, channels, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def merged(parts: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of all splits; a single split is returned as it is."""
    return (parts[:, 0], part_lse[:, 0]) if parts.shape[1] == 1 else merge(parts, part_lse)
