# SPDX-License-Identifier: Apache-2.0
"""Thresholds: pairs above them or in the window are kept, in prompts and while tokens are generated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpress
from tests.caches import positions, prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens

LENGTH, WINDOW = 40, 6


def norms(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    return [layer.keys.norm(dim=-1) for layer in model(ids, use_cache=True).past_key_values.layers]


def middle(model: Any) -> float:
    """A threshold for `knorm` that about half of the pairs pass."""
    return -float(norms(model, tokens(2, LENGTH))[full_layers(model)[0]].median())


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_oss"])
def test_pairs_below_the_threshold_are_evicted_behind_the_window(family: str) -> None:
    model, (ids, mask) = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa"), padded_batch([LENGTH, 25])
    threshold = middle(model)
    with kvpress.DMSPress(kvpress.KnormPress(), threshold, WINDOW)(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=1)
    kept = kvpress.kept_positions(session.cache)
    sizes = set()
    for row, length in enumerate((LENGTH, 25)):
        alone = norms(model, ids[row : row + 1, -length:])
        for layer in full_layers(model):
            for head, size in enumerate(alone[layer][0]):
                stays = (-size >= threshold) | (torch.arange(length) >= length - WINDOW)
                expected = stays.nonzero().flatten() + LENGTH - length
                assert torch.equal(kept[layer][row][head], expected)
                sizes.add(len(expected))
    assert len(sizes) > 3


@pytest.mark.parametrize("interval", [1, 4])
def test_generated_tokens_are_judged_when_they_leave_the_window(interval: int) -> None:
    model, ids, total = tiny_model("llama"), tokens(2, LENGTH), LENGTH + 19
    # Nothing lies above 1, and everything above -1000.
    for threshold, decoding in ((1.0, True), (1.0, False), (-1000.0, True)):
        press = kvpress.DMSPress(kvpress.KnormPress(), threshold, WINDOW, decoding, interval=interval)
        with press(model) as session:
            model.generate(ids, max_new_tokens=20, do_sample=False)
        pending = 19 if not decoding else 19 % interval
        first = 0 if threshold < 0 else total - pending - WINDOW
        for layer in kvpress.kept_positions(session.cache):
            assert all(head.tolist() == list(range(first, total)) for row in layer for head in row)
        assert press.compression_ratio == pytest.approx(first / total)


def test_without_a_threshold_heads_compete_for_the_ratio() -> None:
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    with kvpress.DMSPress(kvpress.KnormPress(0.5), sliding_window_size=WINDOW)(model) as session:
        model.generate(ids, max_new_tokens=1)
    for layer, sizes in zip(kvpress.kept_positions(session.cache), norms(model, ids), strict=True):
        for row, heads in enumerate(layer):
            worth = -sizes[row]
            worth[:, -WINDOW:] = torch.inf
            best = torch.zeros(2 * LENGTH, dtype=torch.bool)
            best[worth.flatten().topk(LENGTH).indices] = True
            assert [head.tolist() for head in heads] == [
                mask.nonzero().flatten().tolist() for mask in best.view(2, LENGTH)
            ]


def test_attributes_that_scripts_set() -> None:
    model = tiny_model("llama")
    press: Any = kvpress.DMSPress(kvpress.KnormPress())
    with pytest.raises(ValueError, match="DMSPress would evict nothing"), press(model):
        pass
    press.threshold = -3.0
    with pytest.raises(AttributeError, match=r"because threshold=-3\.0 decides"):
        press.compression_ratio = 0.5
    with press(model):
        model.generate(tokens(1, 20), max_new_tokens=1)
    press.threshold = float("nan")
    with pytest.raises(ValueError, match="finite number or None, got nan"), press(model):
        pass
    for wrong in ("-3", True):
        with pytest.raises(TypeError, match="finite number or None"):
            kvpress.DMSPress(kvpress.KnormPress(), wrong)  # type: ignore[arg-type]


def test_a_threshold_takes_the_place_of_the_inner_ratio() -> None:
    model, ids = tiny_model("llama"), tokens(2, 30)
    expected = prefill(model, kvpress.DMSPress(kvpress.KeyDiffPress(), threshold=-0.1, sliding_window_size=4), ids)
    press = kvpress.DMSPress(kvpress.KeyDiffPress(0.9), threshold=-0.1, sliding_window_size=4)
    with pytest.warns(RuntimeWarning, match=r"threshold=-0.1 decides.*ratio or budget of KeyDiffPress is not used"):
        assert positions(prefill(model, press, ids)) == positions(expected)


@pytest.mark.parametrize("suffix", ["none", "kivi:bits=4,group_size=4,residual_length=4", "quest:budget=8,page_size=4"])
def test_without_a_window_heads_may_lose_all_pairs(suffix: str) -> None:
    model = tiny_model("llama")
    press = kvpress.DMSPress(kvpress.KnormPress(), threshold=1e9, sliding_window_size=0) + suffix
    with press(model) as session:
        generated = model.generate(tokens(2, 20), max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 24)
    assert {count for layer in session.cache.layers for count in layer.store.stored()} == {3}


def test_a_ratio_keeps_prompts_that_the_window_covers_and_shares_longer_ones_evenly() -> None:
    press = kvpress.DMSPress(kvpress.KnormPress(0.5), sliding_window_size=30)
    ids, mask = padded_batch([LENGTH, 25])
    for layer in kvpress.kept_positions(prefill(tiny_model("llama"), press, ids, mask)):
        assert [[len(head) for head in row] for row in layer] == [[LENGTH // 2] * 2, [25] * 2]
