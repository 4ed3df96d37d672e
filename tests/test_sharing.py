# SPDX-License-Identifier: Apache-2.0
"""One reading of a prompt gives every press the cache that it would have made alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.core.recipe import Allocator, Eviction
from kvpress.core.scoring import Scored
from kvpress.hf.models import new_cache
from tests.caches import positions
from tests.models import fingerprint, grow, padded_batch, position_ids, tiny_model
from tests.presses.evicting import EVICTING

STORING = [
    "none",
    "kivi:bits=2,group_size=4,residual_length=4",
    "zipcache:interval=4",
    "gear:group_size=4,buffer_length=4",
    "minicache:group_size=4,first_layer=0",
    "quest:budget=12,page_size=4,skip_layers=0",
    "tidal_decode:budget=12,skip_layers=0,reselect_layer=1,correction=2",
    "decoding(snapkv:window_size=4):compression_interval=4,target_size=12",
    "decoding(random):compression_interval=4,target_size=12",
    "adakv(expected_attention:0.5) + kivi:bits=4,group_size=4,residual_length=4 + quest:budget=12,page_size=4,skip_layers=0",
]
ALL = [spec for spec in [*EVICTING, *STORING] if kvpress.get_press(spec).recipe().shares_prefill]
FEW = ["none", "snapkv:0.5,window_size=4", "adakv(snapkv:0.5,window_size=4)", STORING[1], "random:0.5"]


def alone(model: Any, press: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    """Return the cache of a prompt read under one press, by an ordinary forward pass."""
    cache = new_cache(model)
    with torch.no_grad(), press(model):
        at = position_ids(mask)
        out = model(ids, attention_mask=mask, position_ids=at, past_key_values=cache, logits_to_keep=1)
    return out.logits[:, -1], cache


def decode(model: Any, press: Any, cache: Any, mask: Tensor, steps: int) -> Tensor:
    """Return logits of tokens that follow a prompt, read through its cache."""
    logits = []
    with torch.no_grad(), kvpress.reading(model, press):
        for step in range(steps):
            mask = grow(mask, 1)
            token = torch.full((len(mask), 1), 5 + step)
            out = model(token, attention_mask=mask, position_ids=position_ids(mask, 1), past_key_values=cache)
            logits.append(out.logits[:, -1])
    return torch.stack(logits)


def check(model: Any, specs: list[str], ids: Tensor, mask: Tensor, steps: int = 6) -> None:
    """Compare every press of one shared reading with the press alone, bit for bit."""
    presses = [kvpress.get_press(spec) for spec in specs]
    torch.manual_seed(0)
    shared = kvpress.prefill(model, presses, ids, mask)
    for spec, press, cache in zip(specs, presses, shared.caches, strict=True):
        torch.manual_seed(0)
        logits, reference = alone(model, press, ids, mask)
        assert torch.equal(shared.logits, logits), spec
        assert cache.get_seq_length() == ids.shape[1]
        assert positions(cache) == positions(reference), spec
        assert kvpress.memory_report(cache).total_bytes == kvpress.memory_report(reference).total_bytes, spec
        torch.manual_seed(1)
        expected = decode(model, press, reference, mask, steps)
        torch.manual_seed(1)
        assert torch.equal(decode(model, press, cache, mask, steps), expected), spec


def test_all_presses_at_once() -> None:
    ids, mask = padded_batch([30, 17, 24])
    check(tiny_model("llama"), ALL, ids, mask)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_next"])
def test_families(family: str) -> None:
    ids, mask = padded_batch([21, 30])
    implementation = "eager" if family == "gpt_oss" else "sdpa"
    check(tiny_model(family, implementation), FEW, ids, mask)


def test_branches_do_not_touch_each_other() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([20, 20])
    none = kvpress.get_press("none")
    first, second = kvpress.prefill(model, [none, none], ids, mask).caches
    untouched = [layer.store.window.filled_keys.clone() for layer in second.layers]
    first.crop(-4)
    decode(model, none, first, mask[:, :-4], 4)
    assert all(
        torch.equal(layer.store.window.filled_keys, keys) for layer, keys in zip(second.layers, untouched, strict=True)
    )


def test_the_generator_is_left_as_it_was() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([20])
    before = torch.get_rng_state()
    kvpress.prefill(model, [kvpress.get_press("random:0.5")] * 2, ids, mask)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_is_restored_after_a_failure() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([20])
    before = fingerprint(model)
    with pytest.raises(ValueError, match="past a prompt of 20 tokens"):
        kvpress.prefill(
            model, [kvpress.get_press("none"), kvpress.get_press("protect(knorm:0.5):tokens=0:900")], ids, mask
        )
    assert fingerprint(model) == before


def test_presses_that_read_the_prompt_again_are_refused() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([20])
    press = kvpress.get_press("kvzip:0.5,repeat_prompt=")
    with pytest.raises(ValueError, match="KVzipPress reads the prompt again"):
        kvpress.prefill(model, [press], ids, mask)


def test_time_is_split_between_reading_and_presses() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([64])
    read = kvpress.prefill(model, [kvpress.get_press(spec) for spec in FEW], ids, mask)
    assert read.seconds > 0
    assert len(read.press_seconds) == len(FEW)
    assert all(seconds > 0 for seconds in read.press_seconds)


def test_time_after_the_last_layer_counts_for_its_press() -> None:
    """Time in an allocator of the whole cache counts for its press."""
    model, (ids, mask) = tiny_model("llama"), padded_batch([64])

    @dataclass(frozen=True)
    class Slow(Allocator):
        def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
            time.sleep(0.2)
            return [mean] * len(scored)

    class SlowPress(kvpress.WrapperPress):
        def wrap(self, step: Eviction, model: Any) -> Eviction:
            return replace(step, allocator=Slow(scope="cache"))

    read = kvpress.prefill(model, [kvpress.KnormPress(0.5), SlowPress(kvpress.KnormPress(0.5))], ids, mask)
    assert read.press_seconds[1] > 0.2
    assert read.press_seconds[0] < 0.2
