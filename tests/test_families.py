# SPDX-License-Identifier: Apache-2.0
"""Presses on models of many kinds: a sample of `benchmarks/families.py`, and ways of generation on unusual models."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

import kvpress
from benchmarks import tiny
from benchmarks.families import REFUSED, WORKS, verdict
from kvpress.hf.models import attention_modules, mixes_heads
from tests.models import grow, padded_batch, tokens

tiny_model = cache(tiny.tiny)

MIXED = {
    "diffllama": "other keys or values than those in its cache",
    "doge": "of its attention mask, which",
}
"""Types that mix the values of heads, and the refusal of a module of which this is not known."""
SAMPLE = (
    "gpt_neox",  # names its cache `layer_past`
    "gpt_bigcode",  # one KV head, against its configuration
    "ctrl",
    "jetmoe",  # repeats its block of KV heads
    "gemma3n_text",  # later layers read the pairs of an earlier one
    "gemma4_text",
    "falcon_h1",  # pairs and a state in one layer
    "bamba",
    "mimo_v2_flash",  # other heads in sliding layers
    "minimax",  # a cache class of its own
    "roc_bert",  # the cache of a decoder with cross attention
    "bart",
    "llama4_text",
    "kimi_linear",  # latents in some layers, states in the others
    "git",  # its attention has no configuration and no attention interface
    "gpt_neo",  # calls the index of a layer `layer_id`
    "mpt",
    "inkling_text",  # a position bias by distance
    "inkling2_text",
    "modernbert-decoder",  # its attribute `decoder` is its output projection
    "gpt2",  # one of its attention functions is a method
    *MIXED,
)
REFUSALS = {
    "deepseek_v32": "its own index over all tokens",
    "rwkv": "no cache of keys and values",
    "hrm_text": "several layers of its cache from one attention module",
    "inkling2_loop_text": "did not write its layer of the cache",
    "mamba": "no full-attention layer",
}


@pytest.mark.parametrize("kind", SAMPLE)
def test_works(kind: str) -> None:
    outcome = verdict(kind)
    assert outcome.verdict == WORKS, outcome


@pytest.mark.parametrize("kind", REFUSALS)
def test_refused_with_the_reason(kind: str) -> None:
    outcome = verdict(kind)
    assert outcome.verdict == REFUSED
    assert REFUSALS[kind] in outcome.reason


@pytest.mark.parametrize("kind", SAMPLE)
def test_the_source_shows_whether_heads_are_mixed(kind: str) -> None:
    assert any(map(mixes_heads, attention_modules(tiny_model(kind)))) == (kind in MIXED)


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_heads_are_refused_without_their_source(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress.hf.models.reads_values_alone", lambda forward: False)
    outcome = verdict(kind)
    assert outcome.verdict == REFUSED
    assert MIXED[kind] in outcome.reason


@pytest.mark.parametrize("kind", ["hrm_text", "rwkv", "mamba"])
def test_a_refused_model_runs_as_it_is_without_compression(kind: str) -> None:
    model, ids = tiny_model(kind), tokens(2, 20)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **settings)
    with kvpress.get_press("none")(model):
        assert torch.equal(model.generate(ids, **settings), expected)


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"prefill_chunk_size": 7}], ids=["beams", "chunked"])
@pytest.mark.parametrize("kind", ["gpt_neox", "jetmoe", "gemma3n_text", "falcon_h1"])
def test_nothing_removed_equals_stock(kind: str, settings: dict[str, Any]) -> None:
    model = tiny_model(kind)
    ids, mask = padded_batch([20, 13])
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **settings}
    expected = model.generate(ids, **settings)
    with kvpress.get_press("none")(model):
        assert torch.equal(model.generate(ids, **settings), expected)


@pytest.mark.parametrize("kind", ["jetmoe", "gemma3n_text", "falcon_h1"])
def test_a_second_turn_reads_the_kept_pairs(kind: str) -> None:
    """A turn of several tokens equals its tokens read one by one."""
    model, ids, turn = tiny_model(kind), tokens(2, 30), tokens(2, 5, seed=4)
    with kvpress.get_press("knorm:0.5")(model) as session, torch.no_grad():
        model(ids, use_cache=True)
        prefix = session.cache
    logits = []
    for size in (5, 1):
        read = type(prefix)(config=model.config)
        with kvpress.get_press("knorm:0.5")(model), torch.no_grad():
            model(ids, past_key_values=read)
        with kvpress.reading(model), torch.no_grad():
            parts = [model(part, past_key_values=read).logits for part in turn.split(size, dim=1)]
        logits.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("spec", ["h2o:0.5", "decoding(knorm):compression_interval=2,target_size=12"])
def test_layers_that_lend_their_pairs_evict_after_the_last_reader(spec: str) -> None:
    model, ids, mask = tiny_model("gemma3n_text"), *padded_batch([30, 22])
    with kvpress.get_press(spec)(model) as session, torch.no_grad():
        model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    report = kvpress.memory_report(session.cache)
    assert report.kept < report.seen
    assert grow(mask, 7).shape[1] == session.cache.get_seq_length()


class OtherLayer(DynamicLayer):
    """Cache layer with a storage of its own."""


@pytest.mark.parametrize("filled", [True, False])
def test_other_cache_layers_are_refused(filled: bool) -> None:
    model = tiny_model("llama")
    foreign = (
        Cache(layers=[OtherLayer() for _ in range(tiny.LAYERS)])
        if filled
        else Cache(layer_class_to_replicate=OtherLayer)
    )
    with kvpress.get_press("knorm:0.5")(model), pytest.raises(NotImplementedError, match="OtherLayer"):
        model(tokens(1, 8), past_key_values=foreign)


def test_other_cache_layers_stay_as_they_are_without_compression() -> None:
    model, ids = tiny_model("llama"), tokens(1, 8)
    foreign = Cache(layers=[OtherLayer() for _ in range(tiny.LAYERS)])
    with kvpress.get_press("none")(model), torch.no_grad():
        logits = torch.cat([model(part, past_key_values=foreign).logits for part in ids.split(4, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert type(foreign.layers[0]) is OtherLayer


def test_a_hybrid_layer_keeps_its_state_when_rows_move() -> None:
    model, ids = tiny_model("falcon_h1"), tokens(3, 12)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=stock)
        with kvpress.get_press("none")(model) as session:
            model(ids, past_key_values=DynamicCache(config=model.config))
    order = torch.tensor([2, 0, 0])
    for reordered in (stock, session.cache):
        reordered.reorder_cache(order)
    for ours, theirs in zip(session.cache.layers, stock.layers, strict=True):
        assert torch.equal(ours.conv_states[0], theirs.conv_states[0])
        assert torch.equal(ours.keys, theirs.keys)
