# SPDX-License-Identifier: Apache-2.0
"""CriticalKV against norms taken head by head."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import AdaKVPress, CriticalAdaKVPress, CriticalKVPress, KnormPress, SnapKVPress
from kvpress.presses.criticalkv import output_norms, output_weight
from tests.caches import positions, prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.presses.scoring import marked, one_view, scored


def norms(model: Any, layer: int, values: Tensor) -> Tensor:
    """Mean L1 norm of `values [H, n, D]` after the slice of the output projection of each query head, `[H, n]`."""
    weight = model.model.layers[layer].self_attn.o_proj.weight.double()
    dim = values.shape[2]
    groups = weight.shape[1] // (len(values) * dim)
    mean_norms = torch.zeros(values.shape[:2], dtype=torch.float64)
    for head in range(weight.shape[1] // dim):
        padded = torch.zeros(values.shape[1], weight.shape[1], dtype=torch.float64)
        padded[:, head * dim : (head + 1) * dim] = values[head // groups].double()
        mean_norms[head // groups] += (padded @ weight.T).abs().sum(dim=1) / groups
    return mean_norms


def chosen(scores: Tensor, weights: Tensor, budget: int, first: float, epsilon: float) -> list[int]:
    """The two stages for one head."""
    sure = marked(scores, int(budget * first))
    others = [t for t in range(len(scores)) if t not in sure]
    weighted = [float((scores[t] + epsilon) * weights[t]) if scores[t] < torch.inf else torch.inf for t in others]
    ranked = sorted(zip(weighted, others, strict=True), reverse=True)
    return sorted(sure + [t for _, t in ranked[: budget - len(sure)]])


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3", "gemma3_text", "gpt_oss"])
def test_values_are_weighed_by_their_reach(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A few tokens at a time, so that norms are really taken in blocks.
    monkeypatch.setattr("kvpress.cache.attention.BLOCK_BYTES", 4 * 2 * 64 * 2 * 7)
    model, ids = tiny_model(family, "eager"), tokens(2, 40)
    for views in scored(model, CriticalKVPress(KnormPress(0.5)), ids).values():
        for view, _ in views:
            weight = output_weight(view.call.layer.module, view.call.store.heads, view.values)
            actual = output_norms(view.values, weight, view.call.store.heads, view.heads)
            for row in range(2):
                expected = norms(model, view.call.layer.module.layer_idx, view.values[row])
                torch.testing.assert_close(actual[row].double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("first", "epsilon"), [(0.5, 1e-4), (0.0, 0.1), (0.9, 0.0), (1.0, 1e-4)])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_two_stages(family: str, first: float, epsilon: float) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, 40)
    inner = SnapKVPress(0.5, window_size=4)
    cache = prefill(model, CriticalKVPress(inner, epsilon, first), ids)
    for layer in full_layers(model):
        view, scores = one_view(model, inner, ids, layer)
        for row in range(2):
            reach = norms(model, layer, view.values[row])
            for head in range(2):
                expected = chosen(scores[row, head], reach[head], 20, first, epsilon)
                assert kvpress.kept_positions(cache)[layer][row][head].tolist() == expected


def test_the_first_stage_alone_is_the_press_inside() -> None:
    model, ids = tiny_model("llama"), tokens(2, 40)
    for wrapped, plain in (
        (CriticalKVPress(KnormPress(0.5), first_stage_ratio=1.0), KnormPress(0.5)),
        (CriticalAdaKVPress(KnormPress(0.5), first_stage_ratio=1.0), AdaKVPress(KnormPress(0.5))),
    ):
        assert positions(prefill(model, wrapped, ids)) == positions(prefill(model, plain, ids))


def test_negative_scores_are_shifted_so_that_reach_still_counts_in_favour() -> None:
    model, ids = tiny_model("llama"), tokens(1, 40)
    view, scores = one_view(model, KnormPress(0.5), ids)
    assert bool((scores < 0).all())
    cache = prefill(model, CriticalKVPress(KnormPress(0.5), first_stage_ratio=0.25), ids)
    for head in range(2):
        shifted = scores[0, head] - scores[0, head].min()
        expected = chosen(shifted, norms(model, 0, view.values[0])[head], 20, 0.25, 1e-4)
        assert kvpress.kept_positions(cache)[0][0][head].tolist() == expected


def test_head_budgets_are_those_of_adakv() -> None:
    model = tiny_model("llama")
    lengths = [60, 41]
    ids, mask = padded_batch(lengths)
    inner = SnapKVPress(0.5, window_size=4)
    ours = prefill(model, CriticalAdaKVPress(inner, alpha_safeguard=0.3), ids, mask)
    ada = prefill(model, AdaKVPress(inner, alpha_safeguard=0.3), ids, mask)
    views_by_layer = scored(model, AdaKVPress(inner, alpha_safeguard=0.3), ids, mask)
    differ = False
    for layer, views in views_by_layer.items():
        for view, scores in views:
            (row,) = view.rows
            reach = norms(model, layer, view.values[0])
            for head in range(2):
                pads = 60 - view.seen
                budget = len(kvpress.kept_positions(ada)[layer][row][head])
                kept = (kvpress.kept_positions(ours)[layer][row][head] - pads).tolist()
                assert kept == chosen(scores[0, head], reach[head], budget, 0.5, 1e-4)
                differ |= budget != lengths[row] // 2
    assert differ


def test_models_without_an_output_projection_are_refused_on_entering() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    for layer in model.model.layers:
        layer.self_attn.mix = layer.self_attn.o_proj
        del layer.self_attn.o_proj
    for press in (CriticalKVPress(KnormPress(0.5)), CriticalAdaKVPress(KnormPress(0.5))):
        with pytest.raises(NotImplementedError, match="LlamaAttention has no dense output projection"), press(model):
            pass


@pytest.mark.parametrize("kind", [CriticalKVPress, CriticalAdaKVPress])
def test_configuration(kind: Any) -> None:
    with pytest.raises(ValueError, match="epsilon must be >= 0, got -1"):
        kind(KnormPress(), epsilon=-1)
    with pytest.raises(ValueError, match=r"first_stage_ratio must be in \[0, 1\], got 1.5"):
        kind(KnormPress(), first_stage_ratio=1.5)
    assert CriticalKVPress(KnormPress(), 1e-3, 0.25).first_stage_ratio == 0.25
    assert CriticalAdaKVPress(KnormPress(), 0.1, 1e-3, 0.25).first_stage_ratio == 0.25
