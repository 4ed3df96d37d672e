# SPDX-License-Identifier: Apache-2.0
"""Pairs between tags, and no others, are dropped in the pass that closes the span; reading equals a masked full cache."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.hf.generation.capture import Recorder
from kvpress.hf.session.session import session
from kvpress.observe.spans import Between, Mark
from kvpress.testing.oracle import Oracle
from tests.caches import CODEC, generate, positions, prefill
from tests.models import grow, position_ids, tiny_model, tokens
from tests.words import Words, batch_of, ids_of

OPEN, CLOSE = "<think>", "</think>"
ROWS = ids_of(5, OPEN, 9, CLOSE, 6), ids_of(2, OPEN, 3, f"{CLOSE}\n", 4, OPEN, 4, CLOSE, 3)
INSIDE = [set(range(8, 17)), {*range(5, 8), *range(18, 22)}]
SELECTOR = "quest:budget=16,page_size=4,skip_layers=0"


def drop(press: Any = None) -> Any:
    return kvpress.DropSpansPress(press=press, tokenizer=Words())


def kept(cache: Any, mask: Tensor | None = None) -> list[list[list[set[int]]]]:
    """Positions of kept pairs by layer, row and head, padding not counted."""
    kept_pairs = positions(cache)
    pads = [0] * len(kept_pairs[-1]) if mask is None else (1 - mask).sum(dim=1).tolist()
    return [
        [[{at - pads[row] for at in head} for head in heads] for row, heads in enumerate(layer)] for layer in kept_pairs
    ]


@pytest.mark.parametrize("spec", ["none", CODEC, SELECTOR, f"{CODEC} + {SELECTOR}"])
def test_the_pairs_of_every_closed_span_go_and_no_others(spec: str) -> None:
    model, (ids, mask) = tiny_model("llama"), batch_of(*ROWS)
    cache = prefill(model, drop() + kvpress.get_press(spec), ids, mask)
    for layer in kept(cache, mask):
        for row, heads in enumerate(layer):
            assert all(head == set(range(ROWS[row].shape[1])) - INSIDE[row] for head in heads)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_oss"])
@pytest.mark.parametrize("inner", [None, "adakv(knorm:0.5)"], ids=["dropped", "compressed"])
def test_decoding_reads_what_a_full_cache_reads_with_exactly_those_pairs_masked(family: str, inner: str | None) -> None:
    """One span is in the prompt, later tokens open and close another; its pairs are read until it closes, then masked."""
    model = tiny_model(family, "eager")
    press = drop(None if inner is None else kvpress.get_press(inner))
    ids, mask = batch_of(*ROWS)
    follow = ids_of(2, OPEN, 4, CLOSE, 5).expand(2, -1)
    cache, stock = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids, attention_mask=mask, past_key_values=stock, position_ids=position_ids(mask))
    masks, logits, kept_per_step = [grow(mask, step + 1) for step in range(follow.shape[1])], [], []
    with press(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask))
        for new, grown in zip(follow.split(1, dim=1), masks, strict=True):
            kept_per_step.append(kvpress.kept_positions(cache))
            at = position_ids(grown, 1)
            logits.append(model(new, attention_mask=grown, past_key_values=cache, position_ids=at).logits)
    for step, (new, grown) in enumerate(zip(follow.split(1, dim=1), masks, strict=True)):
        oracle = Oracle(model, kept_per_step[step], ids.shape[1] + step)
        expected = oracle.logits(new, stock, grown, position_ids(grown, 1))
        torch.testing.assert_close(logits[step], expected, atol=3e-4, rtol=1e-4)
    sizes = [sum(map(len, layer[0])) for layer in (layers[-1] for layers in kept_per_step)]
    assert [after > before for before, after in itertools.pairwise(sizes)].count(False) == 1
    assert cache.get_seq_length() == ids.shape[1] + follow.shape[1]


def test_spans_are_cut_to_the_ratio_of_the_press_inside_once() -> None:
    model, press = tiny_model("llama"), drop(kvpress.KnormPress(0.5))
    ids, mask = batch_of(*ROWS)
    with press(model):
        result = generate(model, ids, mask, max_new_tokens=5)
    cache, mask = result.past_key_values, grow(mask, 5)
    for layer in kept(cache, mask):
        for row, heads in enumerate(layer):
            for head in heads:
                assert len(head & INSIDE[row]) == len(INSIDE[row]) // 2
                assert head >= set(range(ROWS[row].shape[1])) - INSIDE[row]


def test_the_best_of_a_span_stay() -> None:
    model, ids = tiny_model("llama"), ids_of(5, OPEN, 12, CLOSE, 6)
    full = DynamicCache(config=model.config)
    model(ids, past_key_values=full)
    cache = prefill(model, drop(kvpress.KnormPress(budget=4)), ids)
    for layer, stock in zip(kept(cache), full.layers, strict=True):
        norms = stock.keys.norm(dim=-1)[0, :, 8:20]
        for head, kept_pairs in enumerate(layer[0]):
            best = set((norms[head].topk(4, largest=False).indices + 8).tolist())
            assert kept_pairs == set(range(ids.shape[1])) - set(range(8, 20)) | best


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ((4, OPEN, 5), set()),
        ((4, CLOSE, 5), set()),
        ((OPEN, CLOSE, 5), set()),
        ((2, OPEN, 2, OPEN, 2, CLOSE, 2, CLOSE, 3), {5, 6, 7, 8, 9, 10, 11}),
        ((OPEN, 2, CLOSE, OPEN, 3), {3, 4}),
        ((OPEN, 2, f"{CLOSE}\n", 3), {3, 4}),
    ],
    ids=["never closed", "never opened", "empty", "nested", "the second is open", "joined to the text behind"],
)
def test_unclosed_and_nested_spans(text: tuple[Any, ...], gone: set[int]) -> None:
    ids = ids_of(*text)
    cache = prefill(tiny_model("llama"), drop(), ids)
    assert all(head == set(range(ids.shape[1])) - gone for layer in kept(cache) for head in layer[0])


def test_the_closing_tag_may_come_token_by_token_in_a_later_turn_or_while_a_question_is_read() -> None:
    model, press = tiny_model("llama"), drop()
    ids = ids_of(3, OPEN, 5, CLOSE, 4)
    for read in (press, lambda model: kvpress.reading(model, press)):
        cache = DynamicCache(config=model.config)
        with press(model):
            model(ids[:, :8], past_key_values=cache)
        with read(model):
            for at in (slice(8, 12), slice(12, 13), slice(13, 14), slice(14, None)):
                model(ids[:, at], past_key_values=cache)
        assert all(head == set(range(ids.shape[1])) - set(range(6, 11)) for layer in kept(cache) for head in layer[0])


def test_protected_pairs_stay_in_dropped_spans() -> None:
    press = drop().protect(tokens=[(10, 12)])
    cache = prefill(tiny_model("llama"), press, ROWS[0])
    assert all(head & INSIDE[0] == {10, 11} for layer in kept(cache) for head in layer[0])


def test_schedules_beside_it_go_on_as_they_were() -> None:
    """Closing spans neither delay a periodic eviction nor change the pairs that it keeps."""
    model = tiny_model("llama")
    press = drop() + kvpress.get_press("decoding(streaming_llm:n_sink=0):compression_interval=12,target_size=10")
    cache, counts = DynamicCache(config=model.config), []
    with press(model):
        model(ids_of(20), past_key_values=cache)
        for new in torch.cat([ids_of(1, OPEN, 1, CLOSE)] * 5, dim=1).split(1, dim=1):
            model(new, past_key_values=cache)
            counts.append(len(kept(cache)[0][0][0]))
    assert [counts[at] for at in (11, 23, 35)] == [10, 10, 10]
    assert max(counts[12:]) < 10 + 12


@pytest.mark.parametrize("which", ["prefilling_press", "decoding_press"])
def test_it_acts_in_both_phases_wherever_it_is_put(which: str) -> None:
    decoding_settings = {"decoding_press": kvpress.H2OPress(budget=100)} if which == "prefilling_press" else {}
    press = kvpress.PrefillDecodingPress(**{which: drop() + kvpress.H2OPress(budget=100), **decoding_settings})
    cache = prefill(tiny_model("llama"), press, ROWS[0])
    assert all(head == set(range(ROWS[0].shape[1])) - INSIDE[0] for layer in kept(cache) for head in layer[0])


def test_a_ratio_behind_it_is_of_the_remaining_pairs() -> None:
    model, ids = tiny_model("llama"), ROWS[0]
    cache = prefill(model, drop() + kvpress.KnormPress(0.5), ids)
    expected = (ids.shape[1] - 9) // 2
    assert {len(head) for layer in kept(cache) for head in layer[0]} == {expected}


def test_several_presses_share_a_reading() -> None:
    model, (ids, mask) = tiny_model("llama"), batch_of(*ROWS)
    presses = [drop(), drop(kvpress.KnormPress(0.5)), kvpress.KnormPress(0.5)]
    shared = kvpress.prefill(model, presses, ids, mask)
    for press, cache in zip(presses, shared.caches, strict=True):
        assert positions(cache) == positions(prefill(model, press, ids, mask))


def test_beams_copy_the_dropped_spans() -> None:
    model = tiny_model("llama")
    with drop()(model):
        cache = generate(model, ROWS[0], num_beams=3, max_new_tokens=6).past_key_values
    for layer in kept(cache):
        for heads in layer:
            assert all(head & set(range(26)) == set(range(ROWS[0].shape[1])) - INSIDE[0] for head in heads)


@pytest.mark.parametrize(("with_tags", "spans"), [(True, [(1, 7), (9, 20)]), (False, [(2, 5), (11, 20)])])
def test_an_open_span_reaches_to_the_newest_token_unless_only_closed_ones_count(
    with_tags: bool, spans: list[tuple[int, int]]
) -> None:
    marks = [Mark(1, 2, 0), Mark(3, 4, 0), Mark(5, 7, 1), Mark(7, 8, 1), Mark(9, 11, 0)]
    rule = Between("a", "b", str, with_tags)
    assert rule.within(marks, 20) == spans
    assert Between("a", "b", str, with_tags, closed=True).within(marks, 20) == spans[:1]


def test_unusable_tags_are_refused() -> None:
    with pytest.raises(ValueError, match="two different texts, got '<a>' and '<a>'"):
        kvpress.DropSpansPress("<a>", "<a>")
    with pytest.raises(ValueError, match="would never be found"):
        kvpress.DropSpansPress("[a]", "[/a]", tokenizer=Words())
    with (
        pytest.raises(ValueError, match=r"drop_spans finds tags .* give tokenizer="),
        kvpress.DropSpansPress()(tiny_model("llama")),
    ):
        pass
    with pytest.raises(ValueError, match="keeps all pairs between the tags"):
        kvpress.DropSpansPress(press=kvpress.SnapKVPress())
    recorded = session(drop(), tiny_model("llama"), recorder=Mock(spec=Recorder))
    with pytest.raises(ValueError, match="watches every generated token"):
        recorded.__enter__()


def test_a_spec_is_the_same_press() -> None:
    press = kvpress.get_press("drop_spans(knorm:0.5):<a>,</a>")
    assert press == kvpress.DropSpansPress("<a>", "</a>", kvpress.KnormPress(0.5))
    assert kvpress.get_press(kvpress.to_spec(press)) == press
    assert kvpress.get_press("drop_spans") == kvpress.DropSpansPress("<think>", "</think>")


def test_rows_alone_drop_the_same_pairs_as_in_a_batch() -> None:
    model, (ids, mask) = tiny_model("llama"), batch_of(*ROWS)
    press = drop(kvpress.get_press("adakv(snapkv:0.5,window_size=3)"))
    together = kept(prefill(model, press, ids, mask), mask)
    for row, alone in enumerate(ROWS):
        assert [layer[0] for layer in kept(prefill(model, press, alone))] == [layer[row] for layer in together]


def test_nothing_is_dropped_without_tags() -> None:
    model = tiny_model("llama")
    with drop()(model):
        report = kvpress.memory_report(generate(model, tokens(2, 20) % 60 + 30).past_key_values)
    assert report.kept == report.seen
