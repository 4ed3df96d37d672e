# SPDX-License-Identifier: Apache-2.0
"""Importance and redundancy of R-KV, from the model's own queries and by loops over pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import RKVPress
from kvpress.cache import attention
from tests.caches import generate, pairs, prefill
from tests.models import padded_batch, tiny_model, tokens
from tests.presses.scoring import marked, one_view
from tests.presses.test_scores import weights
from tests.probes import Watching

LENGTH, WINDOW = 40, 6


def redundancy(keys: Tensor, similarity: float) -> Tensor:
    """Redundancy of one head's keys `[n, D]`, pair by pair; the newest copy of a key is not charged."""
    n = len(keys)
    charged = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        same = [t for t in range(n) if t != i and torch.cosine_similarity(keys[i], keys[t], dim=0) > similarity]
        for t in range(n):
            if t != i and t not in same[-1:]:
                charged[i, t] = torch.cosine_similarity(keys[i], keys[t], dim=0)
    return charged.mean(dim=0).softmax(dim=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt_oss"])
def test_scores_are_importance_less_redundancy(family: str) -> None:
    model, ids = tiny_model(family, "eager"), tokens(1, LENGTH)
    press = RKVPress(0.5, window_size=WINDOW, kernel_size=3, similarity=0.1, weight=0.4)
    layer = len(model.model.layers) - 1
    view, scores = one_view(model, press, ids, layer)
    paid = weights(model, ids)[layer][0, :, -WINDOW:, :-WINDOW].double()
    queries: dict[int, Tensor] = {}
    with Watching(lambda call: queries.__setitem__(call.layer.index, call.queries[0, :, -WINDOW:].double()))(model):
        model(ids)
    older, groups = LENGTH - WINDOW, paid.shape[0] // 2
    for head in range(2):
        keys, group = view.keys[0, head].double(), slice(head * groups, (head + 1) * groups)
        logits = queries[layer][group] @ keys[:older].T * view.call.logits.scale
        # Logits equal the logarithms of the model's weights up to a constant for each query.
        offsets = logits - paid[group].log()
        torch.testing.assert_close(offsets, offsets[..., :1].expand_as(offsets), atol=1e-3, rtol=1e-3)
        importance = logits.amax(dim=0).softmax(dim=-1).mean(dim=0)
        pooled = torch.stack([importance[max(0, t - 1) : t + 2].max() for t in range(older)])
        expected = 0.4 * pooled - 0.6 * redundancy(keys, 0.1)[:older]
        torch.testing.assert_close(scores[0, head, :older].double(), expected, atol=1e-6, rtol=1e-4)
        assert bool(scores[0, head, older:].isposinf().all())
        full = torch.cat([expected, torch.full((WINDOW,), torch.inf)])
        assert kvpress.kept_positions(prefill(model, press, ids))[layer][0][head].tolist() == marked(full, 20)


def test_of_repeated_keys_the_newest_stays() -> None:
    keys = torch.eye(6)[[0, 1, 0, 2, 0, 3]][None]
    redundancies = RKVPress(0.5).redundancy(keys)[0]
    assert redundancies[0] > redundancies[2] > redundancies[4] == redundancies[1] == redundancies[3] == redundancies[5]


def test_blocks_of_cosines_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(3, 50, 8, generator=torch.Generator().manual_seed(0))
    unblocked = RKVPress(similarity=0.3).redundancy(keys)
    monkeypatch.setattr(attention, "BLOCK_BYTES", 12 * 3 * 50 * 7)
    torch.testing.assert_close(RKVPress(similarity=0.3).redundancy(keys), unblocked)


def test_thoughts_are_cut_while_they_are_written() -> None:
    press = kvpress.get_press("decoding(r_kv:window_size=4):compression_interval=4,target_size=20")
    model = tiny_model("llama")
    with press(model):
        cache = generate(model, *padded_batch([30, 22]), max_new_tokens=9).past_key_values
    assert pairs(cache) == {20}


def test_prompts_that_are_all_window_keep_their_newest() -> None:
    assert pairs(prefill(tiny_model("llama"), RKVPress(budget=4), tokens(2, 8))) == {4}


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel_size must be odd, got 6"):
        RKVPress(0.5, kernel_size=6)
