# SPDX-License-Identifier: Apache-2.0
"""Page bounds and label scores in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.operand import Ranges
from kvpress.kernels.formats.packed import Packed


def score(q: Tensor, low: Dense | None, high: Dense | Packed, where: Ranges, reduce: str, capacity: int) -> Tensor:
    """Compute bounds or scores in float32, the ground truth; if `low` is None, `high` holds labels."""
    where.check_stored(high.storage.shape[0])
    out = torch.full((q.shape[0], capacity), float("-inf"), device=q.device)
    for n, rows in enumerate(where.numbers()):
        queries, stored = q[n].float(), high.read(rows)
        if low is None:
            scores = queries @ stored.T
        else:
            scores = queries.clamp_min(0) @ stored.T + queries.clamp_max(0) @ low.read(rows).T
        out[n, : len(rows)] = scores.amax(0) if reduce == "max" else scores.sum(0)
    return out
