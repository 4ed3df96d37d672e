# SPDX-License-Identifier: Apache-2.0
"""Numbers of the rows with the largest scores, exact: the rows that a selector reads.

Scores have the layout that `kvpress.kernels.label_scores` returns, and the result that of `Listed`. Among equal scores, lower
rows are chosen first; -0.0 equals 0.0, and NaN is less than any number. All rows of a stream with at most k rows are listed.

Every back end has a function ``choose(scores, where, k, first, last, limits)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.operand import Listed, Ranges

MOST_ROWS = 2**31 - 1
"""Largest row number, a 32-bit integer."""


def check(scores: Tensor, where: Ranges, k: int, first: int, last: int, limits: Tensor | None) -> None:
    """Refuse scores, streams and numbers of rows that do not match."""
    checks.shape("scores", scores, ("N", "capacity"), torch.float32)
    checks.rows_layout("scores", scores)
    where.check(scores)
    check_numbers(scores, k, first, last, limits)


def check_numbers(by_stream: Tensor, k: int, first: int, last: int, limits: Tensor | None) -> None:
    """Refuse numbers of rows to choose that contradict each other, or do not fit `by_stream`, with an entry per stream."""
    if limits is not None:
        checks.shape("limits", limits, (len(by_stream),), torch.int64)
        checks.same_device(by_stream, limits)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if first < 0 or last < 0 or first + last > k:
        raise ValueError(f"first and last must not be negative, and at most {k} together, got {first} and {last}")


def refusal(stream: int, capacity: int, limits: Tensor | None) -> ValueError:
    """Return the error for a stream whose rows, or number of rows to choose, are out of range."""
    choice = "" if limits is None else ", and choose from first + last to k of them"
    return ValueError(f"stream {stream} must have 0 to {capacity} rows, with numbers from 0 to {MOST_ROWS}{choice}")


def check_blocks(chosen: Listed, blocks: Ranges, pairs: Ranges, size: int, longest: int) -> None:
    """Refuse chosen blocks whose streams, block size or length do not match."""
    streams = len(chosen.rows)
    checks.shape("rows", chosen.rows, (streams, "K"), torch.int32)
    checks.shape("counts", chosen.counts, (streams,), torch.int64)
    check_sizes(streams, blocks, pairs, size, longest)
    checks.same_device(chosen.rows, chosen.counts, blocks.starts)


def check_sizes(streams: int, blocks: Ranges, pairs: Ranges, size: int, longest: int) -> None:
    """Refuse blocks and pairs that are not of `streams` streams, and sizes out of range."""
    for name, tensor in (
        ("blocks.starts", blocks.starts), ("pairs.starts", pairs.starts), ("pairs.lengths", pairs.lengths),
    ):  # fmt: skip
        checks.shape(name, tensor, (streams,), torch.int64)
    checks.same_device(blocks.starts, pairs.starts, pairs.lengths)
    if size < 1 or longest < 0:
        raise ValueError(f"size must be at least 1 and longest at least 0, got {size} and {longest}")


def check_split(chosen: Listed, segments: Sequence[Ranges], longest: Sequence[int]) -> None:
    """Refuse ranks and segments whose streams do not match."""
    streams = len(chosen.rows)
    checks.shape("rows", chosen.rows, (streams, "K"), torch.int32)
    checks.shape("counts", chosen.counts, (streams,), torch.int64)
    for where in segments:
        checks.shape("starts", where.starts, (streams,), torch.int64)
        checks.shape("lengths", where.lengths, (streams,), torch.int64)
    checks.same_device(chosen.rows, chosen.counts, *(where.starts for where in segments))
    if len(longest) != len(segments):
        raise ValueError(f"longest must have one entry for each of {len(segments)} segments, got {len(longest)}")
