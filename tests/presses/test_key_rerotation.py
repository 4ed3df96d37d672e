# SPDX-License-Identifier: Apache-2.0
"""Re-rotated keys against keys turned from scratch to the positions of a cache without gaps."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.core.recipe import Recipe, Rewritten
from tests.caches import prefill
from tests.models import padded_batch, position_ids, tiny_model, tokens

HEAD_WISE = "key_rerotation(adakv(snapkv:0.5,window_size=4))"


def turned(model: Any, keys: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Keys `[n, D]` at positions `before [n]`, turned to `after` by the model's own functions."""
    rotate = sys.modules[type(model.model.layers[0].self_attn).__module__].apply_rotary_pos_emb
    keys = keys[None, None]
    for sign, at in ((-1, before), (1, after)):
        cos, sin = model.model.rotary_emb(keys, at[None])
        keys = rotate(keys, keys, cos, sign * sin)[0]
    return keys[0, 0]


def assert_without_gaps(model: Any, cache: Any, stock: Any, lengths: list[int]) -> None:
    for layer, (ours, theirs) in enumerate(zip(cache.layers, stock.layers, strict=True)):
        for n in range(2 * len(lengths)):
            row, head = divmod(n, 2)
            columns = kvpress.kept_positions(cache)[layer][row][head]
            pads = theirs.keys.shape[2] - lengths[row]
            target = torch.arange(lengths[row] - len(columns), lengths[row])
            expected = turned(model, theirs.keys[row, head, columns], columns - pads, target)
            part = ours.store.dense.layout.rows(n)
            torch.testing.assert_close(ours.store.dense.keys[part], expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.store.dense.values[part], theirs.values[row, head, columns])


@pytest.mark.parametrize("inner", ["adakv(snapkv:0.5,window_size=4)", "pyramidkv:0.5,window_size=4", "h2o:0.5"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "cohere"])
def test_every_head_is_numbered_without_gaps(family: str, inner: str) -> None:
    model = tiny_model(family)
    ids, mask = padded_batch([40, 26])
    at = position_ids(mask)
    caches = [DynamicCache(config=model.config) for _ in range(3)]
    for cache, spec in zip(caches, (f"key_rerotation({inner})", inner, "none"), strict=True):
        with kvpress.get_press(spec)(model):
            model(ids, attention_mask=mask, position_ids=at, past_key_values=cache)
    ours, plain, stock = caches
    for a, b in zip(kvpress.kept_positions(ours), kvpress.kept_positions(plain), strict=True):
        assert all(torch.equal(x, y) for c, d in zip(a, b, strict=True) for x, y in zip(c, d, strict=True))
    assert_without_gaps(model, ours, stock, [40, 26])


def test_several_rounds_add_up() -> None:
    """The first layer's keys depend on nothing that was evicted, so they can be compared after any number of rounds."""
    model, ids = tiny_model("llama"), tokens(1, 45)
    cache = DynamicCache(config=model.config)
    with kvpress.get_press(HEAD_WISE)(model):
        for part in ids.split(15, dim=1):
            model(part, past_key_values=cache)
    stock = model(ids, use_cache=True).past_key_values
    cache.layers, stock.layers = cache.layers[:1], stock.layers[:1]
    assert len(set(cache.layers[0].store.stored())) > 1
    assert_without_gaps(model, cache, stock, [45])


def test_it_equals_reindex_of_streaming_llm() -> None:
    model, ids, new = tiny_model("llama"), tokens(2, 40), tokens(2, 3, seed=1)
    logits = []
    for spec in ("key_rerotation(streaming_llm:0.5)", "streaming_llm:0.5,reindex=true", "streaming_llm:0.5"):
        press = kvpress.get_press(spec)
        cache = prefill(model, press, ids)
        with kvpress.reading(model, press):
            logits.append(model(new, past_key_values=cache).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=1e-2)


def test_layers_without_rotary_embedding_are_left_alone() -> None:
    model, ids = tiny_model("smollm3"), tokens(1, 40)
    cache = prefill(model, kvpress.get_press("key_rerotation(knorm:0.5)"), ids)
    plain = prefill(model, kvpress.get_press("knorm:0.5"), ids)
    same = [torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, plain.layers, strict=True)]
    assert same == [False, True, False]


def test_generated_tokens_are_renumbered_too() -> None:
    model, ids = tiny_model("llama"), tokens(1, 20)
    press = kvpress.DecodingPress(
        kvpress.KeyRerotationPress(kvpress.KnormPress()), compression_interval=4, target_size=12
    )
    with press(model) as session:
        out = model.generate(ids, max_new_tokens=5, do_sample=False)
    stock = model(out[:, :-1], use_cache=True).past_key_values
    session.cache.layers, stock.layers = session.cache.layers[:1], stock.layers[:1]
    assert_without_gaps(model, session.cache, stock, [24])


def test_encoded_keys_cannot_be_turned() -> None:
    press = kvpress.get_press("kivi:bits=4,group_size=4,residual_length=4 + key_rerotation(knorm:0.5)")
    model, cache = tiny_model("llama"), DynamicCache()
    with press(model):
        model(tokens(1, 40), past_key_values=cache)
        with pytest.raises(ValueError, match="needs dense storage: use it without a codec"):
            model(tokens(1, 4), past_key_values=cache)


def test_rewrites_of_the_inner_press_stay() -> None:
    """Values are made half as long while keys move: neither is lost."""

    class Halved(kvpress.KnormPress):
        def recipe(self, model: Any = None) -> Recipe:
            (step,) = super().recipe(model).evictions
            return Recipe((step.rewriting(lambda view, mask: Rewritten(values=view.values / 2)),))

    model, ids = tiny_model("llama"), tokens(1, 30)
    plain, halved = (
        prefill(model, kvpress.KeyRerotationPress(press), ids) for press in (kvpress.KnormPress(0.5), Halved(0.5))
    )
    plain_dense, halved_dense = plain.layers[0].store.dense, halved.layers[0].store.dense
    assert torch.equal(halved_dense.keys, plain_dense.keys)
    assert torch.equal(halved_dense.side["shift"], plain_dense.side["shift"])
    assert torch.equal(halved_dense.values, plain_dense.values / 2)
