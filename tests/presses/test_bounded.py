# SPDX-License-Identifier: Apache-2.0
"""Prompts are compressed while they are read; the cache never exceeds the budget and one chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from kvpress.cache.window import GROWTH
from kvpress.hf.models import CACHE
from kvpress.plan import Geometry, plan
from kvpress.testing.memory import held_bytes
from tests.models import FAMILIES, padded_batch, position_ids, tiny_model, tokens

SCORERS = [
    "keydiff", "knorm", "snapkv", "streaming_llm", "tova", "h2o", "expected_attention", "leverage_score", "compactor",
    "non_causal_attn", "observed_attention", "pyramidkv", "random",
]  # fmt: skip
PAIR = 2 * 2 * 32 * 4
"""Bytes of a pair in all heads of a layer of one row."""


def stores(cache: Any) -> list[Any]:
    return [layer.store for layer in cache.layers if getattr(layer, "store", None) is not None]


def peaks(model: Any, press: Any, ids: torch.Tensor, **kwargs: Any) -> tuple[int, int]:
    """Most bytes reachable from the pairs of all layers, and of one, whenever a layer was read and not yet evicted from."""
    layer_bytes: list[list[int]] = []

    def walk(module: Any, args: Any, inputs: Any, output: Any) -> None:
        layer_bytes.append([held_bytes([s.window, s.dense, s.segments]) for s in stores(inputs[CACHE])])

    hooks = [layer.self_attn.register_forward_hook(walk, with_kwargs=True) for layer in model.get_decoder().layers]
    try:
        with press(model):
            model.generate(ids, max_new_tokens=1, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return max(map(sum, layer_bytes)), max(map(max, layer_bytes))


@pytest.mark.parametrize("scorer", SCORERS)
def test_the_peak_is_the_budget_and_a_chunk(scorer: str) -> None:
    model, spec = tiny_model("llama"), f"{scorer}:0.9" + (",window_size=8" if scorer in ("snapkv", "pyramidkv") else "")
    press = kvpress.get_press(f"bounded({spec}):chunk=64")
    # Positions, and up to one number that an observer records of a pair. Pyramids give the first layer more.
    budget = 40 * (PAIR + 2 * 4) * (2 if scorer == "pyramidkv" else 1)
    assert peaks(model, press, tokens(1, 400))[0] <= 3 * budget + 64 * (PAIR + 4)
    for piece in (23, 300):
        assert peaks(model, press, tokens(1, 400), prefill_chunk_size=piece)[1] <= budget + (64 + GROWTH) * (PAIR + 4)
    inner = kvpress.get_press(spec)
    assert peaks(model, inner, tokens(1, 400))[1] >= 400 * PAIR
    assert peaks(model, inner, tokens(1, 400), prefill_chunk_size=100)[0] >= 3 * 300 * PAIR


@pytest.mark.parametrize("spec", ["knorm:0.9", "bounded(knorm:0.9):chunk=64", "streaming_llm:budget=100", "none"])
def test_peaks_are_planned(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    planned = plan(press, Geometry.of(model.config), 1600)
    at_once = peaks(model, press, tokens(1, 1600))[0]
    assert planned.peak_bytes == pytest.approx(at_once, rel=0.03)
    in_chunks = peaks(model, press, tokens(1, 1600), prefill_chunk_size=32)[0]
    if "bounded" in spec:  # other held bytes of a layer depend on the ends of the chunks
        assert in_chunks <= planned.chunked_peak_bytes <= 1.3 * in_chunks
    else:
        assert planned.chunked_peak_bytes == pytest.approx(in_chunks, rel=0.03)


def outcome(model: Any, spec: str, ids: torch.Tensor, mask: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    with kvpress.get_press(spec)(model) as session:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, **kwargs)
    return out[:, ids.shape[1] :], kvpress.kept_positions(session.cache)


def same(actual: Any, expected: Any) -> None:
    assert torch.equal(actual[0], expected[0])
    for ours, theirs in zip(actual[1], expected[1], strict=True):
        for rows in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_prompt_that_fits_in_a_chunk_is_compressed_as_without(scorer: str) -> None:
    ids, spec = tokens(2, 60), f"{scorer}:0.5" + (",seed=3" if scorer == "random" else "")
    same(*(outcome(tiny_model("llama"), text, ids) for text in (f"bounded({spec}):chunk=60", spec)))


@pytest.mark.parametrize(
    "spec", ["keydiff:0.7", "snapkv:0.7,window_size=8", "adakv(expected_attention:0.7)", "h2o:0.7"]
)
def test_pieces_of_any_size_give_the_same(spec: str) -> None:
    model, ids = tiny_model("llama"), tokens(2, 100)
    outcomes = [outcome(model, f"bounded({spec}):chunk=32", ids, prefill_chunk_size=n) for n in (None, 7, 32, 50, 99)]
    for outcome_of_size in outcomes[1:]:
        same(outcomes[0], outcome_of_size)


@pytest.mark.parametrize(
    "spec", ["keydiff:0.7", "snapkv:0.7,window_size=8", "adakv(knorm:0.7)", "streaming_llm:budget=20"]
)
def test_a_padded_row_is_compressed_as_alone(spec: str) -> None:
    model, lengths = tiny_model("llama"), [100, 61, 9]
    ids, mask = padded_batch(lengths)
    generated, positions = outcome(model, f"bounded({spec}):chunk=32", ids, mask)
    for row, length in enumerate(lengths):
        alone = outcome(model, f"bounded({spec}):chunk=32", ids[row : row + 1, 100 - length :])
        assert torch.equal(generated[row : row + 1], alone[0])
        for layer, alone_layer in zip(positions, alone[1], strict=True):
            assert all(torch.equal(a - (100 - length), b) for a, b in zip(layer[row], alone_layer[0], strict=True))


def test_rows_of_padding_alone_may_come_first() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([100, 9])
    outcomes = [outcome(model, "bounded(keydiff:0.7):chunk=32", ids, mask, prefill_chunk_size=n) for n in (None, 7, 50)]
    for outcome_of_size in outcomes[1:]:
        same(outcomes[0], outcome_of_size)
    with pytest.raises(ValueError, match="row 1 of the batch is padded on the right"):
        outcome(model, "bounded(keydiff:0.7):chunk=32", ids, torch.stack([mask[0], mask[1].flip(0)]))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mistral"])  # it has no full attention
def test_forward_returns_the_logits_of_all_tokens(family: str) -> None:
    model = tiny_model(family, "eager" if family in ("gpt_oss", "gemma2") else "sdpa")
    ids, mask = padded_batch([50, 31])
    expected = model(ids, attention_mask=mask, position_ids=position_ids(mask)).logits
    with kvpress.get_press("bounded(knorm:0):chunk=16")(model), torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask, position_ids=position_ids(mask)).logits, expected)
    with kvpress.get_press("bounded(streaming_llm:budget=50):chunk=16")(model), torch.no_grad():
        cache = DynamicCache(config=model.config)
        out = model(ids, attention_mask=mask, position_ids=position_ids(mask), past_key_values=cache)
        assert out.past_key_values is cache
        torch.testing.assert_close(out.logits[mask.bool()], expected[mask.bool()], atol=2e-3, rtol=2e-3)
        for keep in (1, 5, 20):
            last = model(ids, attention_mask=mask, position_ids=position_ids(mask), logits_to_keep=keep).logits
            torch.testing.assert_close(last, out.logits[:, -keep:], atol=1e-4, rtol=1e-4)


def test_the_budget_is_that_of_the_whole_prompt() -> None:
    ids = tokens(1, 100)
    specs = "bounded(streaming_llm:0.5):chunk=16", "streaming_llm:0.5"
    chunked, at_once = (outcome(tiny_model("llama"), spec, ids) for spec in specs)
    for ours, theirs in zip(chunked[1], at_once[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


@pytest.mark.parametrize(
    "spec", ["kivi:bits=4,group_size=8,residual_length=8", "quest:budget=12,page_size=4,skip_layers=0"]
)
def test_kept_pairs_are_sealed_at_the_end(spec: str) -> None:
    model = tiny_model("llama")
    with kvpress.get_press(f"bounded(knorm:0.5):chunk=32 + {spec}")(model) as session:
        model.generate(tokens(2, 300), max_new_tokens=3)
    assert all(store.segments for store in stores(session.cache))
    assert kvpress.memory_report(session.cache).kept == 3 * 2 * 2 * 152


def test_later_turns_and_readings_without_eviction() -> None:
    model, press = tiny_model("llama"), kvpress.get_press("bounded(keydiff:0.5):chunk=32")
    with press(model) as session, torch.no_grad():
        model(tokens(1, 100), past_key_values=(cache := DynamicCache(config=model.config)))
        assert {n for store in stores(cache) for n in store.stored()} == {50}
        model(tokens(1, 80, seed=1), past_key_values=cache)
    assert session.cache is cache
    assert {n for store in stores(cache) for n in store.stored()} == {90}
    with kvpress.reading(model, press), torch.no_grad():
        model(tokens(1, 70, seed=2), past_key_values=cache)
    assert {n for store in stores(cache) for n in store.stored()} == {160}
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("kvzip:0.5", "KVzipPress: it scores by reading a whole prompt again"),
     ("cake:0.5", "CAKEPress: it shares a budget among all layers"),
     ("decoding(snapkv)", "DecodingPress: it does not evict from prompts"), ("kivi", "such as SnapKVPress, got KIVIPress")],
)  # fmt: skip
def test_presses_that_need_the_whole_prompt_are_refused_with_the_reason(spec: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kvpress.get_press(f"bounded({spec})")
    with pytest.raises(ValueError, match="chunk must be >= 1, got 0"):
        kvpress.get_press("bounded(knorm:0.5):chunk=0")


def test_outputs_that_a_split_pass_cannot_return_are_refused() -> None:
    model, ids = tiny_model("llama"), tokens(1, 40)
    with kvpress.get_press("bounded(knorm:0.5):chunk=16")(model):
        with pytest.raises(ValueError, match="labels is not available if a prompt is read in chunks of 16 tokens"):
            model(ids, labels=ids)
        with pytest.raises(ValueError, match="output_hidden_states is not available"):
            model(ids, output_hidden_states=True)
