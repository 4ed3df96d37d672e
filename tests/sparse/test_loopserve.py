# SPDX-License-Identifier: Apache-2.0
"""LoopServe: lines and scores against plain loops, when pairs are chosen again, and that the choice stays with the cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.sparse.lines import covering_lines, newest_attention
from tests.models import full_layers, grow, padded_batch, position_ids, tiny_model, tokens
from tests.sparse.selecting import step
from tests.sparse.test_patterns import prompt, weights

LAST, EVERY, KERNEL = 8, 4, 3
SETTINGS = f"last={LAST},every={EVERY},kernel_size={KERNEL}"
SIDE = f"loopserve {LAST} {EVERY} {KERNEL}"


def test_lines_are_taken_until_the_attention_is_covered() -> None:
    asked, last = prompt(40, 70), 6
    received, needed = covering_lines(asked, last, 0.8)
    for found, expected in zip(received.unbind(2), newest_attention(asked, last), strict=True):
        torch.testing.assert_close(found, expected)
    for row, head in ((0, 0), (1, 3)):
        paid = weights(asked)[row, head, -last:].double()
        distance = torch.arange(70 - last, 70)[:, None] - torch.arange(70)
        lines = [(paid[:, t].sum().item(), 0, t) for t in range(70)]
        lines += [(paid[distance == o].sum().item(), 1, o) for o in range(70)]
        left, taken = paid.clone(), set()
        for _, kind, place in sorted(lines, key=lambda line: -line[0]):
            if 1 - left.sum() / last >= 0.8:
                break
            on = (distance == place) if kind else (torch.arange(70) == place).expand(last, -1)
            if left[on].sum() > 0:
                taken.add((kind, place))
            left[on] = 0
        assert {tuple(line) for line in needed[row, head].nonzero().tolist()} == taken
    few, many = (int(covering_lines(asked, last, share)[1].sum()) for share in (0.5, 0.95))
    assert 0 < few < many


def side_of(cache: Any, layer: int) -> Tensor:
    """Scores of a layer's pairs, `[B, H, columns]`, NaN where there is no pair."""
    store = cache.layers[layer].store
    found = torch.full((store.batch * store.heads, store.seen), torch.nan)
    for segment in store.sealed:
        found[segment.layout.stream_of_row, segment.slots().long()] = segment.side_array(SIDE)
    first = store.window.first
    found[:, first : first + store.window.length] = store.window.side[SIDE].flatten(0, 1)
    return found.view(store.batch, store.heads, -1)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_scores_are_the_models_own_attention(family: str) -> None:
    """At the end of a prompt, of a turn, and of so many generated tokens; nothing is left out, so that queries are the same."""
    model = tiny_model(family, "eager")
    press = kvpress.get_press(f"loopserve:budget=4096,coverage=1.0,{SETTINGS}")
    (ids, mask), cache = padded_batch([90, 61]), DynamicCache(config=model.config)
    new = tokens(2, 30 + EVERY, seed=3)
    read = [(ids, LAST), (new[:, :30], LAST), *((new[:, 30 + i : 31 + i], EVERY) for i in range(EVERY))]
    whole, seen = torch.cat([ids, new], dim=1), 0
    full = grow(mask, new.shape[1])
    paid = model(whole, attention_mask=full, position_ids=position_ids(full), output_attentions=True).attentions
    for part, asking in read:
        seen += part.shape[1]
        with press(model):
            at = position_ids(full[:, :seen], part.shape[1])
            model(part, attention_mask=full[:, :seen], position_ids=at, past_key_values=cache)
        if part.shape[1] == 1 and seen < whole.shape[1]:
            continue
        for layer in full_layers(model):
            scores = side_of(cache, layer)
            mean = paid[layer][:, :, seen - asking : seen, :seen].unflatten(1, (scores.shape[1], -1)).mean(dim=(2, 3))
            for row, pads in enumerate((0, 29)):
                logs = mean[row, :, pads:].log()
                near = torch.nn.functional.max_pool1d(logs, KERNEL, stride=1, padding=KERNEL // 2)
                torch.testing.assert_close(scores[row, :, pads:], near, atol=1e-3, rtol=1e-4)


def test_pairs_are_chosen_again_after_so_many_tokens_and_a_turn_reads_everything() -> None:
    model, cache = tiny_model("llama"), DynamicCache(config=tiny_model("llama").config)
    press = kvpress.get_press(f"loopserve:budget=24,coverage=1.0,{SETTINGS}")
    with press(model):
        model(tokens(2, 150), past_key_values=cache)
    chosen, judged = [], []
    for seed in range(2 * EVERY):
        step(model, cache, None, press, tokens(2, 1, seed=seed))
        store = cache.layers[1].store
        (known,) = store.index.values()
        scores = store.segments[0].layout.pad(store.segments[0].side_array(SIDE), -torch.inf)
        assert known.rows[0].shape == (4, 24)
        best = scores.topk(24).values.amin(dim=1, keepdim=True)
        rows = known.rows[0].long() - torch.tensor(store.segments[0].layout.offsets[:-1])[:, None]
        assert bool((scores.gather(1, rows) >= best).all())
        chosen.append(known.rows[0])
        judged.append(known.judged)
    assert judged == [150] * (EVERY - 1) + [150 + EVERY] * EVERY + [150 + 2 * EVERY]
    assert not torch.equal(chosen[0], chosen[-1])
    whole = step(model, copy.deepcopy(cache), None, kvpress.NonePress(), tokens(2, 5, seed=40))
    torch.testing.assert_close(step(model, cache, None, press, tokens(2, 5, seed=40)), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("storage", ["", "kivi:bits=4,residual_length=16 + ", "adakv(snapkv:0.3,window_size=4) + "])
def test_the_choice_stays_with_the_cache(storage: str, tmp_path: Path) -> None:
    """A cache that is copied, written to a file, reordered or cropped goes on as it would have."""
    model, (ids, mask) = tiny_model("llama"), padded_batch([150, 97])
    press = kvpress.get_press(f"{storage}loopserve:budget=24,coverage=1.0,{SETTINGS}")
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, position_ids=position_ids(mask), past_key_values=cache)
    step(model, cache, mask, press)
    mask = grow(mask, 1)
    saved = copy.deepcopy(cache)
    kvpress.save(cache, tmp_path / "cache.kv", model)
    loaded = kvpress.load(tmp_path / "cache.kv", model)
    cache.activate_past_recording()

    def goes_on(cache: Any, mask: Tensor, order: list[int]) -> Tensor:
        found = []
        for seed in range(EVERY + 2):
            found.append(step(model, cache, mask, press, tokens(2, 1, seed=50 + seed)[order]))
            mask = grow(mask, 1)
        return torch.cat(found, dim=1)[order]

    expected = goes_on(cache, mask, [0, 1])
    cache.crop(-EVERY - 2)
    reordered = copy.deepcopy(saved)
    reordered.batch_select_indices(torch.tensor([1, 0]))
    others = (cache, [0, 1]), (loaded, [0, 1]), (saved, [0, 1]), (reordered, [1, 0])
    for other, order in others:
        torch.testing.assert_close(goes_on(other, mask[order], order), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected, goes_on(copy.deepcopy(saved), grow(mask, EVERY + 2), [0, 1]), atol=1e-3)
