# SPDX-License-Identifier: Apache-2.0
"""Branches of a conversation: the shared prefix is stored once, and each branch goes on as if it were alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from tests.caches import STORAGES, generate, positions, prefill
from tests.models import grow, padded_batch, tiny_model, tokens

HELD = {**STORAGES, "conversation": "conversation(snapkv:window_size=4):budget=24,interval=6"}
stored = pytest.mark.parametrize("spec", HELD.values(), ids=HELD)


def go_on(model: Any, press: Any, cache: Any, mask: Tensor, seed: int, length: int = 5) -> Tensor:
    """Generate an answer from a cache, and return it."""
    new = tokens(len(mask), length, seed=seed)
    with kvpress.reading(model, press):
        answer: Tensor = generate(model, new, grow(mask, length), past_key_values=cache).sequences[:, length:]
    return answer


def real_positions(cache: Any, mask: Tensor) -> list[Any]:
    """Return positions of kept pairs without padding, whose pairs a window holds too, unlike sealed segments."""
    pads = (1 - mask).sum(dim=1).tolist()
    return [
        [[[at for at in head if at >= pads[row]] for head in heads] for row, heads in enumerate(layer)]
        for layer in positions(cache)
    ]


@stored
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_branches_go_on_as_copies_do_and_hold_their_prefix_once(spec: str, padded: bool) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    ids, mask = padded_batch([60, 44 if padded else 60])
    cache = prefill(model, press, ids, mask)
    copies = [copy.deepcopy(cache) for _ in range(3)]
    report = kvpress.memory_report(cache)
    alone, watched = report.total_bytes, report.components.get("scores", 0)  # every branch has its own scores
    expected = [go_on(model, press, twin, mask, seed) for seed, twin in enumerate(copies)]
    branches = [kvpress.branch(cache, mask) for _ in range(2)]
    together = kvpress.memory_report(cache, *branches)
    assert together.total_bytes <= 1.02 * alone + 2 * watched + 4096
    assert together.seen == 3 * kvpress.memory_report(cache).seen
    answers = [go_on(model, press, twin, mask, seed) for seed, twin in enumerate((branches[0], cache, branches[1]))]
    assert all(torch.equal(a, b) for a, b in zip(answers, expected, strict=True))
    for ours, theirs in zip((branches[0], cache, branches[1]), copies, strict=True):
        assert real_positions(ours, mask) == real_positions(theirs, mask)
    grown = sum(kvpress.memory_report(twin).total_bytes - alone for twin in copies)
    if "conversation" not in spec and "kivi" not in spec:  # they evict or encode some of the shared pairs
        assert kvpress.memory_report(cache, *branches).total_bytes <= 1.02 * alone + 3 * max(0, grown) + 3 * 2**14


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_oss", "qwen3_next"])
def test_another_answer_and_another_turn_on_several_models(family: str) -> None:
    """A turn is answered; then one branch edits the question, and another samples the answer again."""
    model, press = tiny_model(family, "eager"), kvpress.KnormPress(0.4)
    ids, mask = padded_batch([30, 22])
    cache = prefill(model, press, ids, mask)
    before = kvpress.branch(cache, mask)
    first = go_on(model, press, cache, mask, seed=1)
    edited = go_on(model, press, kvpress.branch(before, mask), mask, seed=2)
    again = go_on(model, press, kvpress.branch(before, mask), mask, seed=1)
    assert torch.equal(first, again)
    reread = prefill(model, press, ids, mask)
    assert torch.equal(edited, go_on(model, press, reread, mask, seed=2))


def test_a_shared_prefix_is_counted_once_and_unshared_copies_twice() -> None:
    model = tiny_model("llama")
    cache = prefill(model, kvpress.get_press("none"), tokens(1, 400))
    single, twin = kvpress.memory_report(cache).total_bytes, copy.deepcopy(cache)
    assert kvpress.memory_report(cache, twin).total_bytes == 2 * single
    branches = [kvpress.branch(cache) for _ in range(10)]
    assert kvpress.memory_report(cache, *branches).total_bytes <= single + 4096
    assert kvpress.memory_report(cache, cache).total_bytes == kvpress.memory_report(cache).total_bytes
    report = kvpress.memory_report(cache, *branches)
    assert report.uncompressed_bytes == 11 * kvpress.memory_report(cache).uncompressed_bytes
    assert "bits per value" in str(report)


def test_evicting_from_one_leaves_the_other_as_it_is() -> None:
    model, press = tiny_model("llama"), kvpress.KnormPress(0.5)
    cache = prefill(model, kvpress.get_press("none"), tokens(2, 40))
    branch = kvpress.branch(cache)
    keys = [layer.keys.clone() for layer in cache.layers]
    with press(model):
        model(tokens(2, 6, seed=3), past_key_values=branch)
    assert kvpress.memory_report(branch).kept < kvpress.memory_report(branch).seen
    assert all(torch.equal(layer.keys, before) for layer, before in zip(cache.layers, keys, strict=True))


def test_tokens_can_be_taken_back_as_before() -> None:
    model = tiny_model("llama")
    cache = prefill(model, kvpress.get_press("none"), tokens(2, 40))
    branch = kvpress.branch(cache)
    branch.crop(-10)
    assert (branch.get_seq_length(), cache.get_seq_length()) == (30, 40)
    expected = prefill(model, kvpress.get_press("none"), tokens(2, 40)[:, :30])
    mask = torch.ones(2, 30, dtype=torch.long)
    assert torch.equal(go_on(model, None, branch, mask, 1), go_on(model, None, expected, mask, 1))


def test_a_branch_is_read_without_a_press() -> None:
    model = tiny_model("llama")
    stock = DynamicCache(config=model.config)
    model(tokens(2, 20), past_key_values=stock)
    cache = prefill(model, kvpress.get_press("none"), tokens(2, 20))
    logits = model(tokens(2, 3, seed=1), past_key_values=kvpress.branch(cache)).logits
    torch.testing.assert_close(logits, model(tokens(2, 3, seed=1), past_key_values=stock).logits, atol=1e-4, rtol=1e-4)


def test_caches_without_branches_are_refused() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([20, 12])
    cache = prefill(model, kvpress.get_press("none"), ids, mask)
    before = positions(cache)
    with pytest.raises(ValueError, match=r"attention_mask=.* all 20 tokens"):
        kvpress.branch(cache)
    with pytest.raises(ValueError, match=r"\(2, 20\), got \(2, 8\)"):
        kvpress.branch(cache, mask[:, :8])
    with pytest.raises(TypeError, match="got tuple"):
        kvpress.branch(())  # type: ignore[type-var]
    with pytest.raises(TypeError, match="got list"):
        kvpress.memory_report(cache, [])
    assert positions(cache) == before
