"""Numbers of the rows with the largest scores: what a selection reads, chosen exactly.

Streams are those of `kvpress.kernels.dense`; scores are laid out as `kvpress.kernels.pages` returns them, and the result as
the operators that attend to listed rows take it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.counting import count
from kvpress.kernels.cpu import launch

MOST_ROWS = 2**31 - 1
"""Row numbers are 32-bit integers."""


def top_rows(
    scores: Tensor,
    starts: Tensor,
    lengths: Tensor,
    k: int,
    *,
    first: int = 0,
    last: int = 0,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """List the k rows of each stream with the largest scores, in ascending order.

    Of equal scores those of lower rows are chosen; both zeros are equal, and NaN is less than any number. Streams of at
    most k rows are listed whole.

    Args:
        scores: score of each row of a stream, float32 [N, capacity]; rows may be strided, elements of a row may not.
        starts: number of the first row of each stream, int64 [N].
        lengths: number of rows of each stream, int64 [N], at most capacity.
        k: how many rows to choose, at least 1.
        first: how many rows at the start of a stream are chosen whatever their score.
        last: the same at the end of a stream; first and last are part of k.
        most: how many rows to choose of each stream where they differ, int64 [N], from first + last to k.

    Returns:
        Row numbers ``starts[n] + i``, int32 [N, min(k, capacity)], 0 past the chosen ones, and how many were chosen in each
        stream, int64 [N].
    """
    checks.shape("scores", scores, ("N", "capacity"), torch.float32)
    checks.rows_layout("scores", scores)
    checks.shape("starts", starts, (len(scores),), torch.int64)
    checks.shape("lengths", lengths, (len(scores),), torch.int64)
    checks.same_device(scores, starts, lengths)
    if most is not None:
        checks.shape("most", most, (len(scores),), torch.int64)
        checks.same_device(scores, most)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if first < 0 or last < 0 or first + last > k:
        raise ValueError(f"first and last must not be negative, and at most {k} together, got {first} and {last}")
    return _top_rows(scores, starts, lengths, k, first, last, most)


def reference(
    scores: Tensor,
    starts: Tensor,
    lengths: Tensor,
    k: int,
    first: int = 0,
    last: int = 0,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch; never waits for the device."""
    capacity = scores.shape[1]
    place, end = torch.arange(capacity, device=scores.device), lengths[:, None]
    bits = (scores + 0.0).view(torch.int32)  # without negative zeros
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(scores.isnan(), -(2**31))
    # No two are equal, because which of them topk takes is not defined.
    unique = order.long() * 2**32 + place.flip(0)
    unique = unique.masked_fill((place < first) | (place >= end - last), torch.iinfo(torch.int64).max)
    unique = unique.masked_fill(place >= end, torch.iinfo(torch.int64).min)
    chosen = unique.topk(min(k, capacity), dim=1, sorted=most is not None).indices
    counts = lengths.clamp(max=chosen.shape[1])
    if most is not None:
        counts = torch.minimum(counts, most)
        chosen = chosen.masked_fill(place[: chosen.shape[1]] >= counts[:, None], capacity)
    chosen = chosen.masked_fill(chosen >= end, capacity).sort(dim=1).values
    rows = (starts[:, None] + chosen).masked_fill(chosen >= end, 0)
    return rows.int(), counts


@torch.library.custom_op("kvpress::top_rows", mutates_args=())
def _top_rows(
    scores: Tensor, starts: Tensor, lengths: Tensor, k: int, first: int, last: int, most: Tensor | None
) -> tuple[Tensor, Tensor]:
    if launch.available(scores):
        count("top_rows")
        return _launch(scores, starts, lengths, k, first, last, most)
    if scores.device.type == "cpu":  # a check on another device would wait for it
        capacity = scores.shape[1]
        bad = (starts < 0) | (lengths < 0) | (lengths > capacity) | (starts + lengths > MOST_ROWS)
        if most is not None:
            bad |= (most < lengths.clamp(max=first + last)) | (torch.minimum(most, lengths) > k)
        if bad.any():
            raise _refusal(int(bad.int().argmax()), capacity, most)
    return reference(scores, starts, lengths, k, first, last, most)


@_top_rows.register_fake
def _empty(
    scores: Tensor, starts: Tensor, lengths: Tensor, k: int, first: int, last: int, most: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows = scores.new_empty(scores.shape[0], min(k, scores.shape[1]), dtype=torch.int32)
    return rows, lengths.new_empty(lengths.shape)


def _launch(
    scores: Tensor,
    starts: Tensor,
    lengths: Tensor,
    k: int,
    first: int,
    last: int,
    most: Tensor | None = None,
    level_name: str | None = None,
) -> tuple[Tensor, Tensor]:
    rows, counts = _empty(scores, starts, lengths, k, first, last, most)
    streams, capacity = scores.shape
    stream = launch.run(
        "select.cpp",
        "kvpress_select",
        scores,
        starts.contiguous(),
        lengths.contiguous(),
        None if most is None else most.contiguous(),
        rows,
        counts,
        streams,
        scores.stride(0),
        capacity,
        rows.shape[1],
        first,
        last,
        torch.get_num_threads(),
        level_name=level_name,
    )
    if stream >= 0:
        raise _refusal(stream, capacity, most)
    return rows, counts


def _refusal(stream: int, capacity: int, most: Tensor | None) -> ValueError:
    asked = "" if most is None else ", and choose from first + last to k of them"
    return ValueError(f"stream {stream} must have 0 to {capacity} rows, with numbers from 0 to {MOST_ROWS}{asked}")
