# SPDX-License-Identifier: Apache-2.0
"""Scores against plain computations from the model's own attention weights and projections."""

from __future__ import annotations

import copy
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.observe.call import LayerCall
from tests.caches import prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.probes import Watching

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "olmo2",
    "cohere",
    "smollm3",
    "granite",
]
LENGTH = 48


def weights(model: Any, ids: Tensor) -> list[Tensor]:
    """Attention weights per layer, `[B, Hq, T, T]`, from the eager implementation."""
    return model(ids, output_attentions=True).attentions


def best(scores: Tensor, count: int) -> list[list[Tensor]]:
    """Positions of the `count` best per row and head, ascending."""
    index = scores.topk(count, dim=-1).indices.sort(dim=-1).values
    return [[head for head in row] for row in index]


def assert_kept(cache: DynamicCache, layer: int, expected: list[list[Tensor]]) -> None:
    for row, heads in enumerate(expected):
        for head, positions in enumerate(heads):
            assert torch.equal(kvpress.kept_positions(cache)[layer][row][head], positions)


@pytest.mark.parametrize("family", FAMILIES)
def test_snapkv_uses_the_models_own_attention(family: str) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, LENGTH)
    window = 8
    cache = prefill(model, kvpress.SnapKVPress(0.5, window_size=window, kernel_size=3), ids)
    for layer in full_layers(model):
        seen = weights(model, ids)[layer][:, :, -window:, :-window].mean(dim=2)
        smooth = torch.nn.functional.avg_pool1d(seen, 3, stride=1, padding=1)
        scores = smooth.view(2, 2, -1, LENGTH - window).mean(dim=2)
        old = best(scores, LENGTH // 2 - window)
        recent = torch.arange(LENGTH - window, LENGTH)
        assert_kept(cache, layer, [[torch.cat([head, recent]) for head in row] for row in old])


def test_snapkv_keeps_the_newest_of_a_prompt_that_is_all_window() -> None:
    cache = prefill(tiny_model("llama"), kvpress.SnapKVPress(budget=4, window_size=64), tokens(2, 10))
    assert_kept(cache, 0, [[torch.arange(6, 10)] * 2] * 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_tova_uses_the_last_row(family: str) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, LENGTH)
    cache = prefill(model, kvpress.TOVAPress(0.5), ids)
    for layer in full_layers(model):
        scores = weights(model, ids)[layer][:, :, -1].mean(dim=1)
        scores[:, -1] = 2.0
        assert_kept(cache, layer, best(scores[:, None].expand(-1, 2, -1), LENGTH // 2))


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_observed_attention_is_the_column_mean(family: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small blocks, so that the sums really run over several of them.
    monkeypatch.setattr("kvpress.cache.attention.BLOCK_BYTES", 4 * 4 * 2 * LENGTH * 5)
    model, ids = tiny_model(family, "eager"), tokens(2, LENGTH)
    with kvpress.ObservedAttentionPress(0.5)(model) as session:
        model.generate(ids, max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk)
    for layer in full_layers(model):
        received = weights(model, ids)[layer].sum(dim=2) / (LENGTH - torch.arange(LENGTH))
        assert_kept(session.cache, layer, best(received.view(2, 2, -1, LENGTH).mean(dim=2), LENGTH // 2))


def test_accumulated_mass_counts_every_query_once() -> None:
    model = tiny_model("llama", "eager")
    ids, mask = padded_batch([LENGTH, 30])
    with kvpress.H2OPress(budget=1000)(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for layer in session.cache.layers:
        mass = layer.store.window.side["mass"]
        assert mass.dtype == torch.float32
        # Two query heads per kv head, one unit of attention per query; the last token is never read.
        torch.testing.assert_close(mass.sum(-1), torch.tensor([[2.0 * (n + 5)] * 2 for n in (LENGTH, 30)]))
        assert (mass[1, :, : LENGTH - 30] == 0).all()


def test_h2o_accumulates_through_evictions_as_a_replay_does() -> None:
    """Replay H2O token by token with explicit masks; every head must keep the same set."""
    model, ids = tiny_model("llama", "eager"), tokens(1, 30)
    steps, kept = 6, 12
    with kvpress.H2OPress(budget=kept, recent_ratio=0.5)(model) as session:
        out = model.generate(ids, max_new_tokens=steps, do_sample=False)
        kept_pairs = kvpress.kept_positions(session.cache)
    sequence = out[:, :-1]
    store = DynamicCache(config=model.config)
    attention = model(ids, past_key_values=store, output_attentions=True).attentions
    first = attention[0].sum(dim=2).view(1, 2, 2, -1).sum(dim=2)  # layer 0, per kv head
    alive = [set(range(30)) for _ in range(2)]
    mass = [{t: float(first[0, h, t]) for t in range(30)} for h in range(2)]

    def cut(h: int, length: int) -> None:
        recent = set(sorted(alive[h])[-kept // 2 :])
        heavy = sorted(alive[h] - recent, key=lambda t: mass[h][t], reverse=True)[: kept - len(recent)]
        alive[h] = recent | set(heavy)

    module = model.model.layers[0].self_attn
    for h in range(2):
        cut(h, 30)
    hidden = model.model.embed_tokens(sequence)
    normed = model.model.layers[0].input_layernorm(hidden)
    cos, sin = model.model.rotary_emb(normed, torch.arange(sequence.shape[1])[None])
    shape = (1, sequence.shape[1], -1, module.head_dim)
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key = module.q_proj(normed).view(shape), module.k_proj(normed).view(shape)
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    for t in range(30, sequence.shape[1]):
        for h in range(2):
            alive[h].add(t)
            mass[h][t] = 0.0
            at = sorted(alive[h])
            logits = query[0, 2 * h : 2 * h + 2, t] @ key[0, h, at].T * module.scaling
            for position, weight in zip(at, torch.softmax(logits, dim=-1).sum(dim=0).tolist(), strict=True):
                mass[h][position] += weight
            cut(h, t + 1)
    for h in range(2):
        assert kept_pairs[0][0][h].tolist() == sorted(alive[h])


def test_expected_attention_matches_its_formula() -> None:
    model, ids = tiny_model("llama"), tokens(1, LENGTH)
    press = kvpress.ExpectedAttentionPress(0.5, n_future_positions=16, n_sink=2, epsilon=0.02)
    cache = prefill(model, press, ids)
    module = model.model.layers[0].self_attn
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    dim = module.head_dim
    query = module.q_proj(hidden).view(1, LENGTH, -1, dim).transpose(1, 2)[0, :, 2:]
    stock = model(ids, use_cache=True).past_key_values.layers[0]
    mean = query.mean(dim=1)
    centred = query - mean[:, None]
    covariance = centred.transpose(1, 2) @ centred / (LENGTH - 2)
    cos, sin = model.model.rotary_emb(hidden, torch.arange(LENGTH, LENGTH + 16)[None])
    half = torch.zeros(dim, dim)
    half[: dim // 2, dim // 2 :] = -torch.eye(dim // 2)
    half[dim // 2 :, : dim // 2] = torch.eye(dim // 2)
    rotation = (cos[0, :, :, None] * torch.eye(dim) + sin[0, :, :, None] * half).mean(dim=0)
    scores = []
    for head in range(4):
        keys = stock.keys[0, head // 2, 2:]
        spread = rotation @ covariance[head] @ rotation.T
        z = keys @ (rotation @ mean[head]) / dim**0.5 + ((keys @ spread) * keys).sum(-1) / (2 * dim)
        scores.append(torch.softmax(z, dim=-1))
    grouped = torch.stack(scores).view(2, 2, -1).mean(dim=1) + 0.02
    weighted = grouped * stock.values[0, :, 2:].norm(dim=-1)
    chosen = weighted.topk(LENGTH // 2 - 2, dim=-1).indices + 2
    for head in range(2):
        expected = torch.cat([torch.arange(2), chosen[head].sort().values])
        assert torch.equal(kvpress.kept_positions(cache)[0][0][head], expected)


def test_expected_attention_is_the_mean_over_random_queries() -> None:
    """exp(z) is the expectation of exp(q . k) over Gaussian queries at one future position."""
    generator = torch.Generator().manual_seed(0)
    dim, count = 8, 200_000
    mean = torch.randn(dim, generator=generator) * 0.5
    root = torch.randn(dim, dim, generator=generator) * 0.3
    keys = torch.randn(5, dim, generator=generator)
    queries = mean + torch.randn(count, dim, generator=generator) @ root.T
    sampled = torch.exp(queries @ keys.T / dim**0.5)
    z = keys @ mean / dim**0.5 + ((keys @ (root @ root.T)) * keys).sum(-1) / (2 * dim)
    error = 4 * sampled.std(dim=0) / count**0.5
    assert ((sampled.mean(dim=0) - z.exp()).abs() < error).all()


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_oss", "glm4", "cohere", "qwen3"])
def test_turning_queries_back_inverts_the_models_rotation(family: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def look(call: LayerCall) -> None:
        back = call.unrotated(call.queries)
        seen.append((call.queries, call.rotate(back, *call.kwargs["position_embeddings"]), back))

    with Watching(look)(model):
        model(tokens(1, 20), use_cache=True)
    for rotated, again, _ in seen:
        torch.testing.assert_close(again, rotated, atol=1e-4, rtol=1e-4)
    assert any(not torch.allclose(rotated, back, atol=1e-2) for rotated, _, back in seen)


@pytest.mark.parametrize("padded", [False, True])
def test_streaming_llm_keeps_sinks_and_the_newest(padded: bool) -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([40, 24]) if padded else (tokens(2, 40), None)
    cache = prefill(model, kvpress.StreamingLLMPress(0.5, n_sink=3), ids, mask)
    for row, length in enumerate([40, 24] if padded else [40, 40]):
        pads, kept = 40 - length, length // 2
        expected = [*range(pads, pads + 3), *range(40 - kept + 3, 40)]
        assert kvpress.kept_positions(cache)[0][row][0].tolist() == expected


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3", "cohere"])
def test_reindexed_positions_equal_a_cache_numbered_from_zero(family: str, rounds: int) -> None:
    """Kept keys, turned from scratch to positions 0, 1, ..., with the next query right behind them."""
    model = tiny_model(family)
    ids, new = tokens(1, 40), tokens(1, 1, seed=4)
    press = kvpress.StreamingLLMPress(budget=15, n_sink=3, reindex=True)
    cache = DynamicCache(config=model.config)
    with press(model):
        for chunk in ids.split(40 // rounds, dim=1):
            model(chunk, past_key_values=cache)
        kept = kvpress.kept_positions(cache)[0][0][0]
        stored = copy.deepcopy(cache)
        logits = model(new, past_key_values=cache).logits
    rotate = sys.modules[type(model.model.layers[0].self_attn).__module__].apply_rotary_pos_emb
    compact = DynamicCache(config=model.config)
    for index, layer in enumerate(stored.layers):
        # Positions that the kept keys are turned to now, from the true ones and the recorded shift.
        at = kept[None] + layer.store.dense.side["shift"].view(1, 2, -1)[:, 0].long()
        back, forth = model.model.rotary_emb(layer.keys, at), model.model.rotary_emb(layer.keys, torch.arange(15)[None])
        keys = rotate(layer.keys, layer.keys, back[0], -back[1])[0]
        compact.update(rotate(keys, keys, *forth)[0], layer.values, index)
    assert at[0].tolist() == list(range(25, 40))
    expected = model(new, past_key_values=compact, position_ids=torch.tensor([[15]])).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_pyramid_budgets_fall_and_keep_their_mean(family: str) -> None:
    """Budgets are those of NVIDIA kvpress, counted over the layers that grow."""
    model = tiny_model(family)
    cache = prefill(model, kvpress.PyramidKVPress(0.5, window_size=4, beta=5), tokens(1, 120))
    sizes = [len(kvpress.kept_positions(cache)[layer][0][0]) for layer in full_layers(model)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    assert abs(sum(sizes) - len(sizes) * 60) <= 1
    assert (sizes[0], sizes[-1]) == (108, 12)


@pytest.mark.parametrize(
    ("tokens", "ratio", "window", "first", "last"),
    [
        (4096, 0.5, 64, 3994, 102),  # 2048 on average: 2 m - m / 20, and m / 20
        (4096, 0.4, 64, 4032, 883),  # the first layer leaves out the window, 2457.6 on average
        (8192, 0.75, 64, 3994, 102),
        (1000, 0.75, 64, 250, 250),  # the last layer would keep 12, less than the window
        (1000, 0.5, 8, 975, 25),
        (7, 0.9, 2, 1, 1),
    ],
)
def test_pyramid_budgets_are_those_of_the_peer(tokens: int, ratio: float, window: int, first: int, last: int) -> None:
    config = SimpleNamespace(num_hidden_layers=32)
    press = kvpress.PyramidKVPress(ratio, window_size=window)
    layers: list[Any] = [SimpleNamespace(config=config, layer_idx=layer) for layer in range(32)]
    budgets = [press.get_layer_budget(layer, tokens) for layer in layers]
    assert (budgets[0], budgets[-1]) == (first, last)
    assert budgets == sorted(budgets, reverse=True)
    assert abs(sum(budgets) / 32 - tokens * (1 - ratio)) < 0.5


def test_a_pyramid_without_a_slope_is_announced() -> None:
    model, ids = tiny_model("llama"), tokens(1, 120)
    with pytest.warns(RuntimeWarning, match="beta=20 the last layer would keep fewer than its window of 8"):
        flat = prefill(model, kvpress.PyramidKVPress(0.75, window_size=8), ids)
    same = prefill(model, kvpress.SnapKVPress(0.75, window_size=8), ids)
    for layers in zip(kvpress.kept_positions(flat), kvpress.kept_positions(same), strict=True):
        assert all(map(torch.equal, *(layer[0] for layer in layers)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec in ("pyramidkv:0.75,window_size=8,beta=3", "pyramidkv:0.01,window_size=8", "pyramidkv:budget=200"):
            prefill(model, kvpress.get_press(spec), ids)


def test_adakv_spends_the_budget_exactly_and_guards_every_head() -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([60, 41])
    cache = prefill(model, kvpress.AdaKVPress(kvpress.SnapKVPress(0.5, window_size=4), alpha_safeguard=0.3), ids, mask)
    differ = False
    for layer in kvpress.kept_positions(cache):
        for row, length in zip(layer, (60, 41), strict=True):
            budget = int(length * 0.5)
            sizes = [len(head) for head in row]
            assert sum(sizes) == 2 * budget
            assert min(sizes) >= int(budget * 0.3)
            differ |= sizes[0] != sizes[1]
    assert differ


@pytest.mark.parametrize("safeguard", [0.0, 0.2])
@pytest.mark.parametrize(
    "inner",
    ["adakv({}):alpha_safeguard={}", "critical_adakv({}):alpha_safeguard={}", "adakv(pyramidkv:0.75,window_size=20)"],
)
def test_heads_share_a_budget_below_the_window_evenly(inner: str, safeguard: float) -> None:
    press = kvpress.get_press(inner.format("snapkv:0.75,window_size=20", safeguard))
    ids, mask = padded_batch([60, 41])
    for layer in kvpress.kept_positions(prefill(tiny_model("llama"), press, ids, mask)):
        for row, budget in zip(layer, (15, 10), strict=True):
            assert [head.tolist() for head in row] == [list(range(60 - budget, 60))] * 2
