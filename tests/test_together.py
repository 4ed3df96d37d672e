# SPDX-License-Identifier: Apache-2.0
"""Presses that keep caches, take tokens back and find spans, together: each leaves the others their state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from tests.caches import positions
from tests.models import grow, position_ids, tiny_model
from tests.states import differences, state_of
from tests.words import Words, batch_of, ids_of

OPEN, CLOSE = "<think>", "</think>"
ROWS = ids_of("<|im_start|>system\n", 6, "<|im_end|>\n", OPEN, 9, CLOSE, 6), ids_of(2, OPEN, 3, CLOSE, 12)
TURN = torch.cat([ids_of(2, OPEN, 4, CLOSE, 3)] * 2)
"""Open and close a thought while tokens are generated."""


def thoughtful(inner: str = "knorm:0.5") -> Any:
    return kvpress.DropSpansPress(press=kvpress.get_press(inner), tokenizer=Words())


PRESSES = {
    "thoughts": lambda: thoughtful(),
    "thoughts and codes": lambda: thoughtful() + kvpress.get_press("kivi:bits=4,residual_length=8,group_size=8"),
    "protected": lambda: kvpress.get_press("tova:budget=36").protect(roles="system", tokenizer=Words()),
    "conversation": lambda: kvpress.get_press("conversation(knorm):budget=14,interval=4"),
    "refitted": lambda: kvpress.get_press("refit(snapkv:0.5,window_size=4) + rotated:bits=4"),
    "matched": lambda: kvpress.get_press("attention_matching:0.5"),
    "frontier": lambda: kvpress.get_press("frontier:smaller=4"),
}  # fmt: skip


class Talk:
    """Padded batch under a press, read token by token."""

    def __init__(self, name: str, family: str = "llama") -> None:
        self.model, self.press = tiny_model(family, "eager"), PRESSES[name]()
        self.cache: Any = DynamicCache(config=self.model.config)
        ids, self.mask = batch_of(*ROWS)
        with self.press(self.model):
            self.model(ids, attention_mask=self.mask, past_key_values=self.cache, position_ids=position_ids(self.mask))

    def follow(self, ids: Tensor) -> Tensor:
        outputs = []
        for new in ids.split(1, dim=1):
            self.mask = grow(self.mask, 1)
            at = position_ids(self.mask, 1)
            with self.press(self.model):
                outputs.append(
                    self.model(new, attention_mask=self.mask, past_key_values=self.cache, position_ids=at).logits
                )
        return torch.cat(outputs, dim=1)

    def copy(self) -> Talk:
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache)
        return twin

    def take_back(self, count: int) -> None:
        self.cache.crop(-count)
        self.mask = self.mask[:, :-count]


def same(first: Talk, second: Talk) -> None:
    unequal = differences(state_of(first.cache), state_of(second.cache))
    assert not unequal, unequal[:5]


@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.parametrize("kept", [1, 5, 9])
def test_tokens_that_closed_a_span_are_taken_back(name: str, kept: int) -> None:
    talk = Talk(name)
    talk.cache.activate_past_recording()
    never = talk.copy()
    talk.follow(TURN)
    talk.take_back(TURN.shape[1] - kept)
    never.follow(TURN[:, :kept])
    assert talk.mask.shape == never.mask.shape
    assert torch.equal(talk.follow(TURN[:, kept:]), never.follow(TURN[:, kept:]))
    same(talk, never)


@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.parametrize("read", [0, 4])
def test_a_file_keeps_the_state_of_spans_and_budgets(name: str, read: int, tmp_path: Path) -> None:
    """Saved before a thought, or in the middle of one, and while the cache records."""
    talk = Talk(name)
    talk.cache.activate_past_recording()
    if read:
        talk.follow(TURN[:, :read])
    loaded = talk.copy()
    kvpress.save(talk.cache, tmp_path / "cache.kv", talk.model, talk.press)
    loaded.cache = kvpress.load(tmp_path / "cache.kv", talk.model)
    loaded.press = PRESSES[name]()
    assert torch.equal(loaded.follow(TURN[:, read:]), talk.follow(TURN[:, read:]))
    assert positions(loaded.cache) == positions(talk.cache)


@pytest.mark.parametrize("name", PRESSES)
def test_branches_are_taken_back_each_for_itself(name: str) -> None:
    talk = Talk(name)
    talk.cache.activate_past_recording()
    talk.follow(TURN[:, :3])
    branched = talk.copy()
    branched.cache = kvpress.branch(talk.cache, talk.mask)
    never = branched.copy()
    branched.follow(TURN[:, 3:])
    talk.follow(TURN[:, 3:6])
    branched.take_back(TURN.shape[1] - 3)
    torch.testing.assert_close(branched.follow(TURN), never.follow(TURN), atol=1e-5, rtol=1e-5)
    assert positions(branched.cache) == positions(never.cache)
