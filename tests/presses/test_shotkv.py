# SPDX-License-Identifier: Apache-2.0
"""Shots that stay, from eager attention, whole and in all layers and heads; generated tokens, replayed token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import ShotKVPress
from kvpress.presses.shotkv import best_that_fit
from kvpress.testing.oracle import decode_both
from tests.caches import CODEC, generate, positions, prefill
from tests.models import full_layers, grow, position_ids, tiny_model, tokens
from tests.presses.test_scores import weights
from tests.probes import Watching
from tests.words import Words, batch_of, ids_of

SEPARATOR, WINDOW = "<|im_start|>", 4
SIZES = [7, 4, 9, 5, 6]
"""Words of each shot, without the separator before it."""
ROWS = [ids_of(3, *(part for size in SIZES for part in (SEPARATOR, size)), SEPARATOR, 5)]
ROWS.append(ids_of(1, *(part for size in SIZES[:3] for part in (SEPARATOR, size)), SEPARATOR, 2))
SHOTS = [
    [range(3, 11), range(11, 16), range(16, 26), range(26, 32), range(32, 39)],
    [range(1, 9), range(9, 14), range(14, 24)],
]


def press(ratio: float = 0.5, **settings: Any) -> ShotKVPress:
    return ShotKVPress(ratio, SEPARATOR, window_size=WINDOW, tokenizer=Words(), **settings)


def chosen(scores: list[float], sizes: list[int], room: int) -> list[int]:
    kept: list[int] = []
    for shot in sorted(range(len(scores)), key=lambda shot: -scores[shot]):
        if not kept or sum(sizes[chosen_shot] for chosen_shot in kept) + sizes[shot] <= room:
            kept.append(shot)
    return sorted(kept)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_the_shots_with_the_most_attention_stay_whole(family: str) -> None:
    model = tiny_model(family, "eager")
    kept = positions(prefill(model, press(), *batch_of(*ROWS)))
    for row, shots in enumerate(SHOTS):
        ids, pads = ROWS[row], ROWS[0].shape[1] - ROWS[row].shape[1]
        paid = torch.stack(
            [weights(model, ids)[layer][0, :, -WINDOW:].mean(dim=(0, 1)) for layer in full_layers(model)]
        )
        scores = [float(paid[:, list(shot)].mean()) for shot in shots]
        tokens_of = [len(shot) for shot in shots]
        gone = [
            t for i, shot in enumerate(shots) if i not in chosen(scores, tokens_of, sum(tokens_of) // 2) for t in shot
        ]
        assert 0 < len(gone) < sum(tokens_of)
        expected = [pads + t for t in range(ids.shape[1]) if t not in gone]
        for layer in full_layers(model):
            assert [[at for at in head if at >= pads] for head in kept[layer][row]] == [expected] * 2


def test_ranges_and_separators_name_the_same_shots() -> None:
    model = tiny_model("llama")
    ranges = " ".join(f"{shot.start}:{shot.stop}" for shot in SHOTS[0])
    by_range = kvpress.get_press(f"shotkv:0.5,shots={ranges},window_size={WINDOW}")
    assert positions(prefill(model, by_range, ROWS[0])) == positions(prefill(model, press(), ROWS[0]))
    with pytest.raises(ValueError, match="16:26 ends past a prompt of 20 tokens"):
        prefill(model, by_range, ROWS[0][:, :20])


@pytest.mark.parametrize("suffix", ["none", CODEC, "quest:budget=16,page_size=4,skip_layers=0"])
def test_whole_shots_beside_codecs_and_selectors(suffix: str) -> None:
    model, (ids, mask) = tiny_model("llama"), batch_of(*ROWS)
    with (press() + kvpress.get_press(suffix))(model):
        kept_pairs = positions(generate(model, ids, mask).past_key_values)
    for layer in kept_pairs:
        for row, heads in enumerate(layer):
            pads = ids.shape[1] - ROWS[row].shape[1]
            for head in heads:
                kept = {at - pads for at in head}
                is_whole = [set(shot) <= kept for shot in SHOTS[row]]
                assert any(is_whole)
                assert not all(is_whole)
                assert all(is_whole[i] or not set(shot) & kept for i, shot in enumerate(SHOTS[row]))


def test_decoding_reads_the_shots_that_stay() -> None:
    ids, mask = batch_of(*ROWS)
    actual, expected, cache = decode_both(tiny_model("llama"), press(), ids, mask)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
    assert kvpress.memory_report(cache).kept < kvpress.memory_report(cache).seen


def test_shots_are_judged_once_and_later_turns_bring_their_own() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with press(0.4)(model):
        model(ROWS[0], past_key_values=cache)
        first = positions(cache)[0][0][0]
        more = ids_of(4, SEPARATOR, 6, SEPARATOR, 3)
        model(more, past_key_values=cache)
    later = positions(cache)[0][0][0]
    assert [at for at in later if at < 39] == [at for at in first if at < 39]
    # The question of the first prompt has become a shot, and so has the one after it: the better one stays.
    question, shot = set(range(39, 49)), set(range(49, 56))
    assert (question <= set(later)) != (shot <= set(later))


def test_chunks_of_a_prompt_change_nothing() -> None:
    model = tiny_model("llama")
    with press()(model):
        outcomes = [
            positions(generate(model, ROWS[0], **settings).past_key_values)
            for settings in ({}, {"prefill_chunk_size": 9})
        ]
    assert outcomes[0] == outcomes[1]


def test_the_best_that_fit() -> None:
    scores, sizes = torch.tensor([0.3, 0.9, 0.5, 0.4]), torch.tensor([2.0, 6.0, 5.0, 2.0])
    assert best_that_fit(scores, sizes, 10).tolist() == [True, True, False, True]
    assert best_that_fit(scores, sizes, 3).tolist() == [False, True, False, False]


class Replay:
    """Replay of the cuts of generated tokens in plain code: `kept[row]` are the positions that stay in all layers and heads."""

    ratio, interval, recent = 0.4, 3, 2

    def __init__(self, model: Any, rows: list[Tensor]) -> None:
        self.model, self.layers = model, full_layers(model)
        self.pads = [max(row.shape[1] for row in rows) - row.shape[1] for row in rows]
        self.kept: list[list[int]] = [[] for _ in rows]
        self.queries: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.since = [0] * len(rows)
        self.evicted = [0] * len(rows)

    def note(self, call: Any) -> None:
        """Store the queries and keys of all tokens so far, `[B, heads, n, D]`."""
        for arrays, new in ((self.queries, call.queries), (self.keys, call.written[0])):
            at = call.layer.index
            arrays[at] = torch.cat([arrays[at], new.double()], dim=2) if at in arrays else new.double()

    def attention(self, layer: int, row: int, pairs: list[int]) -> Tensor:
        """Return the mean attention `[n]` of the newest queries on pairs of a row, summed over heads."""
        attention, total = self.model.model.layers[layer].self_attn, torch.zeros(len(pairs), dtype=torch.float64)
        queries, keys = self.queries[layer][row], self.keys[layer][row]
        first = queries.shape[1] - WINDOW
        for head, of_head in enumerate(queries):
            for i in range(first, first + WINDOW):
                visible = torch.tensor([at <= i for at in pairs])
                logits = keys[head * len(keys) // len(queries), pairs] @ of_head[i] * attention.scaling
                logits = logits.masked_fill(~visible, -torch.inf)
                if hasattr(attention, "sinks"):
                    logits = torch.cat([logits, attention.sinks[head].double()[None]])
                total += logits.softmax(dim=0)[: len(pairs)] / WINDOW
        return total

    def step(self, prompt: int, at: int, shots: list[list[int]]) -> None:
        """Read the token at column `at`; `shots[row]` are the columns of the prompt that stay."""
        for row, kept in enumerate(self.kept):
            kept.append(at)
            self.since[row] += 1
            count = max(self.recent, int((at + 1 - prompt) * (1 - self.ratio)))
            if self.since[row] < self.interval or count >= at + 1 - prompt:
                continue
            pairs = [*shots[row], *kept]
            scores = sum(self.attention(layer, row, pairs) for layer in self.layers)
            worth = dict(zip(pairs, scores.tolist(), strict=True))
            older = sorted(kept[: len(kept) - self.recent], key=lambda token: -worth[token])
            kept[:] = sorted(older[: count - self.recent] + kept[len(kept) - self.recent :])
            self.since[row] = 0
            self.evicted[row] += 1


@pytest.mark.parametrize("shot_ratio", [0.0, 0.5])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_generated_tokens_with_the_most_attention_stay_in_all_layers_and_heads(family: str, shot_ratio: float) -> None:
    model, (ids, mask) = tiny_model(family, "eager"), batch_of(*ROWS)
    replay, prompt = Replay(model, ROWS), ids.shape[1]
    settings = {"decode_ratio": replay.ratio, "interval": replay.interval, "recent": replay.recent}
    cache = DynamicCache(config=model.config)
    with (press(shot_ratio, **settings) + Watching(replay.note))(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask))
        layer = replay.layers[0]
        shots = [[at for at in heads[0] if at >= replay.pads[row]] for row, heads in enumerate(positions(cache)[layer])]
        for step, new in enumerate(tokens(2, 14, seed=4).split(1, dim=1), start=1):
            grown = grow(mask, step)
            model(new, attention_mask=grown, past_key_values=cache, position_ids=position_ids(grown, 1))
            replay.step(prompt, prompt + step - 1, shots)
            for layer in replay.layers:
                for row, heads in enumerate(positions(cache)[layer]):
                    stored = [[at for at in head if at >= replay.pads[row]] for head in heads]
                    assert stored == [shots[row] + replay.kept[row]] * 2, (step, layer, row)
    assert replay.evicted == [4, 4]
    assert [len(kept) for kept in replay.kept] == [9, 9]


def test_the_ratio_of_generated_tokens_is_that_of_the_prompt_unless_given() -> None:
    model, lengths = tiny_model("llama"), {}
    for decode_ratio in (None, 0.0, 0.75):
        with press(0.5, decode_ratio=decode_ratio, interval=4, recent=1)(model):
            cache = generate(model, ROWS[0], max_new_tokens=17).past_key_values
        lengths[decode_ratio] = [sum(at >= ROWS[0].shape[1] for at in head) for head in positions(cache)[0][0]]
    assert lengths == {None: [8, 8], 0.0: [16, 16], 0.75: [4, 4]}


def test_another_press_may_evict_the_generated_tokens_of_kept_shots() -> None:
    scope = kvpress.ScopePress(budget=4, recent=2)
    with pytest.raises(ValueError, match="one eviction while decoding for the same pairs"):
        press(0.5) + scope
    with (press(0.5, decode_ratio=0.0) + scope)(tiny_model("llama")):
        cache = generate(tiny_model("llama"), ROWS[0], max_new_tokens=17).past_key_values
    assert [sum(at >= ROWS[0].shape[1] for at in head) for head in positions(cache)[0][0]] == [4, 4]


def test_bad_shots_are_refused() -> None:
    with pytest.raises(ValueError, match="give either separator="):
        ShotKVPress(0.5, separator="Q:", shots="0:4")
    with pytest.raises(ValueError, match="shots must be ranges first:end"):
        ShotKVPress(0.5, shots="4")
    with pytest.raises(ValueError, match="there is none beside"):
        prefill(tiny_model("llama"), ShotKVPress(0.5, separator="Q:"), tokens(1, 20))
