"""A pattern says which tiles a prompt reads; what it leaves out is neither seen nor computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache import attention
from kvpress.core.model import ModelFacts
from kvpress.core.pattern import Pattern
from kvpress.core.recipe import Recipe
from kvpress.observe.call import LayerCall
from tests.models import padded_batch, position_ids, tiny_model, tokens

BLOCK = 8


@dataclass
class Shape(Pattern):
    """The first tile and the newest `recent` ones."""

    recent: int
    block: int = BLOCK

    def tiles(self, call: LayerCall, keys: Tensor) -> Tensor:
        new, total = call.queries.shape[2], keys.shape[2]
        row = (torch.arange(0, new, self.block) + total - new) // self.block
        column = torch.arange(-(-total // self.block))
        read = (column == 0) | (column > row[:, None] - self.recent)
        return read.expand(*call.queries.shape[:2], -1, -1)


@dataclass
class Patterned(kvpress.BasePress):
    recent: int

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(pattern=lambda layer: Shape(self.recent))


def read(model: Any, press: Any, ids: Tensor, mask: Tensor | None, chunk: int | None = None) -> Tensor:
    """Logits of the last token of a prompt."""
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
    found, expected = (read(model, press, ids, mask, chunk) for press in (Patterned(100), kvpress.NonePress()))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recent", [1, 2, 3])
def test_what_is_left_out_is_not_seen(recent: int) -> None:
    model, ids = tiny_model("llama"), tokens(2, 45)
    tile = torch.arange(45) // BLOCK
    seen = (tile == 0) | (tile > tile[:, None] - recent)
    seen &= torch.arange(45) <= torch.arange(45)[:, None]
    expected = model(ids, attention_mask=seen.expand(2, 1, -1, -1)).logits[:, -1]
    torch.testing.assert_close(read(model, Patterned(recent), ids, None), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected, model(ids).logits[:, -1], atol=1e-2)


def test_tiles_that_are_left_out_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Counted(attention.Logits):
        def __call__(self, queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
            sizes.append(keys.shape[-2])
            return super().__call__(queries, keys, *rest)

    monkeypatch.setattr("kvpress.hf.attention.Logits", Counted)
    read(tiny_model("llama"), Patterned(2), tokens(1, 80), None)
    assert max(sizes) == 3 * BLOCK


def test_it_composes_with_eviction_codec_and_selector() -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([70, 50])
    rest = kvpress.get_press("snapkv:0.5,window_size=4 + kivi:bits=4,group_size=16,residual_length=0")
    press = Patterned(2) + rest
    with press(model) as session:
        model.generate(ids, attention_mask=mask, position_ids=position_ids(mask), max_new_tokens=2, do_sample=False)
    assert session.cache.layers[0].store.segments
    assert [len(row[0]) for row in kvpress.kept_positions(session.cache)[0]] == [35 + 1, 25 + 1]
    with pytest.raises(ValueError, match="one pattern for the same pairs"):
        Patterned(2) + Patterned(3)
    assert not press.recipe().is_identity
