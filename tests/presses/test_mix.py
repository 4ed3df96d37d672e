# SPDX-License-Identifier: Apache-2.0
"""Mixed scores against the ranks of both, and presses that cannot be mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from tests.models import tiny_model, tokens

LENGTH = 50


def kept(spec: str) -> list[list[int]]:
    model = tiny_model("llama")
    with kvpress.get_press(spec)(model) as session:
        model.generate(tokens(1, LENGTH), max_new_tokens=1, do_sample=False)
    return [head.tolist() for layer in kvpress.kept_positions(session.cache) for head in layer[0]]


def full_keys() -> list[Any]:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, LENGTH), past_key_values=cache)
    return [head.double() for layer in cache.layers for head in layer.keys[0]]


@pytest.mark.parametrize(("how", "weight"), [("rank", 0.5), ("rank", 0.2), ("max", 0.5)])
def test_pairs_are_kept_by_both_ranks(how: str, weight: float) -> None:
    kept_heads = kept(f"mix(knorm:0.5; keydiff):how={how},weight={weight}")
    for keys, kept_pairs in zip(full_keys(), kept_heads, strict=True):
        norm = -keys.norm(dim=1)
        anchor = torch.nn.functional.normalize(keys, dim=1).mean(dim=0)
        away = -torch.nn.functional.cosine_similarity(keys, anchor[None], dim=1)
        norm_rank, away_rank = (score.argsort().argsort().double() for score in (norm, away))
        score = torch.maximum(norm_rank, away_rank) if how == "max" else weight * norm_rank + (1 - weight) * away_rank
        # Equal scores may be decided either way; all that are better than the worst one kept are kept.
        lowest = score[kept_pairs].min()
        assert len(kept_pairs) == LENGTH // 2
        assert {i for i in range(LENGTH) if score[i] > lowest + 1e-6} <= set(kept_pairs)


def test_all_weight_on_one_is_that_one() -> None:
    assert kept("mix(knorm:0.5; keydiff):weight=1.0") == kept("knorm:0.5")
    assert kept("mix(keydiff:0.5; knorm):weight=0.0") == kept("knorm:0.5")


def test_pairs_protected_by_either_press_stay() -> None:
    for head in kept("mix(knorm:0.8; leverage_score:n_sink=3)"):
        assert head[:3] == [0, 1, 2]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mix(knorm:0.5; keydiff:0.5)", "leave out the ratio or budget of KeyDiffPress"),
        ("mix(knorm:0.5; kivi)", "needs a press that scores pairs"),
        ("mix(knorm:0.5; chunkkv(snapkv))", "chooses pairs in a way of its own"),
        ("mix(knorm:0.5; keydiff):how=mean", "how must be 'rank' or 'max'"),
        ("mix(knorm:0.5; kvzip)", "does more than score|reads"),
        ("mix(knorm:0.5; keydiff + minference:vertical=16,slash=32)", "does more than score"),
        ("mix(knorm:0.5; keydiff + fastv:0.5,layer=1,tokens=4:26)", "does more than score"),
        ("mix(knorm:0.5)", "needs|missing"),
    ],
)
def test_presses_that_cannot_be_mixed_are_refused(spec: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        kvpress.get_press(spec)


def test_a_prompt_that_either_press_keeps_whole_is_kept_whole() -> None:
    for spec in ("mix(knorm:0.5; snapkv)", "mix(snapkv:0.5; knorm)"):
        assert kept(spec) == [list(range(LENGTH))] * 6


def test_the_ratio_is_that_of_the_first_press() -> None:
    press = kvpress.get_press("mix(knorm:0.5; keydiff)")
    assert (press + kvpress.get_press("kivi")).compression_ratio == press.compression_ratio == 0.5
    press.compression_ratio = 0.9
    assert press == kvpress.get_press("mix(knorm:0.9; keydiff)")
