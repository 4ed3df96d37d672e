# SPDX-License-Identifier: Apache-2.0
"""Sinks against a softmax with one more logit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Options, Rows, decode
from kvpress.kernels.attention.contract import with_sinks
from tests.kernels.builders import Streams, coded, decoded, dense, quantise, streams

INFINITY = float("inf")


def expected(s: Streams, keys: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over the logits of the rows and the sink, of which only the weights of the rows are used."""
    out, lse = torch.zeros(*s.q.shape[:2], values.shape[1]), torch.zeros(s.q.shape[:2])
    for n, rows in enumerate(s.where.numbers()):
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
    codes = Rows(coded(s.rows, 64, 4, 8, books=1), coded(s.rows, 64, 4, 8, books=1))
    for rows, exact in (
        (dense(exact_keys, exact_values), (exact_keys, exact_values)),
        (Rows(keys, values), (exact_keys, exact_values)),
        (codes, (decoded(codes).keys.storage, decoded(codes).values.storage)),
    ):
        out, lse = expected(s, *exact, sinks)
        for where in (s.where, s.listed()):
            results = decode(s.q, rows, where, Options(0.1, sinks=sinks))
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
    s, keys = streams([1, 1], 3, 8), torch.zeros(11, 8)
    for sinks in (torch.zeros(3), torch.zeros(2, 3).half()):
        with pytest.raises(ValueError, match="sinks must be float32 \\[2, 3\\]"):
            decode(s.q, dense(keys, keys), s.where, Options(1.0, sinks=sinks))
