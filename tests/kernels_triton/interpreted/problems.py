"""Fenced storage and the tolerance that every kernel is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import reference as plain
from tests.kernels.builders import Streams, assert_same_lse

LENGTHS = [0, 1, 17, 63, 129]


def poison(s: Streams, *tensors: Tensor) -> None:
    """Make every stored row that no stream uses not a number."""
    unused = torch.ones(s.rows, dtype=torch.bool)
    unused[torch.cat(plain.ranges(s.starts, s.lengths))] = False
    for tensor in tensors:
        tensor[unused] = float("nan")


def lowest_precision(
    q: Tensor, keys: Tensor, values: Tensor, rows: list[Tensor], scale: float, dtype: torch.dtype
) -> Tensor:
    """What torch computes when queries, keys, weights and values are all of one dtype."""
    out = torch.zeros(*q.shape[:2], values.shape[1])
    for n, listed in enumerate(rows):
        if len(listed):
            logits = (q[n].to(dtype) @ keys[listed].to(dtype).T).float() * scale
            out[n] = (logits.softmax(-1).to(dtype) @ values[listed].to(dtype)).float()
    return out


def assert_close(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], rounded: Tensor) -> None:
    """At most twice the error of torch in the same dtype, and a log-sum-exp to match."""
    out, lse = ours
    allowed = 2 * (rounded - expected[0]).abs().max() + 1e-6 * expected[0].abs().max()
    assert not out.isnan().any()
    assert (out - expected[0]).abs().max() <= allowed
    assert_same_lse(lse, expected[1], 1e-3)
