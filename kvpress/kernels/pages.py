"""Scores that tell which stored rows are worth reading: bounds of pages (Quest) and labels of rows (Double Sparsity).

Streams and queries are those of `kvpress.kernels.dense`. Scores are neither scaled nor capped, which changes no order.

    page_bounds[n, p] = max over m of sum over d of max(q[m, d] * low[p, d], q[m, d] * high[p, d])
    label_scores[n, r] = max or sum over m of q_label[m] . labels[r]

Labels are stored as they are, or quantised with one scale and zero each, ``label[d] = code[d] * scale + zero``.

Both are float32 [N, capacity], where stream n has entries for its own pages or rows and -inf past them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.counting import count
from kvpress.kernels.cpu import launch
from kvpress.kernels.packed import Packed, check_side, dequantise
from kvpress.kernels.triton import device

_REDUCTIONS = ("max", "sum")

LABEL_BITS = (1, 2, 4, 8)
"""Bits per channel of a quantised label."""


def page_bounds(
    low: Tensor, high: Tensor, q: Tensor, page_starts: Tensor, page_counts: Tensor, *, capacity: int | None = None
) -> Tensor:
    """Bound ``q . k`` from above over the keys of each page, maximum over the queries of a stream.

    Args:
        low: channel-wise minimum of the keys of each page [P, D]; float32, bfloat16 or float16.
        high: channel-wise maximum, as low.
        q: queries [N, M, D]; float32, bfloat16 or float16.
        page_starts: first page of each stream, int64 [N].
        page_counts: number of pages of each stream, int64 [N].
        capacity: most pages that a stream can have; without it, finding out waits for the device.

    Returns:
        Float32 [N, capacity], -inf past the end of a stream.
    """
    _check("high", high, q)
    checks.shape("low", low, tuple(high.shape), high.dtype)
    if low.stride() != high.stride():
        raise ValueError(f"low must be laid out like high, got strides {low.stride()} and {high.stride()}")
    checks.streams(page_starts, page_counts, q)
    checks.same_device(q, low, high)
    return _page_bounds(low, high, q, page_starts, page_counts, _width(page_counts, capacity))


def label_scores(
    q_label: Tensor,
    labels: Tensor | Packed,
    starts: Tensor,
    lengths: Tensor,
    *,
    reduce: str = "max",
    capacity: int | None = None,
) -> Tensor:
    """Score every row by the product of its label with the queries of its stream, on the label's channels only.

    Sums are float32. Queries are rounded to 16 bits for quantised labels on the CPU: with up to 128 channels, their scores
    are exact to ``2**-15 * max|q| * sum over d of (code[d] * scale + |zero|)``, where q are all queries of the stream, or
    their sum.

    Args:
        q_label: queries on those channels [N, M, r]; float32, bfloat16 or float16.
        labels: labels [R, r] of the same dtypes; rows may be strided, elements of a row may not. Or codes
            uint8 [R, r * bits / 8] with scale and zero, float16 or float32 [R, 1], and ``group = (1, r)``.
        starts: first row of each stream, int64 [N].
        lengths: number of rows of each stream, int64 [N].
        reduce: "max" or "sum" over the queries of a stream.
        capacity: most rows that a stream can have; without it, finding out waits for the device.

    Returns:
        Float32 [N, capacity], -inf past the end of a stream.
    """
    if reduce not in _REDUCTIONS:
        raise ValueError(f"reduce must be one of {list(_REDUCTIONS)}, got {reduce!r}")
    parts = _flat(labels)
    if isinstance(labels, Packed):
        _check_codes(labels, q_label)
    else:
        _check("labels", labels, q_label)
    checks.streams(starts, lengths, q_label)
    checks.same_device(q_label, *parts[:3])
    return _label_scores(q_label, *parts, starts, lengths, reduce, _width(lengths, capacity))


def reference(
    q: Tensor,
    low: Tensor | None,
    high: Tensor | Packed,
    starts: Tensor,
    counts: Tensor,
    reduce: str,
    capacity: int | None = None,
) -> Tensor:
    """Ground truth in float32; without `low`, `high` holds labels."""
    out = torch.full((len(counts), _width(counts, capacity)), float("-inf"), device=q.device)
    for n, (start, length) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        rows = slice(start, start + length)
        queries = q[n].float()
        if isinstance(high, Packed):
            scores = queries @ dequantise(high, torch.arange(start, start + length, device=q.device)).T
        elif low is None:
            scores = queries @ high[rows].float().T
        else:
            scores = queries.clamp_min(0) @ high[rows].float().T + queries.clamp_max(0) @ low[rows].float().T
        out[n, :length] = scores.amax(0) if reduce == "max" else scores.sum(0)
    return out


@torch.library.custom_op("kvpress::page_bounds", mutates_args=())
def _page_bounds(low: Tensor, high: Tensor, q: Tensor, starts: Tensor, counts: Tensor, most: int) -> Tensor:
    return _score("page_bounds", q, low, high, starts, counts, "max", most)


@torch.library.custom_op("kvpress::label_scores", mutates_args=())
def _label_scores(
    q: Tensor,
    labels: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bits: int,
    starts: Tensor,
    lengths: Tensor,
    reduce: str,
    most: int,
) -> Tensor:
    stored = labels if scale is None or zero is None else Packed(labels, scale, zero, bits, (1, q.shape[2]))
    return _score("label_scores", q, None, stored, starts, lengths, reduce, most)


@_page_bounds.register_fake
def _fake_bounds(low: Tensor, high: Tensor, q: Tensor, starts: Tensor, counts: Tensor, most: int) -> Tensor:
    return q.new_empty(q.shape[0], most, dtype=torch.float32)


@_label_scores.register_fake
def _fake_scores(
    q: Tensor,
    labels: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bits: int,
    starts: Tensor,
    lengths: Tensor,
    reduce: str,
    most: int,
) -> Tensor:
    return q.new_empty(q.shape[0], most, dtype=torch.float32)


def _score(
    name: str,
    q: Tensor,
    low: Tensor | None,
    high: Tensor | Packed,
    starts: Tensor,
    counts: Tensor,
    reduce: str,
    most: int,
) -> Tensor:
    stored = _flat(high)[0]
    if device.available(stored):
        # First, because the checks below would wait for the device.
        from kvpress.kernels.triton import pages as gpu

        count(name)
        return gpu.scores(q, low, high, starts, counts, reduce, most)
    if len(counts) and int(counts.max()) > most:
        raise ValueError(f"streams must have at most {most} entries, their capacity, got {int(counts.max())}")
    if launch.available(stored):
        count(name)
        return _launch(q, low, high, starts, counts, reduce, most)
    checks.in_range(starts, counts, len(stored))
    return reference(q, low, high, starts, counts, reduce, most)


def _launch(
    q: Tensor,
    low: Tensor | None,
    high: Tensor | Packed,
    starts: Tensor,
    counts: Tensor,
    reduce: str,
    most: int,
    level_name: str | None = None,
) -> Tensor:
    if reduce == "sum":  # of products: the product of the sum
        q = q.float().sum(1, keepdim=True)
    stored, scale, zero, bits = _flat(high)
    streams, queries, channels = q.shape
    out = torch.empty(streams, most)
    stream = launch.run(
        "pages.cpp",
        "kvpress_labels" if low is None else "kvpress_bounds",
        q.contiguous(),
        low,
        stored,
        scale,
        zero,
        starts.contiguous(),
        counts.contiguous(),
        out,
        len(stored),
        streams,
        queries,
        channels,
        stored.stride(0),
        launch.DTYPES[stored.dtype if scale is None else scale.dtype],
        launch.DTYPES[q.dtype],
        bits,
        most,
        torch.get_num_threads(),
        level_name=level_name,
    )
    if stream >= 0:
        raise ValueError(f"stream {stream} refers to rows outside the {len(stored)} stored rows")
    return out


def _flat(rows: Tensor | Packed) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """Rows or their codes, and scale, zero and bits of codes."""
    if isinstance(rows, Packed):
        return rows.codes, rows.scale, rows.zero, rows.bits
    return rows, None, None, 0


def _width(counts: Tensor, capacity: int | None) -> int:
    if capacity is not None:
        return capacity
    return max(0, int(counts.max())) if len(counts) else 0


def _check(name: str, rows: Tensor, q: Tensor) -> None:
    _check_queries(q)
    checks.shape(name, rows, ("R", q.shape[2]), *checks.FLOATS)
    checks.rows_layout(name, rows)


def _check_codes(labels: Packed, q: Tensor) -> None:
    _check_queries(q)
    channels = q.shape[2]
    if labels.bits not in LABEL_BITS:
        raise ValueError(f"label_bits must be one of {LABEL_BITS}, got {labels.bits}")
    check_side("label", labels, len(labels.codes), channels, None)
    if tuple(labels.group) != (1, channels):
        raise ValueError(f"label_group must be (1, {channels}), one scale for each label, got {tuple(labels.group)}")


def _check_queries(q: Tensor) -> None:
    checks.options(q, 0)
    if q.shape[1] < 1:
        raise ValueError("q must hold at least one query per stream")
