# SPDX-License-Identifier: Apache-2.0
"""InfLLM v2: blocks by the attention of their mean keys, against loops, and an index that grows with the pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.codec import DENSE_INTERVAL
from kvpress.sparse.infllm_v2 import MeanKeys
from tests.models import grow, padded_batch, tiny_model, tokens
from tests.sparse.selecting import build, prefilled, read_at_a_step, step

SPEC = "infllm_v2:budget={budget},block_size=8,kernel_size=8,stride=4,n_sink=8,n_recent=16"


def blocks_read(keys: Tensor, queries: Tensor, budget: int) -> list[int]:
    """Return the ranks of the pairs that queries `[G, D]` read of the `keys [n, D]` of a stream, by loops."""
    n = len(keys)
    starts = range(0, n - 8 + 1, 4)
    means = torch.stack([keys[s : s + 8].mean(dim=0) for s in starts])
    paid = torch.softmax(queries @ means.T / keys.shape[1] ** 0.5, dim=1).sum(dim=0)
    count = -(-n // 8)
    scores = {
        b: max([float(paid[j]) for j, s in enumerate(starts) if s < 8 * b + 8 and s + 8 > 8 * b], default=0.0)
        for b in range(count)
    }
    always = {0, count - 2, count - 1}
    best = sorted((b for b in scores if b not in always), key=lambda b: -scores[b])[: budget // 8 - len(always)]
    return [t for b in sorted({*always, *best}) for t in range(8 * b, min(8 * b + 8, n))]


@pytest.mark.parametrize("storage", ["dense", "ragged", "packed"])
def test_the_blocks_whose_mean_keys_get_most_attention_are_read(storage: str) -> None:
    press = build(SPEC, 64, storage)
    for keys, queries, ranks in read_at_a_step(press):
        assert ranks == blocks_read(keys, queries, 64)


def test_an_index_that_grew_equals_one_that_is_built_at_once() -> None:
    press = build(SPEC, 64)
    model, cache, mask = prefilled(press, padded=True, lengths=(90, 61))
    for i in range(DENSE_INTERVAL + 2):
        step(model, cache, mask, press, tokens(2, 1, seed=i))
        mask = grow(mask, 1)
    for layer in cache.layers:
        store = layer.store
        (grown,) = store.index.values()
        built = MeanKeys.build(store.segments, 8, 4)
        assert grown.layout.lengths == built.layout.lengths
        assert min(grown.pairs.lengths) > 61
        assert torch.equal(grown.means, built.means)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi3", "gpt_oss"])
def test_model_families_work(family: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask = padded_batch([150, 70])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    with kvpress.InfLLMv2Press()(model):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False), expected)
    with kvpress.get_press(SPEC.format(budget=32))(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert "indexes" in kvpress.memory_report(session.cache).components


def test_bad_arguments_are_refused() -> None:
    for words, arguments in {
        "block_size must be a multiple of stride=16, got 40": {"block_size": 40},
        "n_recent must be an integer >= 32, got 3|n_recent must be >= 32, got 3": {"n_recent": 3},
        "budget must be": {"budget": 100},
    }.items():
        with pytest.raises(ValueError, match=words):
            kvpress.InfLLMv2Press(**arguments)  # type: ignore[arg-type]
