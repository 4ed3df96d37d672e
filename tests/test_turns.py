# SPDX-License-Identifier: Apache-2.0
"""A compressed cache lives on: later sessions and turns, copies for several questions, reading outside a press."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.testing.oracle import Oracle, weights_of
from tests.caches import STORAGES, generate, pairs, positions, prefill
from tests.models import grow, padded_batch, position_ids, tiny_model, tokens
from tests.presses.evicting import EVICTING, exempt


@pytest.mark.parametrize("length", [1, 5], ids=["one", "several"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("spec", [spec for spec in EVICTING if not exempt(spec, "mask oracle")])
def test_a_later_block_reads_at_the_right_positions(spec: str, padded: bool, length: int) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    ids, mask = padded_batch([40, 26]) if padded else (tokens(2, 40), None)
    at = position_ids(mask)
    cache, stock = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=at)
    kept, weights = kvpress.kept_positions(cache), weights_of(cache, 40)
    model(ids, attention_mask=mask, past_key_values=stock, position_ids=at)
    new = tokens(2, length, seed=11)
    if mask is not None:
        mask = grow(mask, length)
        at = position_ids(mask, length)
    with kvpress.reading(model):
        logits = model(new, attention_mask=mask, past_key_values=cache, position_ids=at).logits
    expected = Oracle(model, kept, 40, weights).logits(new, stock, mask, at)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert cache.get_seq_length() == 40 + length
    assert all(
        later.tolist() == [*now.tolist(), *range(40, 40 + length)]
        for a, b in zip(kept, kvpress.kept_positions(cache), strict=True)
        for c, d in zip(a, b, strict=True)
        for now, later in zip(c, d, strict=True)
    )


@pytest.mark.parametrize("spec", EVICTING)
def test_every_turn_under_a_press_is_cut_to_its_share(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    single, composed = DynamicCache(config=model.config), DynamicCache(config=model.config)
    turns = [tokens(2, 24), tokens(2, 12, seed=3), tokens(2, 10, seed=4)]
    sets = []
    with press(model):
        for turn in turns:
            model(turn, past_key_values=single)
            sets.append(positions(single))
    for turn in turns:
        with press(model):
            model(turn, past_key_values=composed)
    assert positions(single) == positions(composed)
    seen, heads = 0, 2
    for turn, before, after in zip(turns, [None, *sets[:-1]], sets, strict=True):
        seen += turn.shape[1]
        inner = getattr(press, "press", press)
        for layer, kept in enumerate(after):
            for row, heads_kept in enumerate(kept):
                if not exempt(spec, "pairs per layer"):
                    assert sum(map(len, heads_kept)) == heads * inner.recipe().kept(seen)
                for head, at in enumerate(heads_kept):
                    candidates = set(range(seen - turn.shape[1], seen)) | set(
                        before[layer][row][head] if before else []
                    )
                    assert set(at) <= candidates


@pytest.mark.parametrize("spec", ["knorm:0.5", STORAGES["composed"]])
def test_generating_turn_by_turn_under_one_block(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)

    def talk(blocks: int) -> tuple[Tensor, Any]:
        sequence, cache = tokens(2, 24), DynamicCache(config=model.config)
        if blocks == 1:
            with press(model):
                for turn in range(3):
                    sequence = torch.cat([sequence, tokens(2, 5, seed=turn)], dim=1)
                    sequence = generate(model, sequence, past_key_values=cache).sequences
        else:
            for turn in range(3):
                sequence = torch.cat([sequence, tokens(2, 5, seed=turn)], dim=1)
                with press(model):
                    sequence = generate(model, sequence, past_key_values=cache).sequences
        return sequence, cache

    (together, first), (separate, second) = talk(1), talk(3)
    assert torch.equal(together, separate)
    assert positions(first) == positions(second)
    assert first.get_seq_length() == together.shape[1] - 1
    assert kvpress.memory_report(first).kept < kvpress.memory_report(first).seen


def test_a_cache_that_was_filled_outside_is_cut_on_its_next_turn() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    model(tokens(2, 20), past_key_values=cache)
    with kvpress.KnormPress(0.5)(model):
        model(tokens(2, 10, seed=2), past_key_values=cache)
    assert pairs(cache) == {15}
    assert positions(cache) == positions(
        prefill(model, kvpress.KnormPress(0.5), torch.cat([tokens(2, 20), tokens(2, 10, seed=2)], 1))
    )


@pytest.mark.parametrize("spec", STORAGES.values(), ids=STORAGES)
def test_a_copy_serves_every_question(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    context = prefill(model, press, tokens(2, 40))
    before = positions(context), kvpress.memory_report(context)
    frozen = copy.deepcopy(context)
    questions = [tokens(2, n, seed=n) for n in (3, 6, 1)]

    def answer(question: Tensor, source: Any) -> Tensor:
        mask = torch.ones(2, 40 + question.shape[1], dtype=torch.long)
        with kvpress.reading(model, press):
            return generate(model, question, mask, past_key_values=copy.deepcopy(source), max_new_tokens=12).sequences

    forwards = [answer(question, context) for question in questions]
    backwards = [answer(question, context) for question in reversed(questions)]
    for a, b in zip(forwards, reversed(backwards), strict=True):
        assert torch.equal(a, b)
    after = kvpress.memory_report(context)
    assert context.get_seq_length() == 40
    assert positions(context) == before[0]
    assert [layer.kept for layer in after.layers] == [layer.kept for layer in before[1].layers]
    for ours, theirs in zip(context.layers, frozen.layers, strict=True):
        for name, tensors in ours.store.tensors().items():
            if name != "indexes":  # selectors may add their index on first use
                for x, y in zip(tensors, theirs.store.tensors()[name], strict=True):
                    assert torch.equal(x, y)


@pytest.mark.parametrize("spec", [name for name in STORAGES if name not in ("window", "uniform")])
def test_compressed_pairs_are_not_read_outside_a_block(spec: str) -> None:
    model = tiny_model("llama")
    cache = prefill(model, kvpress.get_press(STORAGES[spec]), tokens(1, 40))
    with pytest.raises(RuntimeError, match=r"with press\(model\)"):
        model(tokens(1, 1), past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"kvpress\.reading\(model\)"):
        generate(model, tokens(1, 41), past_key_values=cache)
    assert cache.get_seq_length() == 40


def test_reading_evicts_nothing() -> None:
    model, press = tiny_model("llama"), kvpress.KnormPress(0.5)
    cache = prefill(model, press, tokens(2, 20))
    with kvpress.reading(model, press):
        model(tokens(2, 6), past_key_values=cache)
    assert pairs(cache) == {16}
