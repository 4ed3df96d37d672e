# SPDX-License-Identifier: Apache-2.0
"""Merged values against loops over pairs, for heads that keep different numbers of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import kvpress
from tests.models import padded_batch, tiny_model, tokens

LENGTH = 36


def blended(keys: Tensor, values: Tensor, kept: list[int], threshold: float, fraction: float) -> dict[int, Tensor]:
    """Values of the kept pairs of one head, `keys [n, D]`, with the others in."""
    gone = [t for t in range(len(keys)) if t not in kept]
    nearest = {}
    for t in gone:
        cosines = {j: float(cosine_similarity(keys[t], keys[j], dim=0)) for j in kept}
        target = max(cosines, key=lambda j: cosines[j])
        nearest[t] = (cosines[target], target)
    first = sorted(gone, key=lambda t: -nearest[t][0])[: round(fraction * len(gone))]
    sums = {j: values[j].clone() for j in kept}
    weights = dict.fromkeys(kept, 1.0)
    for t in first:
        cosine, j = nearest[t]
        if cosine >= threshold:
            size, target_size = float(values[t].norm()), float(values[j].norm())
            weight = max(0.0, cosine) * size / (size + target_size)
            sums[j] += weight * values[t]
            weights[j] += weight
    return {j: total / weights[j] for j, total in sums.items()}


@pytest.mark.parametrize("settings", [{}, {"similarity_threshold": 0.35}, {"merge_fraction": 0.4}])
@pytest.mark.parametrize("inner", ["knorm:0.6", "adakv(knorm:0.6)"])
def test_evicted_values_go_to_the_most_similar_keys(inner: str, settings: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr("kvpress.cache.attention.BLOCK_BYTES", 4 * 100)  # several blocks
    model, (ids, mask) = tiny_model("llama"), padded_batch([LENGTH, 21])
    with kvpress.MergingPress(kvpress.get_press(inner), **settings)(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=1)
    parameters = settings.get("similarity_threshold", 0.0), settings.get("merge_fraction", 1.0)
    positions = kvpress.kept_positions(session.cache)
    for row, length in enumerate((LENGTH, 21)):
        full_cache = model(ids[row : row + 1, -length:], use_cache=True).past_key_values
        for layer, stock in enumerate(full_cache.layers):
            dense = session.cache.layers[layer].store.dense
            for head in range(2):
                kept = (positions[layer][row][head] - (LENGTH - length)).tolist()
                expected = blended(stock.keys[0, head], stock.values[0, head], kept, *parameters)
                merged = dense.values[dense.layout.rows(2 * row + head)]
                torch.testing.assert_close(merged, torch.stack([expected[j] for j in kept]), atol=1e-4, rtol=1e-3)


def test_a_call_by_hand_changes_kept_values_only() -> None:
    keys, values = torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 8)
    index = torch.arange(0, 10, 2).expand(2, 2, -1)
    returned_keys, merged = kvpress.MergingPress(kvpress.KnormPress(0.5)).merge(keys, values, index)
    assert returned_keys is keys
    assert torch.equal(merged[:, :, 1::2], values[:, :, 1::2])
    assert not torch.equal(merged[:, :, ::2], values[:, :, ::2])


def test_equal_pairs_are_merged_into_each_other_without_loss() -> None:
    """Each pair occurs twice and one copy is evicted: the blend is the value itself."""
    keys, values = (torch.randn(1, 1, 8, 8).repeat_interleave(2, dim=2) for _ in range(2))
    _, merged = kvpress.MergingPress(kvpress.KnormPress(0.5)).merge(keys, values, torch.arange(0, 16, 2)[None, None])
    torch.testing.assert_close(merged[:, :, ::2], values[:, :, ::2])


def test_merging_while_tokens_are_generated() -> None:
    model = tiny_model("llama")
    inner = kvpress.MergingPress(kvpress.KnormPress())
    with kvpress.DecodingPress(inner, compression_interval=4, target_size=16)(model) as session:
        model.generate(tokens(2, 30), max_new_tokens=9, do_sample=False)
    assert kvpress.memory_report(session.cache).kept == 3 * 2 * 2 * 16
