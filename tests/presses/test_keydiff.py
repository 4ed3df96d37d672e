# SPDX-License-Identifier: Apache-2.0
"""KeyDiff against cosines taken one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvpress
from tests.caches import prefill
from tests.models import full_layers, tiny_model, tokens
from tests.presses.scoring import marked


def dissimilarity(keys: Tensor) -> Tensor:
    """Minus the cosine of each key `[n, D]` with the mean of the unit keys, in float64."""
    units = torch.stack([key / key.dot(key).sqrt() for key in keys.double()])
    anchor = units.sum(dim=0) / len(units)
    return torch.stack([-unit.dot(anchor) / anchor.dot(anchor).sqrt() for unit in units])


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "gpt_oss"])
def test_the_least_similar_keys_stay(family: str) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, 40)
    cache = prefill(model, kvpress.KeyDiffPress(0.7), ids)
    stock = model(ids, use_cache=True).past_key_values
    for layer in full_layers(model):
        for row in range(2):
            for head in range(2):
                expected = marked(dissimilarity(stock.layers[layer].keys[row, head]), 12)
                assert kvpress.kept_positions(cache)[layer][row][head].tolist() == expected


def test_order_and_length_of_keys_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 30, 8, generator=generator)
    order = torch.randperm(30, generator=generator)
    scale = torch.rand(1, 2, 30, 1, generator=generator) + 0.5

    def score(keys: Tensor) -> Tensor:
        return kvpress.KeyDiffPress().score(None, None, keys, keys, None, {})

    torch.testing.assert_close(score((keys * scale)[:, :, order]), score(keys)[:, :, order])
    same = score(keys[:, :, :1].expand(-1, -1, 5, -1).half())
    assert torch.isfinite(same).all()
