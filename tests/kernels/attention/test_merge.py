# SPDX-License-Identifier: Apache-2.0
"""Results over disjoint rows are merged into the result over all of them."""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels import Options, decode, merge
from kvpress.kernels.attention import cpu
from tests.kernels.builders import assert_same_lse, dense, relative_error, streams
from tests.kernels.compiler import LEVELS, needs_compiler


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("parts", "queries", "channels"), [(1, 4, 64), (2, 1, 80), (3, 700, 33), (9, 4, 128)])
def test_every_level_agrees_with_a_softmax_over_all_logits(level: str, parts: int, queries: int, channels: int) -> None:
    out, lse = torch.randn(parts, 3, queries, channels), 20 * torch.randn(parts, 3, queries)
    lse[:, 0], lse[0, 1] = -torch.inf, -torch.inf
    out[lse.isneginf()] = 0
    merged, total = cpu.merge([(o, s) for o, s in zip(out, lse, strict=True)], level)
    shares = lse.double().softmax(dim=0).nan_to_num(0.0)
    assert relative_error(merged, (shares[..., None] * out).sum(dim=0).float()) < 1e-6
    assert_same_lse(total, lse.double().logsumexp(dim=0).float(), 1e-6)
    assert (merged[0] == 0).all()


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_attention_in_parts_is_attention_over_the_whole(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    s = streams([0, 1, 90, 300], 4, 64)
    rows, options = dense(torch.randn(s.rows, 64), torch.randn(s.rows, 64)), Options(0.3)
    listed, parts = s.listed(), []
    for part in range(3):
        mine = (torch.arange(listed.rows.shape[1]) % 3 == part)[None] & (
            torch.arange(listed.rows.shape[1]) < listed.counts[:, None]
        )
        order = mine.int().argsort(dim=1, descending=True, stable=True)
        parts.append(decode(s.q, rows, type(listed)(listed.rows.gather(1, order), mine.sum(dim=1)), options))
    out, lse = merge(parts)
    expected, expected_lse = decode(s.q, rows, s.where, options)
    assert relative_error(out, expected) < 1e-5
    assert_same_lse(lse, expected_lse, 1e-5)


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_results_are_the_same_in_every_mode(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    parts = [(torch.randn(2, 3, 4), torch.randn(2, 3)) for _ in range(2)]
    with torch.enable_grad():
        merged = merge([(out.requires_grad_(), lse.requires_grad_()) for out, lse in parts])
    assert not merged[0].requires_grad
    assert all(map(torch.equal, merged, merge([(out.detach(), lse.detach()) for out, lse in parts])))


def test_bad_parts_are_named() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="at least one result"):
        merge([])
    with pytest.raises(ValueError, match="out must be float32 \\[2, 3, 4\\], got float16"):
        merge([(out, lse), (out.half(), lse)])
    with pytest.raises(ValueError, match="lse must be float32 \\[2, 3\\], got float32 \\[2, 1\\]"):
        merge([(out, lse), (out, lse[:, :1])])
