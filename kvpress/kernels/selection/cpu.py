# SPDX-License-Identifier: Apache-2.0
"""The rows with the largest scores in C++."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.fields import CallTemplate, Field
from kvpress.kernels.formats.operand import Ranges
from kvpress.kernels.formats.packed import Packed
from kvpress.kernels.formats.pages import Pages
from kvpress.kernels.scores import cpu as scores_cpu
from kvpress.kernels.selection.contract import refusal


def choose(
    scores: Tensor,
    where: Ranges,
    k: int,
    first: int = 0,
    last: int = 0,
    limits: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on checked arguments; arguments and results as in `kvpress.kernels.top_rows`."""
    chosen = _Chosen(scores.shape, k)
    stream = launch.run("select.cpp", "kvpress_select", *chosen.fields(scores, where, first, last, limits), level=level)
    if stream >= 0:
        raise refusal(stream, chosen.capacity, limits)
    return chosen.rows, chosen.counts


def choose_by_labels(
    q: Tensor,
    labels: Dense | Packed,
    where: Ranges,
    k: int,
    reduce: str,
    capacity: int,
    first: int = 0,
    last: int = 0,
    limits: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel that stores no scores on checked arguments; arguments and results as in `kvpress.kernels.label_rows`."""
    chosen = _Chosen((len(q), capacity), k)
    scored = scores_cpu.fields(q, None, labels, where, reduce, capacity, None)
    fields = *scored, *chosen.fields(None, where, first, last, limits)
    _check(launch.run("scores.cpp", "kvpress_label_rows", *fields, level=level), chosen, len(labels.storage), limits)
    return chosen.rows, chosen.counts


def choose_by_bounds(
    q: Tensor,
    pages: Pages,
    k: int,
    first: int = 0,
    last: int = 0,
    limits: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel that stores no bounds on checked arguments; arguments and results as in `kvpress.kernels.page_rows`."""
    streams, q = q.shape[0], q.contiguous()
    chosen = _Chosen((streams, pages.capacity), k)
    rows = torch.empty(streams, min(chosen.rows.shape[1] * pages.size, pages.longest), dtype=torch.int32)
    counts = torch.empty(streams, dtype=torch.int64)
    varying = q, chosen.rows, chosen.counts, rows, counts
    settings = q.shape, q.dtype, k, first, last, torch.get_num_threads()
    template = pages.templates.get(settings) if limits is None and level is None else None
    if template is None:
        (low, high), where, pairs = pages.bounds, pages.where, pages.pairs
        scored = scores_cpu.fields(q, low, high, where, "max", pages.capacity, None)
        listed = pairs.starts.contiguous(), pairs.lengths.contiguous(), rows, counts, pages.size, rows.shape[1]
        fields = *scored, *chosen.fields(None, where, first, last, limits), *listed
        stream = launch.run("scores.cpp", "kvpress_page_rows", *fields, level=level)
        if limits is None and level is None:
            pages.templates[settings] = CallTemplate(fields, varying)
    else:
        stream = launch.call("scores.cpp", "kvpress_page_rows", template.filled(*varying))
    _check(stream, chosen, len(pages.high), limits)
    return rows, counts


def split(
    ranks: Tensor, counts: Tensor, segments: Sequence[Ranges], longest: Sequence[int], level: str | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Run the kernel on checked arguments, once for each segment; arguments and results as in `kvpress.kernels.split_rows`."""
    ranks, counts = ranks.contiguous(), counts.contiguous()
    taken, passed = torch.zeros(2, len(ranks), dtype=torch.int64)
    found = []
    for where, most in zip(segments, longest, strict=True):
        rows = torch.empty(len(ranks), min(most, ranks.shape[1]), dtype=torch.int32)
        listed = torch.empty(len(ranks), dtype=torch.int64)
        stream = launch.run(
            "select.cpp", "kvpress_split_rows", ranks, counts, where.starts.contiguous(), where.lengths.contiguous(), taken,
            passed, rows, listed, len(ranks), ranks.shape[1], rows.shape[1], level=level,
        )  # fmt: skip
        if stream >= 0:
            raise refusal(stream, most, None)
        found.append((rows, listed))
    return found


def _check(stream: int, chosen: _Chosen, stored: int, limits: Tensor | None) -> None:
    """Refuse what an entry point that scores and chooses found: a stream outside of the `stored` rows, or beyond its limits."""
    streams = len(chosen.rows)
    if stream >= streams:
        raise refusal(stream - streams, chosen.capacity, limits)
    if stream >= 0:
        raise scores_cpu.refusal(stream, stored)


class _Chosen:
    """Tensors for the chosen rows of each stream and their number."""

    def __init__(self, shape: Sequence[int], k: int) -> None:
        streams, self.capacity = shape
        self.rows = torch.empty(streams, min(k, self.capacity), dtype=torch.int32)
        self.counts = torch.empty(streams, dtype=torch.int64)

    def fields(self, scores: Tensor | None, where: Ranges, first: int, last: int, limits: Tensor | None) -> list[Field]:
        """Return the fields of ``Select`` in select.h."""
        return [
            scores,
            where.starts.contiguous(),
            where.lengths.contiguous(),
            None if limits is None else limits.contiguous(),
            self.rows,
            self.counts,
            len(self.rows),
            0 if scores is None else scores.stride(0),
            self.capacity,
            self.rows.shape[1],
            first,
            last,
            torch.get_num_threads(),
        ]
