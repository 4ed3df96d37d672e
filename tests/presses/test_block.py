# SPDX-License-Identifier: Apache-2.0
"""Blocks are scored one after the other, each together with the pairs that were kept before it."""

from __future__ import annotations

import pytest
import torch

import kvpress
from kvpress import BlockPress, KeyDiffPress, KnormPress
from tests.caches import positions, prefill
from tests.models import tiny_model, tokens
from tests.presses.scoring import marked
from tests.presses.test_keydiff import dissimilarity


@pytest.mark.parametrize(("length", "block", "kept"), [(40, 7, 12), (40, 1, 5), (40, 100, 12), (33, 8, 25)])
def test_the_working_set_is_cut_after_every_block(length: int, block: int, kept: int) -> None:
    model, ids = tiny_model("llama"), tokens(2, length)
    cache = prefill(model, BlockPress(KeyDiffPress(budget=kept), block), ids)
    stock = model(ids, use_cache=True).past_key_values
    for row in range(2):
        for head in range(2):
            keys, working_set = stock.layers[0].keys[row, head], list(range(kept))
            for start in range(kept, length, block):
                working_set += range(start, min(start + block, length))
                working_set = [working_set[i] for i in marked(dissimilarity(keys[working_set]), kept)]
            assert kvpress.kept_positions(cache)[0][row][head].tolist() == working_set


@pytest.mark.parametrize(
    "inner",
    ["knorm:0.5", "streaming_llm:0.5,n_sink=3", "observed_attention:0.5", "random:0.5", "random:0.5,seed=3"],
)
def test_scores_that_compare_nothing_choose_as_without_blocks(inner: str) -> None:
    model, ids = tiny_model("llama"), tokens(2, 40)
    torch.manual_seed(0)
    cache = prefill(model, BlockPress(kvpress.get_press(inner), 3), ids)
    torch.manual_seed(0)
    expected = prefill(model, kvpress.get_press(inner), ids)
    assert positions(cache) == positions(expected)


def test_configuration() -> None:
    with pytest.raises(ValueError, match="block_size must be >= 1, got 0"):
        BlockPress(KnormPress(), 0)
    with pytest.raises(TypeError, match="equally many pairs in every head, and CriticalAdaKVPress does not"):
        BlockPress(kvpress.CriticalAdaKVPress(KnormPress()))
    assert BlockPress(KnormPress()).block_size == 128
