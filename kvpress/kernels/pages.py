"""Scores that tell which stored rows are worth reading: bounds of pages (Quest) and labels of rows (Double Sparsity).

Streams and queries are those of `kvpress.kernels.dense`. Scores are neither scaled nor capped, which changes no order.

    page_bounds[n, p] = max over m of sum over d of max(q[m, d] * low[p, d], q[m, d] * high[p, d])
    label_scores[n, r] = max or sum over m of q_label[m] . labels[r]

Both are float32 [N, most], where stream n has entries for its own pages or rows and -inf past them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.counting import count
from kvpress.kernels.cpu import launch

_REDUCTIONS = {"max": 0, "sum": 1}


def page_bounds(low: Tensor, high: Tensor, q: Tensor, page_starts: Tensor, page_counts: Tensor) -> Tensor:
    """Bound ``q . k`` from above over the keys of each page, maximum over the queries of a stream.

    Args:
        low: channel-wise minimum of the keys of each page [P, D]; float32, bfloat16 or float16.
        high: channel-wise maximum, as low.
        q: queries [N, M, D]; float32, bfloat16 or float16.
        page_starts: first page of each stream, int64 [N].
        page_counts: number of pages of each stream, int64 [N].

    Returns:
        Float32 [N, most pages], -inf past the end of a stream.
    """
    _check("high", high, q)
    checks.shape("low", low, tuple(high.shape), high.dtype)
    if low.stride() != high.stride():
        raise ValueError(f"low must be laid out like high, got strides {low.stride()} and {high.stride()}")
    checks.streams(page_starts, page_counts, q)
    checks.same_device(q, low, high)
    return _page_bounds(low, high, q, page_starts, page_counts, _most(page_counts))


def label_scores(q_label: Tensor, labels: Tensor, starts: Tensor, lengths: Tensor, *, reduce: str = "max") -> Tensor:
    """Score every row by the product of its label with the queries of its stream, on the label's channels only.

    Args:
        q_label: queries on those channels [N, M, r]; float32, bfloat16 or float16.
        labels: labels [R, r] of the same dtypes; rows may be strided, elements of a row may not.
        starts: first row of each stream, int64 [N].
        lengths: number of rows of each stream, int64 [N].
        reduce: "max" or "sum" over the queries of a stream.

    Returns:
        Float32 [N, longest stream], -inf past the end of a stream.
    """
    if reduce not in _REDUCTIONS:
        raise ValueError(f"reduce must be one of {list(_REDUCTIONS)}, got {reduce!r}")
    _check("labels", labels, q_label)
    checks.streams(starts, lengths, q_label)
    checks.same_device(q_label, labels)
    return _label_scores(q_label, labels, starts, lengths, reduce, _most(lengths))


def reference(q: Tensor, low: Tensor | None, high: Tensor, starts: Tensor, counts: Tensor, reduce: str) -> Tensor:
    """Ground truth in float32; without `low`, `high` holds labels."""
    out = torch.full((len(counts), _most(counts)), float("-inf"), device=q.device)
    for n, (start, length) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        rows = slice(start, start + length)
        queries = q[n].float()
        if low is None:
            scores = queries @ high[rows].float().T
        else:
            scores = queries.clamp_min(0) @ high[rows].float().T + queries.clamp_max(0) @ low[rows].float().T
        out[n, :length] = scores.amax(0) if reduce == "max" else scores.sum(0)
    return out


@torch.library.custom_op("kvpress::page_bounds", mutates_args=())
def _page_bounds(low: Tensor, high: Tensor, q: Tensor, starts: Tensor, counts: Tensor, most: int) -> Tensor:
    if launch.available(high):
        count("page_bounds")
        return _launch(q, low, high, starts, counts, "max", most)
    checks.in_range(starts, counts, high.shape[0])
    return reference(q, low, high, starts, counts, "max")


@torch.library.custom_op("kvpress::label_scores", mutates_args=())
def _label_scores(q: Tensor, labels: Tensor, starts: Tensor, lengths: Tensor, reduce: str, most: int) -> Tensor:
    if launch.available(labels):
        count("label_scores")
        return _launch(q, None, labels, starts, lengths, reduce, most)
    checks.in_range(starts, lengths, labels.shape[0])
    return reference(q, None, labels, starts, lengths, reduce)


@_page_bounds.register_fake
def _fake_bounds(low: Tensor, high: Tensor, q: Tensor, starts: Tensor, counts: Tensor, most: int) -> Tensor:
    return q.new_empty(q.shape[0], most, dtype=torch.float32)


@_label_scores.register_fake
def _fake_scores(q: Tensor, labels: Tensor, starts: Tensor, lengths: Tensor, reduce: str, most: int) -> Tensor:
    return q.new_empty(q.shape[0], most, dtype=torch.float32)


def _launch(
    q: Tensor,
    low: Tensor | None,
    high: Tensor,
    starts: Tensor,
    counts: Tensor,
    reduce: str,
    most: int,
    level_name: str | None = None,
) -> Tensor:
    streams, queries, channels = q.shape
    out = torch.full((streams, most), float("-inf"))
    stream = launch.run(
        "pages.cpp",
        "kvpress_labels" if low is None else "kvpress_bounds",
        q.contiguous(),
        low,
        high,
        starts.contiguous(),
        counts.contiguous(),
        out,
        high.shape[0],
        streams,
        queries,
        channels,
        high.stride(0),
        launch.DTYPES[high.dtype],
        launch.DTYPES[q.dtype],
        most,
        _REDUCTIONS[reduce],
        torch.get_num_threads(),
        level_name=level_name,
    )
    if stream >= 0:
        raise ValueError(f"stream {stream} refers to rows outside the {high.shape[0]} stored rows")
    return out


def _most(counts: Tensor) -> int:
    return max(0, int(counts.max())) if len(counts) else 0


def _check(name: str, rows: Tensor, q: Tensor) -> None:
    checks.options(q, rows.shape[0])
    if q.shape[1] < 1:
        raise ValueError("q must hold at least one query per stream")
    checks.shape(name, rows, ("R", q.shape[2]), *checks.FLOATS)
    checks.rows_layout(name, rows)
