# SPDX-License-Identifier: Apache-2.0
"""A cache that was compressed in a session and is read by the model alone, as users of NVIDIA kvpress do."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from tests.caches import STORAGES, generate, pairs, positions, prefill
from tests.models import COMMON, padded_batch, tiny_model, tokens

DENSE = [
    "knorm:0.5",
    "snapkv:0.6,window_size=4",
    "key_rerotation(knorm:0.5)",
    "streaming_llm:0.5,reindex=true",
    "prefill_decoding(knorm:0.5; decoding(knorm):target_size=8,compression_interval=2)",
]
UNREADABLE = {
    "ragged": (STORAGES["ragged"], "heads or rows hold different numbers"),
    "codec": (STORAGES["kivi"], "encoded"),
    "selector": (STORAGES["quest"], "chosen from by a selector"),
    "pyramid": ("pyramidkv:0.5,window_size=4", "layers hold different numbers"),
}


def model_of(family: str, implementation: str = "sdpa") -> Any:
    if family != "mistral":
        return tiny_model(family, implementation)
    config = CONFIG_MAPPING["mistral"](**COMMON, sliding_window=None)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize(
    ("family", "implementation"),
    [*product(["llama", "qwen3", "phi3", "mistral", "qwen3_next"], ["sdpa", "eager"]), ("gpt_oss", "eager")],
)
def test_turns_without_a_press_are_those_of_reading(family: str, implementation: str) -> None:
    model = model_of(family, implementation)
    alone = prefill(model, kvpress.KnormPress(0.5), tokens(2, 24))
    inside = copy.deepcopy(alone)
    for turn, length in enumerate((5, 1, 1, 7, 1)):
        new = tokens(2, length, seed=turn)
        logits = model(new, past_key_values=alone).logits
        with kvpress.reading(model):
            expected = model(new, past_key_values=inside).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert alone.get_seq_length() == inside.get_seq_length() == 24 + 15
    assert positions(alone) == positions(inside)


@pytest.mark.parametrize("spec", DENSE)
def test_every_dense_storage(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    alone = prefill(model, press, tokens(2, 30))
    inside = copy.deepcopy(alone)
    for new in (tokens(2, 4), tokens(2, 1, seed=3)):
        logits = model(new, past_key_values=alone).logits
        with kvpress.reading(model):
            torch.testing.assert_close(logits, model(new, past_key_values=inside).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["all ids", "new ids and a mask", "position_ids"])
def test_generate_without_a_press(form: str) -> None:
    model = tiny_model("qwen3")
    context, question = tokens(2, 30), tokens(2, 4, seed=5)
    alone = prefill(model, kvpress.KnormPress(0.5), context)
    inside = copy.deepcopy(alone)
    all_ids = torch.cat([context, question], dim=1)
    with kvpress.reading(model):
        expected = generate(model, all_ids, past_key_values=inside).sequences[:, -8:]
    if form == "all ids":
        output = generate(model, all_ids, past_key_values=alone)
    elif form == "new ids and a mask":
        output = generate(model, question, torch.ones(2, 34, dtype=torch.long), past_key_values=alone)
    else:
        output = generate(model, all_ids, past_key_values=alone, position_ids=torch.arange(34).expand(2, -1))
    assert torch.equal(output.sequences[:, -8:], expected)
    assert alone.get_seq_length() == inside.get_seq_length() == 34 + 7
    assert pairs(alone) == {15 + 4 + 7}


def test_explicit_positions_count_the_tokens_seen() -> None:
    model = tiny_model("llama")
    cache = prefill(model, kvpress.KnormPress(0.5), tokens(1, 30))
    shifted = copy.deepcopy(cache)
    at = torch.arange(30, 33)[None]
    torch.testing.assert_close(
        model(tokens(1, 3), past_key_values=shifted, position_ids=at).logits,
        model(tokens(1, 3), past_key_values=cache).logits,
    )


def test_beams_and_crops_without_a_press() -> None:
    model, all_ids = tiny_model("llama"), torch.cat([tokens(1, 30), tokens(1, 4, seed=5)], dim=1)
    alone = prefill(model, kvpress.KnormPress(0.5), tokens(1, 30))
    before = positions(alone)
    caches = [copy.deepcopy(alone) for _ in range(2)]
    for cache in caches:
        cache.batch_repeat_interleave(3)
    with kvpress.reading(model):
        expected = generate(model, all_ids, past_key_values=caches[0], num_beams=3).sequences
    assert torch.equal(generate(model, all_ids, past_key_values=caches[1], num_beams=3).sequences, expected)
    model(tokens(1, 4, seed=5), past_key_values=alone)
    alone.crop(-4)
    assert positions(alone) == before


def test_questions_of_different_lengths_without_a_press() -> None:
    """Padding behind compressed pairs is hidden as usual."""
    model = tiny_model("llama")
    alone = prefill(model, kvpress.KnormPress(0.5), tokens(2, 30))
    inside = copy.deepcopy(alone)
    ids, real = padded_batch([6, 3])
    mask = torch.cat([torch.ones(2, 30, dtype=torch.long), real], dim=1)
    at = (mask.cumsum(1) - 1)[:, -6:]
    for _ in range(2):
        logits = model(ids, attention_mask=mask, past_key_values=alone, position_ids=at).logits
        with kvpress.reading(model):
            expected = model(ids, attention_mask=mask, past_key_values=inside, position_ids=at).logits
        torch.testing.assert_close(logits[:, -1], expected[:, -1], atol=1e-4, rtol=1e-4)
        ids, mask, at = tokens(2, 1), torch.cat([mask, mask[:, -1:]], dim=1), at[:, -1:] + 1


@pytest.mark.parametrize("name", UNREADABLE)
def test_caches_that_a_model_alone_cannot_read_are_refused(name: str) -> None:
    spec, why = UNREADABLE[name]
    model = tiny_model("llama")
    cache = prefill(model, kvpress.get_press(spec), tokens(2, 40))
    before = positions(cache)
    for length in (1, 5):
        with pytest.raises(RuntimeError, match=rf"{why}.*with kvpress\.reading\(model\)"):
            model(tokens(2, length), past_key_values=cache)
    assert (positions(cache), cache.get_seq_length()) == (before, 40)


def test_padded_prompts_are_refused() -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([40, 26])
    cache = prefill(model, kvpress.get_press("streaming_llm:budget=8"), ids, mask)
    with pytest.raises(RuntimeError, match=r"rows were padded.*kvpress\.reading"):
        model(tokens(2, 1), attention_mask=torch.cat([mask, mask[:, -1:]], dim=1), past_key_values=cache)


def test_a_shared_reading_is_refused_before_anything_is_stored() -> None:
    model = tiny_model("llama")
    (cache,) = kvpress.prefill(model, [kvpress.get_press("pyramidkv:0.5,window_size=4")], tokens(1, 40)).caches
    with pytest.raises(RuntimeError, match="layers hold different numbers"):
        model(tokens(1, 2), past_key_values=cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {40}


def test_the_next_block_goes_on_where_the_model_alone_left_off() -> None:
    model, press = tiny_model("llama"), kvpress.KnormPress(0.5)
    alone = prefill(model, press, tokens(2, 24))
    inside = copy.deepcopy(alone)
    model(tokens(2, 6, seed=1), past_key_values=alone)
    with kvpress.reading(model):
        model(tokens(2, 6, seed=1), past_key_values=inside)
    for cache in (alone, inside):
        with press(model):
            model(tokens(2, 10, seed=2), past_key_values=cache)
    assert positions(alone) == positions(inside)
    assert pairs(alone) == {20}


def test_a_cache_that_was_reset_forgets_its_stores() -> None:
    model = tiny_model("llama")
    cache = prefill(model, kvpress.get_press("pyramidkv:0.5,window_size=4"), tokens(1, 40))
    cache.reset()
    logits = model(tokens(1, 9), past_key_values=cache).logits
    torch.testing.assert_close(logits, model(tokens(1, 9)).logits)


def test_an_uncompressed_layer_beside_compressed_ones_gets_a_mask_for_all_tokens() -> None:
    """In a session, masks cover all tokens, for any storage of the first layer."""
    model = tiny_model("llama")
    press = kvpress.get_press("per_layer_compression(knorm):compression_ratios=(0.5,0.0,0.25)")
    caches = [prefill(model, press, tokens(2, 20)), DynamicCache(config=model.config)]
    model(tokens(2, 20), past_key_values=caches[1])
    with kvpress.reading(model):
        model(tokens(2, 5), past_key_values=caches[0])
    assert [layer.store.stored()[0] for layer in caches[0].layers] == [15, 25, 20]
