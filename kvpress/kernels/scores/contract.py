# SPDX-License-Identifier: Apache-2.0
"""Scores that selectors choose stored rows by: bounds of pages (Quest) and labels of rows (Double Sparsity).

Scores are neither scaled nor capped, because neither changes their order.

    bounds[n, p] = max over m of sum over d of max(q[m, d] * low[p, d], q[m, d] * high[p, d])
    scores[n, r] = max or sum over m of q[m] . labels[r]

Labels are dense, or quantised with a scale per label, and a zero per label or one zero point for all:
``label[d] = code[d] * scale + zero``, or ``(code[d] - zero_point) * scale``.

Bounds and scores are float32 [N, capacity]: stream n has an entry for each of its pages or rows, and -inf past them.

Every back end has a function ``score(q, low, high, where, reduce, capacity)``; if `low` is None, `high` holds labels.
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
    check_queries(q)
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
    check_queries(q)
    if isinstance(labels, Packed):
        if labels.bits not in LABEL_BITS:
            raise ValueError(f"labels.bits must be one of {LABEL_BITS}, got {labels.bits}")
        if tuple(labels.group) != (1, q.shape[2]):
            expected = f"(1, {q.shape[2]}), one scale for each label"
            raise ValueError(f"labels.group must be {expected}, got {tuple(labels.group)}")
        if labels.levels is not None or labels.row_scale is not None:
            raise ValueError("labels must have neither levels nor a row_scale")
        if labels.scale.dtype in NARROW:
            raise ValueError(f"labels.scale must be float16 or float32, got {labels.scale.dtype}")
    labels.check("labels", labels.storage.shape[0], q.shape[2])
    where.check(q)
    checks.same_device(q, *labels.tensors())


def capacity_of(where: Ranges, capacity: int | None) -> int:
    """Return the capacity; if it is None, the length of the longest stream, which waits for the device."""
    if capacity is not None:
        return capacity
    return max(0, int(where.lengths.max())) if len(where.lengths) else 0


def check_capacity(where: Ranges, capacity: int) -> None:
    """Refuse streams with more entries than the capacity; waits for the device."""
    if len(where.lengths) and int(where.lengths.max()) > capacity:
        raise ValueError(
            f"streams must have at most {capacity} entries, their capacity, got {int(where.lengths.max())}"
        )


def check_queries(q: Tensor) -> None:
    """Refuse queries of another shape or dtype, or none."""
    checks.shape("q", q, ("N", "M", "D"), *checks.FLOATS)
    if q.shape[1] < 1:
        raise ValueError("q must hold at least one query per stream")
