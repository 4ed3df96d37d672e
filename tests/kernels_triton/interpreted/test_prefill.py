# SPDX-License-Identifier: Apache-2.0
"""Sparse causal attention in Triton against the softmax of all logits with everything else masked."""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels import Tiles, block_prefill
from kvpress.kernels.attention.contract import with_sinks
from kvpress.kernels.cpu import launch
from kvpress.kernels.prefill import triton
from kvpress.kernels.prefill.triton import attend
from kvpress.kernels.triton import device
from tests.kernels.builders import relative_error
from tests.kernels.prefill.test_prefill import Problem, assert_same, problem


@pytest.mark.parametrize(
    ("size", "dims", "group", "columns", "pads", "softcap"),
    [
        ("whole", (64, 64), 1, None, 0, None),
        ("last", (20, 33), 3, 0.2, 37, None),
        ("wide", (80, 128), 1, 0.1, 0, 5.0),
        ("single", (64, 64), 2, 0.2, 37, None),
        ("odd", (64, 16), 1, 0.3, 37, 5.0),
    ],
)
def test_is_the_masked_softmax(
    size: str, dims: tuple[int, int], group: int, columns: float | None, pads: int, softcap: float | None
) -> None:
    case = problem(size, dims=dims, group=group, columns=columns, pads=pads, softcap=softcap)
    assert_same(attend(*case.lists()), case.expected())


def test_weights_of_16_bits_lose_no_more_than_their_rounding() -> None:
    case = problem("last", torch.float16, columns=0.2, pads=37)
    out, lse = attend(*case.lists())
    expected, expected_lse = case.expected()
    assert relative_error(out, expected) < 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=0)


def test_keys_and_values_may_be_views_of_a_longer_cache() -> None:
    case = problem("last", columns=0.2)
    longer = [torch.full((2, 2, 400, 64), float("nan")) for _ in range(2)]
    for buffer, part in zip(longer, (case.keys, case.values), strict=True):
        buffer[:, :, 100:250] = part
    keys, values = (buffer[:, :, 100:250] for buffer in longer)
    q, _, _, *lists = case.lists()
    assert_same(attend(q, keys, values, *lists), case.expected())


def test_a_column_in_a_listed_tile_is_read_once() -> None:
    """Every column is single, every other tile is listed too: each pair of the past must have one weight."""
    case = problem("odd", group=1)
    chosen = torch.zeros_like(case.tiles.chosen)
    chosen[..., ::2] = True
    every = torch.ones(2, 2, 77, dtype=torch.bool)
    case = Problem(case.q, case.keys, case.values, Tiles(chosen, 7, every))
    dense = Problem(case.q, case.keys, case.values, Tiles(torch.ones_like(chosen), 7))
    assert_same(attend(*case.lists()), dense.expected())


def test_the_operator_runs_it_where_triton_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available", lambda storage: True)
    monkeypatch.setattr(launch, "available", lambda storage: False)
    case, sinks = problem("odd", columns=0.3, pads=37), torch.randn(4)
    calls = []
    monkeypatch.setattr(triton, "attend", lambda *args: calls.append(args) or attend(*args))
    result = block_prefill(
        case.q, case.keys, case.values, case.tiles, scale=case.scale, real=case.real, sinks=sinks
    )  # fmt: skip
    assert len(calls) == 1
    assert_same(result, with_sinks(*case.expected(), sinks.view(-1, 1).expand(2, 4, 77)))
