# SPDX-License-Identifier: Apache-2.0
"""Clusters and runs as weighted pairs, against loops over pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.observe.view import View
from tests.models import padded_batch, tiny_model, tokens
from tests.presses.scoring import marked

LENGTHS = (60, 41)


def run(press: Any, family: str = "llama") -> tuple[Any, list[Any]]:
    """Return the cache of a left-padded batch under a press, and the full cache of each row alone."""
    model, (ids, mask) = tiny_model(family), padded_batch(list(LENGTHS))
    with press(model) as session, torch.no_grad():
        model(ids, attention_mask=mask, use_cache=True, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
    full_caches = [model(ids[i : i + 1, -n:], use_cache=True).past_key_values for i, n in enumerate(LENGTHS)]
    return session.cache, full_caches


def stored_head(cache: Any, layer: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    dense = cache.layers[layer].store.dense
    rows = dense.layout.rows(n)
    return dense.keys[rows], dense.values[rows], dense.log_weight[rows].float()


def radii(keys: Tensor) -> list[float]:
    """Distance of each key from the keys chosen before it; the farthest key is chosen next."""
    distances = (keys[:, None] - keys).norm(dim=2).tolist()
    remaining, chosen, radius = list(range(1, len(keys))), [0], [math.inf] * len(keys)
    while remaining:
        gaps = {t: min(distances[t][c] for c in chosen) for t in remaining}
        best = max(gaps, key=lambda t: gaps[t])
        radius[best] = gaps[best]
        remaining.remove(best)
        chosen.append(best)
    return radius


@pytest.mark.parametrize(("family", "spec"), [("llama", "{}"), ("qwen3", "adakv({})")])
def test_subgen_keeps_centres_with_their_nearest_pairs(family: str, spec: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvpress.cache.attention.BLOCK_BYTES", 4 * 16**2 * 3)  # several parts
    block, window, sinks = 16, 4, 2
    press = spec.format("subgen:0.6,block_size=16,window_size=4,n_sink=2")
    cache, full_caches = run(kvpress.get_press(press), family)
    positions = kvpress.kept_positions(cache)
    for row, length in enumerate(LENGTHS):
        for layer, stock in enumerate(full_caches[row].layers):
            expected_scores = []
            for head in range(2):
                keys, values = stock.keys[0, head], stock.values[0, head]
                distances = (keys[:, None] - keys).norm(dim=2).tolist()
                kept = (positions[layer][row][head] - (LENGTHS[0] - length)).tolist()
                scores, members = [math.inf] * length, {t: [t] for t in kept}
                for start in range(sinks, length - window, block):
                    end = min(start + block, length - window)
                    scores[start:end] = radii(keys[start:end])
                    centres = [t for t in range(start, end) if t in kept]
                    for t in set(range(start, end)) - set(kept):
                        members[min(centres, key=distances[t].__getitem__)].append(t)
                expected_scores.append(torch.tensor(scores))
                actual = stored_head(cache, layer, 2 * row + head)
                torch.testing.assert_close(actual[0], keys[kept])
                mean = torch.stack([values[members[t]].mean(dim=0) for t in kept])
                torch.testing.assert_close(actual[1], mean, atol=1e-4, rtol=1e-3)
                weight = torch.tensor([math.log(len(members[t])) for t in kept])
                torch.testing.assert_close(actual[2], weight, atol=2e-3, rtol=1e-3)
                if spec == "{}":
                    assert kept == marked(expected_scores[-1], int(length * 0.4))


def test_clusters_are_clustered_again_and_nothing_is_lost_from_their_numbers() -> None:
    model, ids = tiny_model("llama"), tokens(2, 40)
    inner = kvpress.SubGenPress(block_size=16, window_size=4, n_sink=2)
    with kvpress.DecodingPress(inner, compression_interval=4, target_size=16)(model) as session:
        model.generate(ids, max_new_tokens=21, do_sample=False)
    for layer in session.cache.layers:
        numbers = layer.store.dense.log_weight.double().exp().view(4, 16)
        torch.testing.assert_close(numbers.sum(dim=1), torch.full((4,), 60.0).double(), atol=0.1, rtol=0)


def merged_around(pivot: int, run_of: list[int], keys: Tensor, values: Tensor) -> list[Tensor]:
    """Return the key and the value of a run, by a Gaussian of the distance from the pivot's key."""
    squares = (keys[run_of] - keys[pivot]).square().sum(dim=1)
    g = torch.exp(-squares / (2 * squares.mean())) if len(run_of) > 1 else torch.ones(1)
    return [(tensor[run_of] * g[:, None]).sum(dim=0) / g.sum() for tensor in (keys, values)]


