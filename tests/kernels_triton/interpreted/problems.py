# SPDX-License-Identifier: Apache-2.0
"""Fenced storage and the tolerance of every kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import Rows, Where
from tests.kernels.builders import Streams, assert_same_lse

LENGTHS = [0, 1, 17, 63, 129]


def poison(s: Streams, *tensors: Tensor) -> None:
    """Fill every stored row that no stream uses with NaN."""
    for tensor in tensors:
        tensor[s.unused()] = float("nan")


def lowest_precision(q: Tensor, rows: Rows, where: Where, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the result of torch with queries, keys, weights and values of one dtype."""
    out = torch.zeros(*q.shape[:2], rows.values.channels)
    for n, numbers in enumerate(where.numbers()):
        if len(numbers):
            keys, values = rows.keys.read(numbers, n).to(dtype), rows.values.read(numbers, n).to(dtype)
            logits = (q[n].to(dtype) @ keys.T).float() * scale
            out[n] = (logits.softmax(-1).to(dtype) @ values).float()
    return out


def assert_close(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], rounded: Tensor) -> None:
    """Allow at most twice the error of torch in the same dtype, and compare log-sum-exps.

    References in float32 are rounded as well: processors add in different orders, so 16 units of rounding are allowed.
    """
    out, lse = ours
    rounding = 16 * torch.finfo(torch.float32).eps
    allowed = 2 * (rounded - expected[0]).abs().max() + rounding * expected[0].abs().max()
    assert not out.isnan().any()
    assert (out - expected[0]).abs().max() <= allowed
    assert_same_lse(lse, expected[1], 1e-3)
