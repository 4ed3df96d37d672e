# SPDX-License-Identifier: Apache-2.0
"""Heavy hitters, replayed query by query: layer 0's queries and keys do not depend on earlier evictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import H2OPress
from tests.models import padded_batch, position_ids, tiny_model, tokens
from tests.projections import KV_HEADS, projected

Kept = list[list[int]]


def replay(model: Any, ids: Tensor, passes: list[int], press: H2OPress) -> Kept:
    """Positions that every head of layer 0 keeps of `ids [1, T]`, read in passes of so many tokens."""
    seen = projected(model, ids, 0)
    queries, keys = seen["turned_q"][0].double(), seen["turned_k"][0].double()
    scale = model.model.layers[0].self_attn.scaling
    alive: Kept = [[] for _ in range(KV_HEADS)]
    mass = torch.zeros(KV_HEADS, ids.shape[1], dtype=torch.float64)
    read = num_passes = target = 0
    for new in passes:
        for t in range(read, read + new):
            if press.decay is not None:
                mass *= press.decay
            for head, at in enumerate(alive):
                at.append(t)
                for query in (2 * head, 2 * head + 1):
                    logits = keys[head, at] @ queries[query, t] * scale
                    mass[head, at] += torch.softmax(logits, dim=0)
        read += new
        num_passes += 1
        if new > 1:
            target = press.amount.of(read)
        elif num_passes < press.interval:
            continue
        num_passes = 0
        scores = mass / (read - torch.arange(ids.shape[1])) if press.normalize == "count" else mass
        recent = round(target * press.recent_ratio)
        for head, at in enumerate(alive):
            old, new_ones = at[: len(at) - recent], at[len(at) - recent :]
            heavy = sorted(old, key=lambda t: -float(scores[head, t]))[: max(0, target - recent)]
            alive[head] = sorted(heavy) + new_ones
    return alive


def read(model: Any, press: Any, parts: list[Tensor], masks: list[Tensor] | None = None) -> DynamicCache:
    """Read the parts one after the other, behind one cache."""
    cache = DynamicCache(config=model.config)
    with press(model):
        for i, part in enumerate(parts):
            mask = None if masks is None else torch.cat(masks[: i + 1], dim=1)
            at = position_ids(mask, part.shape[1])
            model(part, attention_mask=mask, past_key_values=cache, position_ids=at)
    return cache


MODES = {
    "sum": {},
    "count": {"normalize": "count"},
    "decay": {"normalize": "decay", "decay": 0.8},
    "every third": {"interval": 3},
    "decay every third": {"normalize": "decay", "decay": 0.95, "interval": 3},
    "mostly recent": {"recent_ratio": 0.8},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_prompt_generation_and_a_second_turn(family: str, mode: str) -> None:
    model, press = tiny_model(family), H2OPress(0.5, **MODES[mode])
    passes = [30, *[1] * 7, 9, *[1] * 5]
    ids = tokens(2, sum(passes))
    kept = kvpress.kept_positions(read(model, press, list(ids.split(passes, dim=1))))[0]
    for row in range(2):
        assert [head.tolist() for head in kept[row]] == replay(model, ids[row : row + 1], passes, press)


@pytest.mark.parametrize("mode", MODES)
def test_padding_gives_and_receives_nothing(mode: str) -> None:
    """The second turn is padded in the middle of its row; its padding must not attend to the first turn."""
    model, press = tiny_model("llama"), H2OPress(0.5, **MODES[mode])
    real = [[30, 8], [19, 3], [25, 5]]
    first, first_mask = padded_batch([turns[0] for turns in real], seed=1)
    second, second_mask = padded_batch([turns[1] for turns in real], seed=11)
    parts, masks = [first], [first_mask]
    for start in (40, 50):
        parts += tokens(3, 4, seed=start).split(1, dim=1)
        masks += [torch.ones(3, 1, dtype=torch.long)] * 4
        if start == 40:
            parts.append(second)
            masks.append(second_mask)
    cache = read(model, press, parts, masks)
    ids, mask = torch.cat(parts, dim=1), torch.cat(masks, dim=1).bool()
    kept = kvpress.kept_positions(cache)[0]
    for row, turns in enumerate(real):
        passes = [turns[0], 1, 1, 1, 1, turns[1], 1, 1, 1, 1]
        rank = mask[row].cumsum(0) - 1
        expected = replay(model, ids[row : row + 1, mask[row]], passes, press)
        assert [rank[head[mask[row][head]]].tolist() for head in kept[row]] == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 7, 29])
def test_a_prompt_in_chunks_is_one_prompt(mode: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress.cache.attention.BLOCK_BYTES", 4 * 4 * 2 * 30 * 3)
    model, press = tiny_model("llama"), H2OPress(0.5, **MODES[mode])
    ids, mask = padded_batch([30, 21])
    with press(model) as session:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, prefill_chunk_size=chunk)
    kept = kvpress.kept_positions(session.cache)[0]
    for row, length in enumerate((30, 21)):
        pads = 30 - length
        expected = replay(model, out[row : row + 1, pads:-1], [length, *[1] * 5], press)
        assert [(head - pads)[head >= pads].tolist() for head in kept[row]] == expected


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_decay_of_one_is_the_plain_sum(family: str) -> None:
    """Soft caps and learned sinks take part, whether the model's own attention ran or ours."""
    model, ids = tiny_model(family, "eager"), tokens(2, 40)
    parts = [*ids[:, :30].split(30, dim=1), *ids[:, 30:].split(1, dim=1)]
    plain = read(model, H2OPress(0.5), parts)
    decayed = read(model, H2OPress(0.5, normalize="decay", decay=1.0), parts)
    almost = read(model, H2OPress(0.5, normalize="decay", decay=1 - 1e-7), parts)
    for layer in (1, 2):
        (fading,) = almost.layers[layer].store.open_segment(None).side.values()
        for cache in (decayed, plain):
            mass = cache.layers[layer].store.open_segment(None).side["mass"]
            torch.testing.assert_close(mass, fading, atol=1e-4, rtol=1e-4)


