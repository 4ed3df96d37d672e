# SPDX-License-Identifier: Apache-2.0
"""Keys in fewer channels: which ones, and that attention is that over keys with the others at zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.quant.key_channels import ThinnedSegment
from tests.models import full_layers, padded_batch, position_ids, tiny_model, tokens
from tests.probes import Watching

LENGTH, WINDOW = 44, 6


def chosen(model: Any, ids: Tensor, ratio: float) -> dict[int, Tensor]:
    """Channels of each layer that stay, `[H, C]`, for the prompt of one row."""
    queries: dict[int, Tensor] = {}
    with torch.no_grad(), Watching(lambda call: queries.setdefault(call.layer.index, call.queries))(model):
        stock = model(ids, use_cache=True).past_key_values
    channels = {}
    for layer in full_layers(model):
        keys = stock.layers[layer].keys[0, :, :-WINDOW]
        query_energy = queries[layer][0, :, -WINDOW:].square().mean(dim=1).unflatten(0, (len(keys), -1)).mean(dim=1)
        scores = query_energy * keys.square().mean(dim=1)
        count = keys.shape[2] - int(keys.shape[2] * ratio)
        channels[layer] = scores.topk(count, dim=1).indices.sort(dim=1).values
    return channels


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
def test_channels_are_those_that_the_newest_queries_weigh_least(family: str, chunk: int | None) -> None:
    model, (ids, mask) = tiny_model(family), padded_batch([LENGTH, 27])
    with kvpress.ThinKPress(0.4, WINDOW)(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=1, prefill_chunk_size=chunk)
    for row, length in enumerate((LENGTH, 27)):
        alone = chosen(model, ids[row : row + 1, -length:], 0.4)
        for layer, expected in alone.items():
            store = session.cache.layers[layer].store
            (segment,) = store.segments
            assert isinstance(segment, ThinnedSegment)
            heads = slice(row * store.heads, (row + 1) * store.heads)
            assert torch.equal(segment.channels[heads].long(), expected)
            assert segment.layout.lengths[heads] == (length - WINDOW,) * store.heads
            assert segment.keys.shape[1] == expected.shape[1] < segment.dim


@pytest.mark.parametrize("operators", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_attention_is_that_over_keys_with_channels_at_zero(family: str, operators: bool, monkeypatch: Any) -> None:
    if not operators:
        monkeypatch.setattr("kvpress.kernels.serves", lambda *operands: False)
    model, ids = tiny_model(family, "eager"), tokens(1, LENGTH)
    press, new = kvpress.ThinKPress(0.5, WINDOW), tokens(1, 4, seed=3)
    cache, stock = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
        step_logits = [model(new[:, i : i + 1], past_key_values=cache).logits for i in range(4)]
    model(ids, past_key_values=stock)
    for layer, channels in chosen(model, ids, 0.5).items():
        keys = stock.layers[layer].keys
        stays = torch.zeros(keys.shape[1], keys.shape[3]).scatter_(1, channels, 1.0)
        keys[:, :, :-WINDOW] *= stays[:, None]
    for i, logits in enumerate(step_logits):
        expected = model(new[:, i : i + 1], past_key_values=stock).logits
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_generated_tokens_are_stored_in_the_same_channels() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([LENGTH, 27])
    with kvpress.ThinKPress(0.5, WINDOW)(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    store = session.cache.layers[0].store
    thin = [segment for segment in store.segments if isinstance(segment, ThinnedSegment)]
    assert sum(segment.layout.total for segment in thin) > 2 * (LENGTH + 27) + 4 * 12
    assert all(torch.equal(segment.channels, thin[0].channels) for segment in thin)
    report = kvpress.memory_report(session.cache)
    assert report.total_bytes < 0.9 * report.uncompressed_bytes


def test_a_prompt_shorter_than_the_window_chooses_by_generated_queries_too() -> None:
    model = tiny_model("llama")
    with kvpress.ThinKPress(0.5, 8)(model) as session:
        model.generate(tokens(2, 3), max_new_tokens=20, do_sample=False)
    (segment, *_) = session.cache.layers[0].store.segments
    assert isinstance(segment, ThinnedSegment)


@pytest.mark.parametrize("spec", ["snapkv:0.5,window_size=4", "adakv(knorm:0.5)", "h2o:0.5,interval=4"])
@pytest.mark.parametrize("selector", ["", " + quest:budget=16,page_size=4,skip_layers=0"])
def test_rows_of_a_batch_are_as_alone_with_evictions_and_selectors(spec: str, selector: str) -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([LENGTH, 27])
    press = kvpress.get_press(f"{spec} + think:0.5,window_size=4{selector}")
    new = tokens(2, 6, seed=5)

    def read(rows: Tensor, row_mask: Tensor | None, following: Tensor) -> Tensor:
        cache, logits = DynamicCache(config=model.config), []
        with press(model):
            model(rows, attention_mask=row_mask, position_ids=position_ids(row_mask), past_key_values=cache)
            for i in range(6):
                row_mask = (
                    None if row_mask is None else torch.cat([row_mask, row_mask.new_ones(len(row_mask), 1)], dim=1)
                )
                at = position_ids(row_mask, 1)
                step = model(following[:, i : i + 1], attention_mask=row_mask, position_ids=at, past_key_values=cache)
                logits.append(step.logits)
        return torch.cat(logits, dim=1)

    together = read(ids, mask, new)
    alone = read(ids[1:, -27:], None, new[1:])
    torch.testing.assert_close(together[1:], alone, atol=1e-4, rtol=1e-4)


def test_settings() -> None:
    press: Any = kvpress.ThinKPress(0.5)
    assert press.compression_ratio == 0.25
    press.key_channel_compression_ratio = 0.0
    assert press.recipe().is_identity
    with pytest.raises(AttributeError, match="it follows from key_channel_compression_ratio"):
        press.compression_ratio = 0.5
    with pytest.raises(ValueError, match=r"key_channel_compression_ratio must be in \[0, 1\), got 1"):
        kvpress.ThinKPress(1.0)