def close(actual: Sequence[Tensor], expected: list[Tensor], i: int) -> bool:
    return all(
        torch.allclose(actual_rows[i], expected_rows, atol=1e-4, rtol=1e-3)
        for actual_rows, expected_rows in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_kvmerger_merges_runs_of_similar_neighbours(family: str) -> None:
    window, heavy, ratio = 4, 0.4, 0.5
    press = kvpress.KVMergerPress(ratio, window_size=window, heavy=heavy)
    model, (ids, _) = tiny_model(family, "eager"), padded_batch(list(LENGTHS))
    cache, full_caches = run(press, family)
    positions, num_heads = kvpress.kept_positions(cache), model.config.num_key_value_heads
    for row, length in enumerate(LENGTHS):
        kept_count = int(length * (1 - ratio))
        weights = model(ids[row : row + 1, -length:], output_attentions=True).attentions
        for layer, stock in enumerate(full_caches[row].layers):
            paid = weights[layer][0, :, -window:].unflatten(0, (num_heads, -1)).mean(dim=(1, 2))
            for head in range(num_heads):
                keys, values = stock.keys[0, head], stock.values[0, head]
                num_heavy = min(int(heavy * kept_count), kept_count - window)
                unmerged = {*marked(paid[head, : length - window], num_heavy), *range(length - window, length)}
                merged = [t for t in range(length) if t not in unmerged]
                similarities = {
                    t: float(torch.cosine_similarity(keys[t], keys[s], 0)) for s, t in itertools.pairwise(merged)
                }
                begins = {
                    merged[0],
                    *sorted(similarities, key=lambda t: similarities[t])[: kept_count - len(unmerged) - 1],
                }
                kept = sorted(unmerged | begins)
                assert (positions[layer][row][head] - (LENGTHS[0] - length)).tolist() == kept
                actual = stored_head(cache, layer, num_heads * row + head)
                for i, t in enumerate(kept):
                    run_of = (
                        [t]
                        if t in unmerged
                        else [s for s in merged if s >= t and max(b for b in begins if b <= s) == t]
                    )
                    highest = max(float(paid[head, s]) for s in run_of)
                    # Rounding chooses between pivots that are paid as much.
                    pivots = [s for s in run_of if float(paid[head, s]) >= highest * (1 - 1e-4) - 1e-7]
                    assert any(close(actual[:2], merged_around(pivot, run_of, keys, values), i) for pivot in pivots)
                    assert float(actual[2][i]) == pytest.approx(math.log(len(run_of)), abs=2e-3)


@pytest.mark.parametrize(
    "spec", ["subgen:0.5,block_size=8,window_size=1,n_sink=0", "kvmerger:0.5,window_size=1,heavy=0.0"]
)
def test_pairs_that_repeat_are_pooled_without_loss(spec: str, monkeypatch: Any) -> None:
    """Each pair occurs twice: half of the pairs, with log-weights, give the attention output of all."""
    press, call = kvpress.get_press(spec), SimpleNamespace(layer=SimpleNamespace(expand=None))
    keys, values = (torch.randn(1, 2, 8, 32).repeat_interleave(2, dim=2) for _ in range(2))
    view = View(call, [0], slice(0, 2), lambda: (keys, values), torch.arange(16).expand(1, 2, -1), 16, {}, target=8)
    monkeypatch.setattr(type(press), "attention", lambda self, view: torch.zeros(view.shape), raising=False)
    mask = torch.arange(16).expand(1, 2, -1) % 2 == 0
    (step,) = press.recipe().evictions
    new = step.rewrite(view, mask)
    queries = torch.randn(1, 2, 5, 32)

    def attend(keys: Tensor, values: Tensor, weight: Tensor) -> Tensor:
        return torch.softmax(queries @ keys.mT / 32**0.5 + weight[:, :, None], dim=-1) @ values

    pooled_keys = keys if new.keys is None else new.keys
    pooled = attend(pooled_keys[:, :, ::2], new.values[:, :, ::2], new.log_weight[:, :, ::2].float())
    torch.testing.assert_close(pooled, attend(keys, values, torch.zeros(1, 2, 16)), atol=2e-3, rtol=2e-3)
