# SPDX-License-Identifier: Apache-2.0
"""Expected attention: whose queries it counts, where it expects them, and statistics from a file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import ExpectedAttentionPress, ExpectedAttentionStatsPress
from kvpress.calibrate import QuerySettings, calibrate
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import QueryStats
from kvpress.testing.oracle import decode_both
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.projections import HEADS, KV_HEADS, projected

SINKS = 4


def moments(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of queries `[Hq, n, D]`, in float64."""
    queries = queries.double()
    centred = queries - queries.mean(dim=1, keepdim=True)
    return queries.mean(dim=1), centred.transpose(1, 2) @ centred / queries.shape[1]


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text"])
def test_running_statistics_are_those_of_all_queries(
    family: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of three queries (six where the head dim is 16), so that every pass is really cut.
    monkeypatch.setattr("kvpress.cache.attention.BLOCK_BYTES", 4 * 3 * 2 * HEADS * 32)
    model, sizes, unrotated = tiny_model(family), set(), LayerCall.unrotated
    monkeypatch.setattr(LayerCall, "unrotated", lambda call, q: sizes.add(q.shape[2]) or unrotated(call, q))
    ids, mask = padded_batch([40, 23])
    press = kvpress.DecodingPress(ExpectedAttentionPress(n_sink=SINKS), compression_interval=1000)
    with press(model) as session:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, prefill_chunk_size=chunk)
    assert max(sizes) <= 6
    for row, length in enumerate((40, 23)):
        sequence = out[row : row + 1, 40 - length : -1]
        for layer in full_layers(model):
            observer = session.cache.layers[layer].store.observers[Wanted(QueryStats, SINKS)]
            mean, covariance = moments(projected(model, sequence, layer)["q"][0, :, SINKS:])
            recorded = observer.moments([row])
            torch.testing.assert_close(recorded[0][0], mean.float(), atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(recorded[1][0], covariance.float(), atol=1e-3, rtol=1e-3)


def test_a_large_mean_does_not_drown_the_covariance() -> None:
    model = copy.deepcopy(tiny_model("qwen2"))
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias.data.mul_(1000.0)
    ids = tokens(1, 60)
    press = kvpress.DecodingPress(ExpectedAttentionPress(n_sink=0), compression_interval=1000)
    with press(model) as session:
        out = model.generate(ids, max_new_tokens=20, do_sample=False)
    queries = projected(model, out[:, :-1], 0)["q"][0]
    expected = moments(queries)[1].float()
    assert queries.abs().mean() > 100 * expected.abs().mean().sqrt()
    torch.testing.assert_close(
        session.cache.layers[0].store.observers[Wanted(QueryStats, 0)].moments([0])[1][0],
        expected,
        atol=1e-3,
        rtol=1e-3,
    )


def rotations(model: Any, positions: Tensor, dim: int) -> Tensor:
    """Rotation matrices `[n, D, D]` of the llama layout, from the angles alone."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    angles = positions[:, None].double() * frequencies
    cos, sin = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    return torch.cat([torch.cat([cos, -sin], dim=-1), torch.cat([sin, cos], dim=-1)], dim=-2)


@pytest.mark.parametrize("padded", [False, True])
def test_futures_start_at_the_true_next_position_after_evictions(padded: bool) -> None:
    """Replay layer 0 by brute force: its queries and keys do not depend on earlier evictions."""
    model, target, interval, future, start = tiny_model("llama"), 14, 3, 8, 30
    lengths = (start, 21) if padded else (start,)
    ids, mask = padded_batch(list(lengths))
    press = kvpress.DecodingPress(
        ExpectedAttentionPress(n_future_positions=future, n_sink=2, epsilon=0.01), interval, target
    )
    with press(model) as session:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False)
    module = model.model.layers[0].self_attn
    dim = module.head_dim
    for row, length in enumerate(lengths):
        pads = start - length
        sequence = out[row : row + 1, pads:-1]
        seen = projected(model, sequence, 0)
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(sequence))
        norms = module.v_proj(hidden).view(-1, KV_HEADS, dim).double().norm(dim=-1)
        alive = [list(range(length)) for _ in range(KV_HEADS)]
        for read in range(length + 1, sequence.shape[1] + 1):
            alive = [[*head, read - 1] for head in alive]
            if (read - length) % interval:
                continue
            mean, covariance = moments(seen["q"][0, :, 2:read])
            turn = rotations(model, torch.arange(read, read + future), dim).mean(dim=0)
            for head, at in enumerate(alive):
                keys = seen["turned_k"][0, head, at].double()
                weights = torch.zeros(len(at), dtype=torch.float64)
                for q in (2 * head, 2 * head + 1):
                    spread = turn @ covariance[q] @ turn.T
                    z = keys @ turn @ mean[q] / dim**0.5 + torch.einsum("nd,de,ne->n", keys, spread, keys) / (2 * dim)
                    weights[2:] += torch.softmax(z[2:], dim=0) / 2
                scores = (weights + 0.01) * norms[at, head]
                scores[:2] = torch.inf
                alive[head] = sorted(at[i] for i in scores.topk(target).indices)
        kept_heads = kvpress.kept_positions(session.cache)[0][row]
        assert [(head - pads).tolist() for head in kept_heads] == alive


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Query statistics of the tiny models on the very prompt of the tests."""
    folder = tmp_path_factory.mktemp("statistics")
    files = {}
    for family in ("llama", "qwen3", "phi3", "gemma3_text"):
        files[family] = folder / family / "expected-attention.safetensors"
        files[family].parent.mkdir()
        calibrate(tiny_model(family), tokens(1, 48), QuerySettings(SINKS), files[family])
    return files


def kept(model: Any, press: Any, ids: Tensor, mask: Tensor | None = None, chunk: int | None = None) -> Any:
    with press(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=1, prefill_chunk_size=chunk)
    return kvpress.kept_positions(session.cache)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text"])
def test_statistics_of_the_prompt_from_a_file_keep_the_same_pairs(family: str, statistics: dict[str, Path]) -> None:
    model, ids = tiny_model(family), tokens(1, 48)
    press = ExpectedAttentionStatsPress(0.5, n_future_positions=16, stats_folder=str(statistics[family]))
    expected = kept(model, ExpectedAttentionPress(0.5, n_future_positions=16), ids)
    for chunk in (None, 7):
        actual = kept(model, press, ids, chunk=chunk)
        for layer in full_layers(model):
            for head in range(KV_HEADS):
                assert torch.equal(actual[layer][0][head], expected[layer][0][head])


def test_a_cache_cut_by_statistics_from_a_file_is_the_full_one_masked(statistics: dict[str, Path]) -> None:
    press = ExpectedAttentionStatsPress(0.5, stats_folder=str(statistics["gemma3_text"].parent))
    ids, mask = padded_batch([40, 26, 13])
    actual, expected, cache = decode_both(tiny_model("gemma3_text"), press, ids, mask)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
    assert all(not layer.store.observers for layer in cache.layers[1:])
    for row, length in enumerate([40, 26, 13]):
        alone = kept(tiny_model("gemma3_text"), press, ids[row : row + 1, -length:])
        for layer in (1, 2):
            for head, alone_head in enumerate(alone[layer][0]):
                together = kvpress.kept_positions(cache)[layer][row][head]
                assert torch.equal(together[together < 40] - (40 - length), alone_head)


def test_statistics_from_a_file_serve_decoding_and_budgets_per_head(statistics: dict[str, Path]) -> None:
    model, ids = tiny_model("llama"), tokens(2, 48)
    inner = ExpectedAttentionStatsPress(0.5, stats_folder=str(statistics["llama"]))
    with kvpress.DecodingPress(inner, compression_interval=4, target_size=20)(model) as session:
        model.generate(ids, max_new_tokens=9, do_sample=False)
    assert {len(head) for layer in kvpress.kept_positions(session.cache) for row in layer for head in row} == {20}
    sizes = [len(head) for head in kept(model, kvpress.AdaKVPress(inner), ids)[0][0]]
    assert sum(sizes) == 48


def test_the_reference_model_has_statistics_and_other_models_need_a_file(tmp_path: Path) -> None:
    model, tokenizer = kvpress.load_model("reference")
    press = ExpectedAttentionStatsPress(0.5)
    prompt = tokenizer(" The code for tiger is 4837. The old river runs." * 10, return_tensors="pt")
    cache = DynamicCache(config=model.config)
    with press(model):
        model(**prompt, past_key_values=cache)
    assert kvpress.memory_report(cache).kept < kvpress.memory_report(cache).seen
    refused = {
        "published as .*calibrate expected_attention.* was not loaded from a path": press,
        "kvpress calibrate": ExpectedAttentionStatsPress(0.5, stats_folder=str(tmp_path)),
    }
    for message, refused_press in refused.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message), refused_press(tiny_model("llama")):
            pass


@pytest.mark.parametrize(
    ("settings", "option"),
    [({"sample_seq_len": 500}, "--tokens"), ({"num_samples": 10}, "--sequences"), ({"dataset_name": "x"}, "--data")],
)
def test_sampling_names_published_statistics_and_no_file(settings: dict[str, Any], option: str) -> None:
    assert ExpectedAttentionStatsPress(0.5, **settings)
    with pytest.raises(ValueError, match=f"kvpress calibrate expected_attention .* with {option}"):
        ExpectedAttentionStatsPress(0.5, **settings, stats_folder="stats.safetensors")
