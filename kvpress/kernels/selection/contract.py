# SPDX-License-Identifier: Apache-2.0
"""Numbers of the rows with the largest scores: what a selection reads, chosen exactly.

Scores are laid out as `kvpress.kernels.label_scores` returns them, and the result as `Listed` takes it. Of equal scores those
of lower rows are chosen; both zeros are equal, and NaN is less than any number. Streams of at most k rows are listed whole.

Every back end has a function ``choose(scores, where, k, first, last, most)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.operand import Ranges

MOST_ROWS = 2**31 - 1
"""Row numbers are 32-bit integers."""


def check(scores: Tensor, where: Ranges, k: int, first: int, last: int, most: Tensor | None) -> None:
    """Refuse scores, streams and numbers of rows that do not belong together."""
    checks.shape("scores", scores, ("N", "capacity"), torch.float32)
    checks.rows_layout("scores", scores)
    where.check(scores)
    check_asked(scores, k, first, last, most)


def check_asked(of_streams: Tensor, k: int, first: int, last: int, most: Tensor | None) -> None:
    """Refuse numbers of rows that do not belong together, or not to a tensor with an entry for every stream."""
    if most is not None:
        checks.shape("most", most, (len(of_streams),), torch.int64)
        checks.same_device(of_streams, most)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if first < 0 or last < 0 or first + last > k:
        raise ValueError(f"first and last must not be negative, and at most {k} together, got {first} and {last}")


def refusal(stream: int, capacity: int, most: Tensor | None) -> ValueError:
    """What to raise for a stream with impossible rows."""
    asked = "" if most is None else ", and choose from first + last to k of them"
    return ValueError(f"stream {stream} must have 0 to {capacity} rows, with numbers from 0 to {MOST_ROWS}{asked}")
