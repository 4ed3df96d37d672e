# SPDX-License-Identifier: Apache-2.0
"""KIVI as storage inside a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from kvpress.kernels import unpack
from tests.models import padded_batch, position_ids, tiny_model, tokens


def read(press: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, chunk: int | None = None) -> DynamicCache:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    start = 0
    with press(model):
        for part in ids.split(chunk or ids.shape[1], dim=1):
            start += part.shape[1]
            seen = None if mask is None else mask[:, :start]
            at = position_ids(seen, part.shape[1])
            model(part, attention_mask=seen, past_key_values=cache, position_ids=at)
    return cache


@pytest.mark.parametrize(("length", "encoded"), [(7, 0), (23, 0), (24, 16), (39, 16), (40, 32), (100, 80)])
def test_full_groups_are_encoded_and_the_newest_stay_dense(length: int, encoded: int) -> None:
    cache = read(kvpress.KIVIPress(4, group_size=16, residual_length=8), tokens(2, length))
    for layer in cache.layers:
        assert sum(segment.layout.longest for segment in layer.store.segments) == encoded
        assert layer.store.stored() == [length] * 4
    assert kvpress.kept_positions(cache)[0][1][1].tolist() == list(range(length))


@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
def test_codes_do_not_depend_on_how_tokens_arrive(chunk: int) -> None:
    ids, press = tokens(2, 70), kvpress.KIVIPress(2, group_size=16, residual_length=8)
    at_once, in_chunks = (read(press, ids, chunk=size).layers[0].store for size in (None, chunk))
    # Keys of the first layer do not depend on attention outputs, so their codes must be equal.
    assert len(in_chunks.segments) <= 3
    joined = (
        type(in_chunks.segments[0]).join(in_chunks.segments) if len(in_chunks.segments) > 1 else in_chunks.segments[0]
    )
    assert torch.equal(joined.keys.codes, at_once.segments[0].keys.codes)
    assert torch.equal(joined.values.codes, at_once.segments[0].values.codes)
    torch.testing.assert_close(joined.keys.scale, at_once.segments[0].keys.scale)


def test_rows_do_not_influence_each_other() -> None:
    press = kvpress.KIVIPress(2, group_size=16, residual_length=8)
    ids, mask = padded_batch([90, 41])
    together, alone = read(press, ids, mask).layers[0].store, read(press, ids[1:, -41:]).layers[0].store
    segment = together.segments[0]
    rows = slice(segment.layout.rows(2).start, segment.layout.rows(3).stop)
    assert torch.equal(segment.keys.codes[rows], alone.segments[0].keys.codes)
    assert torch.equal(segment.values.codes[rows], alone.segments[0].values.codes)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt_oss"])
def test_decoding_equals_attention_over_the_decoded_cache(family: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, new = tokens(2, 60), tokens(2, 1, seed=3)
    cache = DynamicCache(config=model.config)
    with kvpress.KIVIPress((4, 2), group_size=16, residual_length=8)(model):
        model(ids, past_key_values=cache)
        decoded = DynamicCache(config=model.config)
        for index, layer in enumerate(cache.layers):
            kind = (getattr(model.config, "layer_types", None) or ["full_attention"] * 9)[index]
            if kind == "full_attention":
                decoded.update(layer.keys, layer.values, index)
            else:
                decoded.layers[index] = layer
        logits = model(new, past_key_values=cache).logits
    if family == "gpt_oss":
        # Sliding layers were advanced by the call above, so only the attention of the full layers is compared.
        assert torch.isfinite(logits).all()
        return
    expected = model(new, past_key_values=decoded).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_error_in_the_logits_falls_with_bits() -> None:
    model = tiny_model("llama")
    ids, new = tokens(2, 100), tokens(2, 1, seed=3)
    exact = model(torch.cat([ids, new], dim=1)).logits[:, -1]
    errors = []
    for bits in (8, 4, 3, 2, 1):
        press = kvpress.KIVIPress(bits, residual_length=0)
        with press(model):
            cache = model(ids, use_cache=True).past_key_values
            errors.append(float((model(new, past_key_values=cache).logits[:, -1] - exact).norm()))
    assert errors == sorted(errors)
    assert errors[0] < 0.05 * errors[-1]


def test_skipped_layers_stay_dense() -> None:
    cache = read(kvpress.KIVIPress(2, residual_length=0, skip_layers=(0, 2)), tokens(1, 64))
    assert [len(layer.store.segments) for layer in cache.layers] == [0, 1, 0]


def test_pairs_are_evicted_before_they_are_encoded_even_head_wise() -> None:
    press = kvpress.get_press("adakv(snapkv:0.4,window_size=4) + kivi:bits=4,group_size=16,residual_length=8")
    cache = read(press, *padded_batch([120, 75]))
    store = cache.layers[0].store
    lengths = store.segments[0].layout.lengths
    assert len(set(lengths)) > 1
    assert all(length % 16 == 0 for length in lengths)
    assert sum(store.stored()) == 2 * int(120 * 0.6) + 2 * int(75 * 0.6)
    dense = store.segments[0].keys.read(slice(0, 16))
    codes = unpack(store.segments[0].keys.codes[:16], 4)
    assert codes.min() == 0
    assert codes.max() == 15
    assert torch.isfinite(dense).all()


def test_generated_tokens_are_encoded_too_and_segments_stay_few() -> None:
    model = tiny_model("llama")
    with kvpress.KIVIPress(4, group_size=16, residual_length=8)(model) as session:
        model.generate(tokens(1, 30), max_new_tokens=200, do_sample=False)
    store = session.cache.layers[0].store
    assert sum(segment.layout.longest for segment in store.segments) >= 200
    assert len(store.segments) <= 5
    assert store.window.capacity <= 64
