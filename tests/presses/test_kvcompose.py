# SPDX-License-Identifier: Apache-2.0
"""KVCompose against the model's own attention while it reads its prompt twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from tests.caches import prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens

LENGTH = 36


def worth(model: Any, ids: Tensor, press: Any) -> Tensor:
    """Scores of the pairs of one row, `[L, H, T]`, from eager attention over the prompt twice."""
    length, layers = ids.shape[1], full_layers(model)
    parts = []
    for start in range(0, length, press.chunk_size):
        block = ids[:, start : start + press.chunk_size]
        seen = model(torch.cat([ids, block], dim=1), output_attentions=True).attentions
        parts.append(torch.cat([seen[layer][:, :, length:, :length] for layer in layers]))
    paid = torch.cat(parts, dim=2)  # [L, Hq, queries, T]
    paid = paid.amax(dim=2) if press.agg_task == "max" else paid.mean(dim=2)
    grouped = paid.unflatten(1, (2, -1))
    scores = grouped.amax(dim=2) if press.agg_group == "max" else grouped.mean(dim=2)
    if press.add_v_norm:
        values = model(ids, use_cache=True).past_key_values
        scores = scores * torch.stack([values.layers[layer].values[0].norm(dim=-1) for layer in layers])
    return scores + scores.mean(dim=1, keepdim=True) if press.add_mean_across_heads else scores


def kept_by_hand(scores: Tensor, press: Any) -> list[list[list[int]]]:
    layers, heads, length = scores.shape
    ordered = scores.sort(dim=2, descending=True).values
    total = int(length * (1 - press.compression_ratio))
    lower_bound = max(1, press.keep_token_lower_bound)
    if press.structured:
        slots = ordered.amax(dim=1) if press.agg_head == "max" else ordered.mean(dim=1)
        slots[:, :lower_bound] = torch.inf
        best = slots.flatten().topk(total * layers).indices // length
        counts = [[int((best == layer).sum())] * heads for layer in range(layers)]
    else:
        ordered[:, :, :lower_bound] = torch.inf
        best = ordered.flatten().topk(total * layers * heads).indices // length
        counts = [[int((best == layer * heads + head).sum()) for head in range(heads)] for layer in range(layers)]
    return [
        [
            sorted(scores[layer, head].topk(min(length, max(lower_bound, counts[layer][head]))).indices.tolist())
            for head in range(heads)
        ]
        for layer in range(layers)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"structured": False},
        {"agg_task": "mean", "agg_group": "max", "agg_head": "max", "add_v_norm": True},
        {"structured": False, "agg_task": "mean", "add_mean_across_heads": False, "keep_token_lower_bound": 8},
        {"keep_token_lower_bound": 12, "compression_ratio": 0.6, "chunk_size": 16},
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_kept_pairs_follow_from_eager_attention(family: str, settings: dict[str, Any]) -> None:
    model = tiny_model(family, "eager")
    press = kvpress.KVComposePress(**{"compression_ratio": 0.5, **settings})
    ids, mask = padded_batch([LENGTH, 23])
    cache = prefill(model, press, ids, mask)
    kept = kvpress.kept_positions(cache)
    layers = full_layers(model)
    for row, length in enumerate((LENGTH, 23)):
        expected = kept_by_hand(worth(model, ids[row : row + 1, -length:], press), press)
        for layer, heads in zip(layers, expected, strict=True):
            actual = [(at[at >= LENGTH - length] - (LENGTH - length)).tolist() for at in kept[layer][row]]
            assert actual == heads
    num_kept = sum(len(head) for layer in layers for head in kept[layer][0])
    assert num_kept == pytest.approx(len(layers) * 2 * int(LENGTH * (1 - press.compression_ratio)), abs=2)


@pytest.mark.parametrize("structured", [True, False])
def test_a_pair_in_every_head_is_a_part_of_the_budget(structured: bool) -> None:
    press = kvpress.KVComposePress(structured, 0.95)
    for layer in kvpress.kept_positions(prefill(tiny_model("llama"), press, tokens(2, 39))):
        assert [[len(head) for head in row] for row in layer] == [[1, 1], [1, 1]]


def test_heads_of_a_layer_are_equally_long_and_their_memory_is_free() -> None:
    model = tiny_model("llama")
    cache = prefill(model, kvpress.KVComposePress(compression_ratio=0.75), tokens(1, 400))
    sizes = [[len(head) for head in layer[0]] for layer in kvpress.kept_positions(cache)]
    assert all(len(set(layer)) == 1 for layer in sizes)
    assert len({layer[0] for layer in sizes}) > 1
    report = kvpress.memory_report(cache)
    assert report.total_bytes / report.uncompressed_bytes == pytest.approx(0.25, rel=0.03)


def test_arguments_are_in_the_order_of_nvidia_kvpress() -> None:
    press = kvpress.KVComposePress(False, 0.5, "mean", "max", "max", True, False, 3)
    assert (press.structured, press.compression_ratio, press.keep_token_lower_bound) == (False, 0.5, 3)
    assert kvpress.get_press("kvcompose:0.5") == kvpress.KVComposePress(compression_ratio=0.5)
    with pytest.raises(ValueError, match="agg_task must be 'max' or 'mean', got 'sum'"):
        kvpress.KVComposePress(agg_task="sum")  # type: ignore[arg-type]


@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_heads_of_different_lengths_keep_the_budget(aggregate: str) -> None:
    """In the second turn behind `critical_adakv`, the longest heads have composites that short heads are not part of."""
    model, _ = kvpress.load_model("reference")
    press = f"critical_adakv(kvcompose:0.5,agg_task=mean,agg_head={aggregate},add_v_norm=true,chunk_size=16)"
    for seed in (2, 5, 10):
        cache = DynamicCache()
        with kvpress.get_press(press)(model):
            for turn, length in enumerate((40, 37)):
                model(tokens(1, length, seed=3 * seed + turn), past_key_values=cache)
        kept = [len(head) for layer in kvpress.kept_positions(cache) for head in layer[0]]
        budget = len(kept) * (77 // 2)
        assert len(set(kept)) > 2
        assert budget - 1 <= sum(kept) <= budget  # a composite of two pairs may be one too many
