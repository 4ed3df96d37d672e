# SPDX-License-Identifier: Apache-2.0
"""Leverage of the keys before rotation, against singular values of the model's projected keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.observe.call import LayerCall
from kvpress.observe.view import View, view_groups
from tests.caches import prefill
from tests.models import grow, padded_batch, position_ids, tiny_model, tokens
from tests.presses.scoring import marked, one_view, scored
from tests.probes import Watching


def projected_keys(model: Any, ids: Tensor) -> Tensor:
    """Keys `[B, H, n, D]` of the first layer before rotation, by the model's own modules."""
    outputs: list[Tensor] = []
    attention = model.model.layers[0].self_attn
    source = getattr(attention, "k_norm", getattr(attention, "k_proj", getattr(attention, "qkv_proj", None)))
    handle = source.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        model(ids)
    finally:
        handle.remove()
    width = 2 * attention.head_dim
    keys = outputs[0].flatten(2)
    # A fused projection gives queries, keys and values side by side; four query heads come before the two key heads.
    keys = keys if keys.shape[2] == width else keys[..., 2 * width : 3 * width]
    return keys.view(*ids.shape, 2, -1).transpose(1, 2)


def leverages(keys: Tensor) -> Tensor:
    """Diagonal of the hat matrix of a ridge regression on the centred `keys [n, D]`, in float64, by singular values."""
    singular_vectors, values, _ = torch.linalg.svd(keys.double() - keys.double().mean(dim=0), full_matrices=False)
    squares = values**2
    return (singular_vectors**2 * (squares / (squares + 0.01 * squares.mean()))).sum(dim=1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "glm4"])
def test_without_a_sketch_leverages_are_those_of_the_keys(family: str) -> None:
    model = tiny_model(family)
    # Distinct tokens: equal ones would have equal keys in the first layer.
    ids = torch.stack([torch.randperm(94, generator=torch.Generator().manual_seed(n))[:90] + 3 for n in range(2)])
    view, scores = one_view(model, kvpress.LeverageScorePress(budget=18), ids)
    keys = projected_keys(model, ids)
    torch.testing.assert_close(view.unrotated_keys(), keys, atol=1e-4, rtol=1e-4)
    cache = prefill(model, kvpress.LeverageScorePress(budget=18), ids)
    for row in range(2):
        for head in range(2):
            expected = leverages(keys[row, head])
            torch.testing.assert_close(scores[row, head].double(), expected, atol=1e-4, rtol=1e-3)
            assert kvpress.kept_positions(cache)[0][row][head].tolist() == marked(expected, 18)


def test_keys_are_turned_back_from_where_they_are() -> None:
    """After a head-wise eviction, in a padded batch, with keys that were turned to other positions."""
    model = tiny_model("llama")
    ids, mask = padded_batch([40, 26])
    views: list[View] = []

    def look(call: LayerCall) -> None:
        views.extend(view for group in view_groups(call) for view in group if call.layer.index == 0)

    cache = DynamicCache(config=model.config)
    at = position_ids(mask)
    with kvpress.get_press("key_rerotation(adakv(snapkv:0.5,window_size=4))")(model):
        model(ids, attention_mask=mask, position_ids=at, past_key_values=cache)
    more = grow(mask, 5)
    with Watching(look)(model):
        at = position_ids(more, 5)
        model(tokens(2, 5, seed=9), attention_mask=more, position_ids=at, past_key_values=cache)
    ids = torch.cat([ids, tokens(2, 5, seed=9)], dim=1)
    assert len(views) == 4
    for view in views:
        row, head = view.rows[0], view.heads.start
        alone = projected_keys(model, ids[row : row + 1, 45 - view.seen :])[0, head]
        torch.testing.assert_close(view.unrotated_keys()[0, 0], alone[view.positions[0, 0]], atol=1e-3, rtol=1e-3)


def test_sketched_leverages_are_shares_of_the_sketch() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([60, 50])
    first, again = (scored(model, kvpress.LeverageScorePress(0.5, sketch_dimension=12), ids, mask) for _ in range(2))
    for layer, views in first.items():
        for (_, scores), (_, same) in zip(views, again[layer], strict=True):
            assert torch.equal(scores, same)
            assert bool(((scores >= 0) & (scores <= 1)).all())
            # Each dimension of the sketch adds 1, less the share that the ridge takes from narrow ones.
            assert bool(((scores.sum(dim=2) > 11) & (scores.sum(dim=2) <= 12)).all())


def test_repeated_keys_share_their_leverage() -> None:
    """Without positions, equal tokens have equal keys: in the first layer, each of m copies counts at most 1 / m."""
    model = tiny_model("llama")
    ids = torch.cat([torch.full((1, 40), 5), tokens(1, 20)], dim=1)
    _, scores = one_view(model, kvpress.LeverageScorePress(0.5), ids)
    assert float(scores[..., :40].max()) <= 1 / 40
    assert bool((scores[..., 40:].median(dim=-1).values > scores[..., :40].amax(dim=-1)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids", [torch.full((1, 30), 5), tokens(1, 7), tokens(1, 30)], ids=["same", "few", "usual"])
def test_degenerate_keys_stay_finite(dtype: torch.dtype, ids: Tensor) -> None:
    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    for views in scored(model, kvpress.LeverageScorePress(0.5), ids).values():
        assert all(bool(torch.isfinite(scores).all()) for _, scores in views)
