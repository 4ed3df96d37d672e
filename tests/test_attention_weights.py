# SPDX-License-Identifier: Apache-2.0
"""Attention weights inside a press: those of the prompt, and those of later tokens to stored pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from tests.caches import positions
from tests.models import full_layers, padded_batch, position_ids, tiny_model, tokens

SETTINGS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize(
    "spec", ["snapkv:0.5,window_size=4", "adakv(knorm:0.5) + kivi:bits=4 + quest:budget=8,page_size=4"]
)
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_weights_of_a_prompt_equal_the_models(spec: str, family: str, padded: bool) -> None:
    model = tiny_model(family, "eager")
    ids, mask = padded_batch([20, 13]) if padded else (tokens(2, 20), torch.ones(2, 20, dtype=torch.long))
    settings = {"attention_mask": mask, "position_ids": position_ids(mask), "output_attentions": True}
    expected = model(ids, past_key_values=DynamicCache(config=model.config), **settings).attentions
    with kvpress.get_press(spec)(model):
        weights = model(ids, past_key_values=DynamicCache(config=model.config), **settings).attentions
    for layer, reference in zip(weights, expected, strict=True):
        torch.testing.assert_close(layer * mask[:, None, :, None], reference * mask[:, None, :, None])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("spec", ["none", "snapkv:0.5,window_size=4", "pyramidkv:0.5,window_size=4,beta=3"])
def test_weights_of_later_tokens_cover_stored_pairs(spec: str, family: str) -> None:
    """They are the softmax over the stored pairs of the full model's logits; asking for them changes nothing else."""
    model, ids, press = tiny_model(family, "eager"), tokens(2, 20), kvpress.get_press(spec)
    with press(model):
        expected = model.generate(ids, **SETTINGS)
        output = model.generate(ids, **SETTINGS, output_attentions=True)
    assert torch.equal(output.sequences, expected.sequences)
    assert len(output.attentions) == 5
    first = full_layers(model)[0]  # its queries and keys do not depend on evicted pairs
    kept, newest = positions(output.past_key_values)[first], output.attentions[-1][first]
    full = model(output.sequences[:, :-1], output_attentions=True).attentions[first][:, :, -1:]
    assert newest.shape[-1] == len(kept[0][0])
    for row in range(2):
        for head in range(newest.shape[1]):
            at = kept[row][head // 2]
            reference = full[row, head, 0, at]
            found_here = newest[row, head, 0]
            torch.testing.assert_close(found_here / found_here.sum(), reference / reference.sum(), atol=1e-5, rtol=1e-4)


def test_weights_of_several_later_tokens_are_causal() -> None:
    model, ids = tiny_model("llama", "eager"), tokens(1, 20)
    cache = DynamicCache(config=model.config)
    with kvpress.KnormPress(0.5)(model):
        model(ids, past_key_values=cache)
    with kvpress.reading(model, kvpress.KnormPress(0.5)):
        weights = model(tokens(1, 3), past_key_values=cache, output_attentions=True).attentions
    for layer in weights:
        assert layer.shape == (1, 4, 3, 13)
        assert bool((layer[0, :, 0, 11:] == 0).all())
        assert bool((layer[0, :, 1, 12:] == 0).all())
        torch.testing.assert_close(layer.sum(dim=-1), torch.ones(1, 4, 3))
