# SPDX-License-Identifier: Apache-2.0
"""Scores that tell which stored rows are worth reading: bounds of pages (Quest) and labels of rows (Double Sparsity).

Scores are neither scaled nor capped, which changes no order.

    bounds[n, p] = max over m of sum over d of max(q[m, d] * low[p, d], q[m, d] * high[p, d])
    scores[n, r] = max or sum over m of q[m] . labels[r]

Labels are stored as they are, or quantised with one scale each, and one zero or a zero point for all:
``label[d] = code[d] * scale + zero``, or ``(code[d] - zero_point) * scale``.

Both are float32 [N, capacity], where stream n has entries for its own pages or rows and -inf past them.

Every back end has a function ``score(q, low, high, where, reduce, capacity)``; without `low`, `high` holds labels.
"""

from __future__ import annotations

from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.operand import Ranges
from kvpress.kernels.formats.packed import NARROW, Packed

LABEL_BITS = (1, 2, 4, 8)
"""Bits per channel of a quantised label."""

_REDUCTIONS = ("max", "sum")


def check_bounds(q: Tensor, low: Tensor, high: Tensor, where: Ranges) -> None:
    """Refuse pages that do not fit queries, or each other."""
    _check_queries(q)
    Dense(high).check("high", high.shape[0], q.shape[2])
    checks.shape("low", low, tuple(high.shape), high.dtype)
    if low.stride() != high.stride():
        raise ValueError(f"low must be laid out like high, got strides {low.stride()} and {high.stride()}")
    where.check(q)
    checks.same_device(q, low, high)


def check_labels(q: Tensor, labels: Dense | Packed, where: Ranges, reduce: str) -> None:
    """Refuse labels that do not fit queries."""
    if reduce not in _REDUCTIONS:
        raise ValueError(f"reduce must be one of {list(_REDUCTIONS)}, got {reduce!r}")
    _check_queries(q)
    if isinstance(labels, Packed):
        if labels.bits not in LABEL_BITS:
            raise ValueError(f"labels.bits must be one of {LABEL_BITS}, got {labels.bits}")
        if tuple(labels.group) != (1, q.shape[2]):
            wanted = f"(1, {q.shape[2]}), one scale for each label"
            raise ValueError(f"labels.group must be {wanted}, got {tuple(labels.group)}")
        if labels.levels is not None or labels.row_scale is not None:
            raise ValueError("labels must have neither levels nor a row_scale")
        if labels.scale.dtype in NARROW:
            raise ValueError(f"labels.scale must be float16 or float32, got {labels.scale.dtype}")
    labels.check("labels", labels.storage.shape[0], q.shape[2])
    where.check(q)
    checks.same_device(q, *labels.tensors())


def capacity_of(where: Ranges, capacity: int | None) -> int:
    """Entries per stream: those of the longest one where they are not given, which waits for the device."""
    if capacity is not None:
        return capacity
    return max(0, int(where.lengths.max())) if len(where.lengths) else 0


def check_capacity(where: Ranges, capacity: int) -> None:
    """Refuse streams with more entries than there is room for; waits for the device."""
    if len(where.lengths) and int(where.lengths.max()) > capacity:
        raise ValueError(
            f"streams must have at most {capacity} entries, their capacity, got {int(where.lengths.max())}"
        )


def _check_queries(q: Tensor) -> None:
    checks.shape("q", q, ("N", "M", "D"), *checks.FLOATS)
    if q.shape[1] < 1:
        raise ValueError("q must hold at least one query per stream")
