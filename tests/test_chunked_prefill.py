# SPDX-License-Identifier: Apache-2.0
"""A prompt that is read in chunks keeps the same pairs as in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from tests.caches import CODEC, STORAGES, generate, positions, prefill
from tests.models import padded_batch, tiny_model, tokens
from tests.presses.evicting import EVICTING


class FromHidden(kvpress.ScorerPress):
    """Press of a user that scores from hidden states, and needs those of the whole prompt."""

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Any, attentions: Any, kwargs: Any
    ) -> Tensor:
        assert hidden_states.shape[1] == keys.shape[2]
        return hidden_states[..., 0][:, None].expand(keys.shape[:3])


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize(
    "spec",
    [
        *EVICTING,
        CODEC,
        STORAGES["quest"],
        STORAGES["composed"],
        "decoding(knorm):compression_interval=4,target_size=12",
        "own",
    ],
)
def test_chunked_prefill_keeps_the_same_pairs(spec: str, padded: bool) -> None:
    model = tiny_model("llama")
    press = FromHidden(0.5) if spec == "own" else kvpress.get_press(spec)
    ids, mask = padded_batch([40, 26, 13]) if padded else (tokens(2, 40), None)
    by_chunk = {}
    for chunk in (None, 7):
        with press(model):
            output = generate(model, ids, mask, prefill_chunk_size=chunk)
        by_chunk[chunk] = output.sequences, positions(output.past_key_values)
    assert by_chunk[7][1] == by_chunk[None][1]
    assert torch.equal(by_chunk[7][0], by_chunk[None][0])


@pytest.mark.parametrize("spec", ["knorm:0.5", "snapkv:0.5,window_size=4", "expected_attention:0.5"])
@pytest.mark.parametrize("all_ids", [True, False], ids=["all-ids", "new-ids"])
def test_a_later_turn_in_chunks(spec: str, all_ids: bool) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    context, question = tokens(2, 12), tokens(2, 15, seed=5)
    ids = torch.cat([context, question], dim=1) if all_ids else question
    mask = torch.ones(2, 27, dtype=torch.long)
    by_chunk = {}
    for chunk in (None, 7):
        cache = prefill(model, press, context)
        with press(model):
            output = generate(model, ids, mask, prefill_chunk_size=chunk, past_key_values=cache)
        by_chunk[chunk] = output.sequences, positions(output.past_key_values)
    assert by_chunk[7][1] == by_chunk[None][1]
    assert torch.equal(by_chunk[7][0], by_chunk[None][0])