def test_masses_follow_their_rows() -> None:
    """Rows are copied, dropped and reordered in the middle of generation, as beam search does."""
    model, press = tiny_model("llama"), H2OPress(0.5, normalize="decay", decay=0.9)
    ids, order = tokens(2, 40), [1, 1, 0]
    cache = DynamicCache(config=model.config)
    chunks = ids[:, :36].split([30, *[1] * 6], dim=1)
    later = tokens(3, 5, seed=7)
    with press(model):
        for chunk in chunks:
            model(chunk, past_key_values=cache)
        cache.reorder_cache(torch.tensor(order))
        for chunk in later.split(1, dim=1):
            model(chunk, past_key_values=cache)
    for row, source in enumerate(order):
        sequence = torch.cat([ids[source : source + 1, :36], later[row : row + 1]], dim=1)
        expected = replay(model, sequence, [30, *[1] * 11], press)
        assert [head.tolist() for head in kvpress.kept_positions(cache)[0][row]] == expected


def test_questions_are_read_without_cutting_the_context_and_generation_goes_on_at_the_budget() -> None:
    model, press, ids = tiny_model("llama"), H2OPress(0.5), tokens(1, 47)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids[:, :30], past_key_values=cache)
    with kvpress.reading(model, press):
        model(ids[:, 30:40], past_key_values=cache)
        assert {len(head) for layer in kvpress.kept_positions(cache) for head in layer[0]} == {25}
        for part in ids[:, 40:].split(1, dim=1):
            model(part, past_key_values=cache)
    assert {len(head) for layer in kvpress.kept_positions(cache) for head in layer[0]} == {15}


def test_without_an_eviction_of_the_prompt_the_ratio_is_of_the_prompt() -> None:
    model, ids = tiny_model("llama"), tokens(1, 36)
    cache = DynamicCache(config=model.config)
    with kvpress.PrefillDecodingPress(decoding_press=H2OPress(0.4))(model):
        model(ids[:, :30], past_key_values=cache)
        for part in ids[:, 30:].split(1, dim=1):
            model(part, past_key_values=cache)
            assert {len(head) for layer in kvpress.kept_positions(cache) for head in layer[0]} == {18}


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"normalize": "mean"}, "'none', 'count' or 'decay'"), ({"decay": 0.5}, "decay must be set if and only if"),
     ({"normalize": "decay"}, "decay must be set if and only if"), ({"interval": 0}, "interval must be >= 1"),
     ({"normalize": "decay", "decay": 0.0}, r"decay must be in \(0, 1\]"), ({"recent_ratio": 1.5}, "recent_ratio")],
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        H2OPress(0.5, **settings)
