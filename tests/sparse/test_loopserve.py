# SPDX-License-Identifier: Apache-2.0
"""LoopServe: lines and scores against plain loops, when pairs are chosen, and the choice as a part of the cache."""

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
    inputs, last = prompt(40, 70), 6
    received, needed = covering_lines(inputs, last, 0.8)
    for ours, theirs in zip(received.unbind(2), newest_attention(inputs, last), strict=True):
        torch.testing.assert_close(ours, theirs)
    for row, head in ((0, 0), (1, 3)):
        paid = weights(inputs)[row, head, -last:].double()
        distance = torch.arange(70 - last, 70)[:, None] - torch.arange(70)
        lines = [(paid[:, t].sum().item(), 0, t) for t in range(70)]
        lines += [(paid[distance == o].sum().item(), 1, o) for o in range(70)]
        uncovered, chosen = paid.clone(), set()
        for _, kind, index in sorted(lines, key=lambda line: -line[0]):
            if 1 - uncovered.sum() / last >= 0.8:
                break
            is_on_line = (distance == index) if kind else (torch.arange(70) == index).expand(last, -1)
            if uncovered[is_on_line].sum() > 0:
                chosen.add((kind, index))
            uncovered[is_on_line] = 0
        assert {tuple(line) for line in needed[row, head].nonzero().tolist()} == chosen
    few, many = (int(covering_lines(inputs, last, share)[1].sum()) for share in (0.5, 0.95))
    assert 0 < few < many


def side_of(cache: Any, layer: int) -> Tensor:
    """Return the scores of a layer's pairs, `[B, H, columns]`, NaN where there is no pair."""
    store = cache.layers[layer].store
    scores = torch.full((store.batch * store.heads, store.seen), torch.nan)
    for segment in store.sealed:
        scores[segment.layout.stream_of_row, segment.slots().long()] = segment.side_array(SIDE)
    first = store.window.first
    scores[:, first : first + store.window.length] = store.window.side[SIDE].flatten(0, 1)
    return scores.view(store.batch, store.heads, -1)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_scores_are_the_attention_of_the_model(family: str) -> None:
    """Scores are checked after a prompt, a turn and some generated tokens; all pairs are read, so that queries agree."""
    model = tiny_model(family, "eager")
    press = kvpress.get_press(f"loopserve:budget=4096,coverage=1.0,{SETTINGS}")
    (ids, mask), cache = padded_batch([90, 61]), DynamicCache(config=model.config)
    new = tokens(2, 30 + EVERY, seed=3)
    read = [(ids, LAST), (new[:, :30], LAST), *((new[:, 30 + i : 31 + i], EVERY) for i in range(EVERY))]
    all_ids, seen = torch.cat([ids, new], dim=1), 0
    full = grow(mask, new.shape[1])
    paid = model(all_ids, attention_mask=full, position_ids=position_ids(full), output_attentions=True).attentions
    for chunk, num_queries in read:
        seen += chunk.shape[1]
        with press(model):
            at = position_ids(full[:, :seen], chunk.shape[1])
            model(chunk, attention_mask=full[:, :seen], position_ids=at, past_key_values=cache)
        if chunk.shape[1] == 1 and seen < all_ids.shape[1]:
            continue
        for layer in full_layers(model):
            scores = side_of(cache, layer)
            mean = (
                paid[layer][:, :, seen - num_queries : seen, :seen].unflatten(1, (scores.shape[1], -1)).mean(dim=(2, 3))
            )
            for row, pads in enumerate((0, 29)):
                logs = mean[row, :, pads:].log()
                pooled = torch.nn.functional.max_pool1d(logs, KERNEL, stride=1, padding=KERNEL // 2)
                torch.testing.assert_close(scores[row, :, pads:], pooled, atol=1e-3, rtol=1e-4)


def test_pairs_are_chosen_every_few_tokens_and_a_turn_reads_everything() -> None:
    model, cache = tiny_model("llama"), DynamicCache(config=tiny_model("llama").config)
    press = kvpress.get_press(f"loopserve:budget=24,coverage=1.0,{SETTINGS}")
    with press(model):
        model(tokens(2, 150), past_key_values=cache)
    chosen, judged = [], []
    for seed in range(2 * EVERY):
        step(model, cache, None, press, tokens(2, 1, seed=seed))
        store = cache.layers[1].store
        (choice,) = store.index.values()
        scores = store.segments[0].layout.pad(store.segments[0].side_array(SIDE), -torch.inf)
        assert choice.rows[0].shape == (4, 24)
        best = scores.topk(24).values.amin(dim=1, keepdim=True)
        rows = choice.rows[0].long() - torch.tensor(store.segments[0].layout.offsets[:-1])[:, None]
        assert bool((scores.gather(1, rows) >= best).all())
        chosen.append(choice.rows[0])
        judged.append(choice.judged)
    assert judged == [150] * (EVERY - 1) + [150 + EVERY] * EVERY + [150 + 2 * EVERY]
    assert not torch.equal(chosen[0], chosen[-1])
    expected = step(model, copy.deepcopy(cache), None, kvpress.NonePress(), tokens(2, 5, seed=40))
    torch.testing.assert_close(step(model, cache, None, press, tokens(2, 5, seed=40)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("storage", ["", "kivi:bits=4,residual_length=16 + ", "adakv(snapkv:0.3,window_size=4) + "])
def test_the_choice_is_a_part_of_the_cache(storage: str, tmp_path: Path) -> None:
    """A cache that is copied, written to a file, reordered or cropped continues with the same choice."""
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

    def continued(cache: Any, mask: Tensor, order: list[int]) -> Tensor:
        logits = []
        for seed in range(EVERY + 2):
            logits.append(step(model, cache, mask, press, tokens(2, 1, seed=50 + seed)[order]))
            mask = grow(mask, 1)
        return torch.cat(logits, dim=1)[order]

    expected = continued(cache, mask, [0, 1])
    cache.crop(-EVERY - 2)
    reordered = copy.deepcopy(saved)
    reordered.batch_select_indices(torch.tensor([1, 0]))
    others = (cache, [0, 1]), (loaded, [0, 1]), (saved, [0, 1]), (reordered, [1, 0])
    for copied, order in others:
        torch.testing.assert_close(continued(copied, mask[order], order), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected, continued(copy.deepcopy(saved), grow(mask, EVERY + 2), [0, 1]), atol=1e-3)
