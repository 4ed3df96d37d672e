# SPDX-License-Identifier: Apache-2.0
"""Patterns choose the tiles that a prompt reads; other tiles are neither seen nor computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.core.model import ModelFacts
from kvpress.core.pattern import Pattern, PromptTensors
from kvpress.core.recipe import Recipe
from kvpress.kernels import Tiles
from tests.models import padded_batch, position_ids, tiny_model, tokens

BLOCK = 8


@dataclass
class Shape(Pattern):
    """Pattern of the first tile and the newest `recent` tiles."""

    recent: int
    block: int = BLOCK

    def tiles(self, prompt: PromptTensors) -> Tiles:
        row = (torch.arange(0, prompt.new, self.block) + prompt.total - prompt.new) // self.block
        column = torch.arange(-(-prompt.total // self.block))
        read = (column == 0) | (column > row[:, None] - self.recent)
        return Tiles(read.expand(prompt.shape(self.block)), self.block)


@dataclass
class Patterned(kvpress.BasePress):
    recent: int

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(pattern=lambda layer: Shape(self.recent))


def read(model: Any, press: Any, ids: Tensor, mask: Tensor | None, chunk: int | None = None) -> Tensor:
    """Return logits of the last token of a prompt."""
    with press(model):
        out = model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk,
                             output_logits=True, return_dict_in_generate=True)  # fmt: skip
    return out.logits[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk", [None, 13])
def test_a_pattern_of_everything_is_full_attention(family: str, padded: bool, chunk: int | None) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask = padded_batch([45, 29]) if padded else (tokens(2, 45), None)
    sparse, expected = (read(model, press, ids, mask, chunk) for press in (Patterned(100), kvpress.NonePress()))
    torch.testing.assert_close(sparse, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recent", [1, 2, 3])
def test_other_tiles_are_not_seen(recent: int) -> None:
    model, ids = tiny_model("llama"), tokens(2, 45)
    tile = torch.arange(45) // BLOCK
    seen = (tile == 0) | (tile > tile[:, None] - recent)
    seen &= torch.arange(45) <= torch.arange(45)[:, None]
    expected = model(ids, attention_mask=seen.expand(2, 1, -1, -1)).logits[:, -1]
    torch.testing.assert_close(read(model, Patterned(recent), ids, None), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected, model(ids).logits[:, -1], atol=1e-2)


def test_a_padded_row_is_read_as_that_row_alone() -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([45, 29])
    alone = read(model, Patterned(2), ids[1:, 16:], None)
    torch.testing.assert_close(read(model, Patterned(2), ids, mask)[1:], alone, atol=1e-4, rtol=1e-4)


def test_a_later_turn_reads_sealed_pairs_and_its_own_tiles() -> None:
    model, ids = tiny_model("llama"), tokens(2, 85)
    cache, sealing = DynamicCache(config=model.config), kvpress.QuestPress(budget=4096, page_size=4, skip_layers=0)
    with (sealing + Patterned(100))(model):
        model(ids[:, :40], past_key_values=cache)
        assert cache.layers[0].store.segments
    first = cache.layers[0].store.window.first
    tile, at = torch.arange(85 - first) // BLOCK, torch.arange(85 - first)
    seen = torch.ones(85, 85, dtype=torch.bool).tril()
    row = (torch.arange(45) // BLOCK * BLOCK + 40 - first) // BLOCK  # first query of each block
    seen[40:, first:] = ((tile == 0) | (tile > row[:, None] - 2)) & (
        at <= torch.arange(40 - first, 85 - first)[:, None]
    )
    expected = model(ids, attention_mask=seen.expand(2, 1, -1, -1)).logits[:, -1]
    with (sealing + Patterned(2))(model):
        logits = model(ids[:, 40:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


def test_the_operator_reads_the_listed_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    plain = Tiles.lists

    def lists(self: Tiles, *sizes: int) -> Any:
        listed.append(plain(self, *sizes))
        return listed[-1]

    monkeypatch.setattr(Tiles, "lists", lists)
    model = tiny_model("llama")
    read(model, Patterned(2), tokens(1, 80), None)
    heads = model.config.num_attention_heads
    assert [len(call.tiles) for call in listed] == [heads * (1 + 2 + 8 * 3)] * model.config.num_hidden_layers


def test_presses_that_sum_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="AttentionMass cannot watch a prompt that is read by a pattern"):
        (Patterned(2) + kvpress.H2OPress(0.5)).recipe()


def test_it_composes_with_eviction_codec_and_selector() -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([70, 50])
    others = kvpress.get_press("snapkv:0.5,window_size=4 + kivi:bits=4,group_size=16,residual_length=0")
    press = Patterned(2) + others
    with press(model) as session:
        model.generate(ids, attention_mask=mask, position_ids=position_ids(mask), max_new_tokens=2, do_sample=False)
    assert session.cache.layers[0].store.segments
    assert [len(row[0]) for row in kvpress.kept_positions(session.cache)[0]] == [35 + 1, 25 + 1]
    with pytest.raises(ValueError, match="one pattern for the same pairs"):
        Patterned(2) + Patterned(3)
    assert not press.recipe().is_identity
