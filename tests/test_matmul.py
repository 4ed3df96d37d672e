# SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 numbers in float32 are as accurate as those of torch."""

from __future__ import annotations

import pytest
import torch

from kvpress.cache import matmul


@pytest.mark.parametrize("has_bfloat16", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_have_the_error_of_torch(
    dtype: torch.dtype, has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "HAS_BFLOAT16", has_bfloat16)
    torch.manual_seed(0)
    left, right = torch.randn(3, 7, 64).to(dtype), torch.randn(3, 40, 64).to(dtype).transpose(-1, -2)
    product, expected = matmul.multiply(left, right), left @ right
    assert product.dtype == dtype
    exact = left.double() @ right.double()
    assert float((product - exact).abs().max()) <= float((expected - exact).abs().max()) * 1.01


def test_gradients_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "HAS_BFLOAT16", False)
    left, right = torch.randn(2, 3).bfloat16().requires_grad_(), torch.randn(3, 4).bfloat16()
    with torch.enable_grad():
        matmul.multiply(left, right).float().sum().backward()
    torch.testing.assert_close(left.grad, right.sum(-1).expand(2, 3), rtol=2e-2, atol=2e-2)
