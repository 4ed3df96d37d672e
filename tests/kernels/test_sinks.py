"""Sinks against a softmax with one more logit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import dense_decode, dense_select, uniform_decode, uniform_select
from kvpress.kernels import reference as plain
from kvpress.kernels.sinks import with_sinks
from tests.kernels.builders import Streams, flat, quantise, streams

INFINITY = float("inf")


def expected(s: Streams, keys: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the logits of the rows and the sink, of which the weights of the rows are used."""
    out, lse = torch.zeros(*s.q.shape[:2], values.shape[1]), torch.zeros(s.q.shape[:2])
    for n, rows in enumerate(plain.ranges(s.starts, s.lengths)):
        logits = torch.cat([s.q[n] @ keys[rows].T * 0.1, sinks[n, :, None]], dim=-1)
        out[n] = torch.softmax(logits, dim=-1)[:, :-1] @ values[rows]
        lse[n] = logits.logsumexp(-1)
    return out, lse


@pytest.mark.parametrize("size", [0.0, 5.0, 60.0])
def test_every_operator_counts_them(size: float) -> None:
    s = streams([0, 1, 17, 200], 4, 64)
    keys, exact_keys = quantise(torch.randn(s.rows, 64), 8, (32, 1))
    values, exact_values = quantise(torch.randn(s.rows, 64), 8, (1, 32))
    sinks = size * torch.randn(4, 4)
    ranges = plain.ranges(s.starts, s.lengths)
    listed = torch.stack([torch.cat([rows, rows.new_zeros(200 - len(rows))]) for rows in ranges])
    kept: dict[str, Any] = {"starts": s.starts, "lengths": s.lengths, "scale": 0.1, "sinks": sinks}
    chosen: dict[str, Any] = {"rows": listed, "counts": s.lengths, "scale": 0.1, "sinks": sinks}
    out, lse = expected(s, exact_keys, exact_values, sinks)
    for results in (
        dense_decode(s.q, exact_keys, exact_values, **kept),
        dense_select(s.q, exact_keys, exact_values, **chosen),
        uniform_decode(s.q, **kept, **flat(keys, values)),
        uniform_select(s.q, **chosen, **flat(keys, values)),
    ):
        assert torch.allclose(results[0], out, atol=1e-3)
        assert torch.allclose(results[1], lse, atol=1e-3)


def test_infinite_logits() -> None:
    lse = torch.tensor([[-INFINITY, -INFINITY, 2.0]])
    out = torch.tensor([[[0.0], [0.0], [3.0]]])
    sinks = torch.tensor([[1.0, -INFINITY, -INFINITY]])
    changed, total = with_sinks(out, lse, sinks)
    assert torch.equal(changed, out)
    assert torch.equal(total, torch.tensor([[1.0, -INFINITY, 2.0]]))


def test_absent_sinks_change_nothing_and_bad_ones_are_named() -> None:
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    assert with_sinks(out, lse, None) == (out, lse)
    for sinks in (torch.zeros(3), torch.zeros(2, 3).half()):
        with pytest.raises(ValueError, match="sinks must be float32 \\[2, 3\\]"):
            with_sinks(out, lse, sinks)
