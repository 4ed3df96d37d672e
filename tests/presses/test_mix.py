# SPDX-License-Identifier: Apache-2.0
"""Mixed scores against the ranks of both, and what cannot be mixed."""

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
    found = kept(f"mix(knorm:0.5; keydiff):how={how},weight={weight}")
    for keys, ours in zip(full_keys(), found, strict=True):
        norm = -keys.norm(dim=1)
        anchor = torch.nn.functional.normalize(keys, dim=1).mean(dim=0)
        away = -torch.nn.functional.cosine_similarity(keys, anchor[None], dim=1)
        one, two = (score.argsort().argsort().double() for score in (norm, away))
        score = torch.maximum(one, two) if how == "max" else weight * one + (1 - weight) * two
        # Equal scores may be decided either way; all that are better than the worst one kept are kept.
        least = score[ours].min()
        assert len(ours) == LENGTH // 2
        assert {i for i in range(LENGTH) if score[i] > least + 1e-6} <= set(ours)


def test_all_weight_on_one_is_that_one() -> None:
    assert kept("mix(knorm:0.5; keydiff):weight=1.0") == kept("knorm:0.5")
    assert kept("mix(keydiff:0.5; knorm):weight=0.0") == kept("knorm:0.5")


def test_what_either_protects_stays() -> None:
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
        ("mix(knorm:0.5)", "needs|missing"),
    ],
)
def test_what_cannot_be_mixed_is_refused(spec: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        kvpress.get_press(spec)
