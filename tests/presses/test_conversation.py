# SPDX-License-Identifier: Apache-2.0
"""A budget over a whole conversation: the cache does not grow with the turns and stays within the documented bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from benchmarks import conversation
from tests.caches import CODEC, generate, pairs, positions
from tests.models import grow, padded_batch, tiny_model, tokens

SELECTOR = "quest:budget=16,page_size=4,skip_layers=0"


@pytest.mark.parametrize("suffix", ["", f" + {CODEC}", f" + {SELECTOR}", f" + {CODEC} + {SELECTOR}"])
@pytest.mark.parametrize("inner", ["snapkv:window_size=4", "adakv(knorm)"])
def test_a_cache_never_holds_more_than_the_budget_and_a_turn_or_interval(inner: str, suffix: str) -> None:
    model = tiny_model("llama")
    press = kvpress.get_press(f"conversation({inner}):budget=20,interval=5{suffix}")
    ids, mask = padded_batch([12, 7])
    cache = DynamicCache(config=model.config)
    with press(model):
        for turn in range(6):
            model(ids[:, cache.get_seq_length() :], attention_mask=mask, past_key_values=cache)
            assert sum(cache.layers[0].store.stored()) <= 4 * 20
            for step in range(13):
                new = tokens(2, 1, seed=20 * turn + step)
                ids, mask = torch.cat([ids, new], dim=1), grow(mask, 1)
                model(new, attention_mask=mask, past_key_values=cache)
                assert max(sum(layer.store.stored()) for layer in cache.layers) < 4 * (20 + 5)
            ids, mask = torch.cat([ids, tokens(2, 9, seed=turn)], dim=1), grow(mask, 9)
    assert cache.get_seq_length() == 12 + 6 * 13 + 5 * 9


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_turns_are_cut_to_the_budget_in_every_family(family: str) -> None:
    model, press = tiny_model(family, "eager"), kvpress.get_press("conversation(knorm):budget=16,interval=100")
    cache = DynamicCache(config=model.config)
    with press(model):
        for turn in range(4):
            model(tokens(2, 14, seed=turn), past_key_values=cache)
            assert pairs(cache) == {min(16, 14 * (turn + 1))}


def test_turns_are_read_in_chunks_by_a_bounded_press_inside() -> None:
    model = tiny_model("llama")
    press = kvpress.get_press("conversation(bounded(keydiff):chunk=8):budget=12,interval=100")
    seen: list[int] = []
    cache = DynamicCache(config=model.config)
    handle = model.model.layers[1].register_forward_hook(lambda *_: seen.append(max(cache.layers[0].store.stored())))
    try:
        with press(model):
            for turn in range(3):
                model(tokens(1, 30, seed=turn), past_key_values=cache)
    finally:
        handle.remove()
    assert max(seen) <= 12 + 8
    assert pairs(cache) == {12}


def test_the_same_pairs_stay_as_under_a_press_for_prompts_and_one_for_answers() -> None:
    model, ids = tiny_model("llama"), tokens(2, 30)
    conversation = kvpress.get_press("conversation(knorm):budget=16,interval=4")
    two_phases = kvpress.get_press(
        "prefill_decoding(knorm:budget=16; decoding(knorm):compression_interval=4,target_size=16)"
    )

    def kept(press: Any) -> Any:
        with press(model):
            return positions(generate(model, ids).past_key_values)

    assert kept(conversation) == kept(two_phases)


def test_bytes_do_not_grow_over_a_hundred_turns() -> None:
    specs = ("none", "protect(conversation(knorm):budget=24,interval=4):tokens=0:3")
    full, bounded = (conversation.talk(tiny_model("llama"), spec, 100, turn_tokens=(4, 8), answer=2) for spec in specs)
    assert full[-1]["held"] > 20 * bounded[-1]["held"]
    assert conversation.growth(bounded) <= 1.0
    assert conversation.growth(full) > 1.8


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("conversation(snapkv:0.5)", "would have no effect"),
        ("conversation(decoding(snapkv))", "would have no effect"),
        ("conversation(snapkv):budget=0", "budget must be >= 1"),
        ("conversation(snapkv) + h2o:0.5", "one eviction while decoding"),
    ],
)
def test_conflicting_settings_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvpress.get_press(spec)
