# SPDX-License-Identifier: Apache-2.0
"""Presses that act while tokens are generated keep the declared number of pairs, on their schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from tests.caches import CODEC, generate, pairs, positions, prefill
from tests.models import padded_batch, position_ids, tiny_model, tokens
from tests.pairwise import every_pair

SCHEDULES = {
    "decoding": ("decoding(knorm):compression_interval=4,target_size=12", 9, 13),
    "decoding-snapkv": ("decoding(snapkv:window_size=4):compression_interval=3,target_size=12", 9, 12),
    "decoding-adakv": ("decoding(adakv(knorm)):compression_interval=4,target_size=12", 9, 13),
    "decoding-expected": ("decoding(expected_attention):compression_interval=5,target_size=12", 9, 16),
    "both": ("prefill_decoding(knorm:budget=8; decoding(knorm):compression_interval=4,target_size=6)", 9, 7),
    "h2o": ("h2o:budget=8", 9, 8),
    "h2o-interval": ("h2o:budget=8,interval=4", 9, 9),
}
STORED = {"dense": "", "codec": f" + {CODEC}", "quest": " + quest:budget=8,page_size=4,skip_layers=0"}
STORED["all"] = STORED["codec"] + STORED["quest"]


@every_pair(schedule=SCHEDULES, beams={"greedy": 1, "beams": 3}, stored=STORED)
def test_schedules_keep_the_declared_number_of_pairs(schedule: tuple[str, int, int], beams: int, stored: str) -> None:
    spec, steps, expected = schedule
    model = tiny_model("llama")
    ids, mask = padded_batch([30, 17, 11])
    rows = 3 * beams
    with kvpress.get_press(spec + stored)(model):
        output = generate(model, ids, mask, max_new_tokens=steps + 1, num_beams=beams)
    cache = output.past_key_values
    assert cache.get_seq_length() == 30 + steps
    for layer in cache.layers:
        counts = torch.tensor(layer.store.stored()).view(rows, 2)
        assert counts.sum(dim=1).tolist() == [2 * expected] * rows
        if "adakv" not in spec:
            assert counts.unique().tolist() == [expected]
    for layer in positions(cache):
        for row, heads in enumerate(layer):
            pads = 30 - [30, 17, 11][row // beams]
            assert all(at == sorted(set(at)) and at[0] >= pads and at[-1] == 29 + steps for at in heads)


def test_a_decoding_target_may_be_a_ratio() -> None:
    model = tiny_model("llama")
    with kvpress.get_press("decoding(knorm):compression_interval=4,target_ratio=0.75")(model):
        cache = generate(model, tokens(1, 28), max_new_tokens=13).past_key_values
    assert pairs(cache) == {(28 + 12) // 4}


def test_decoding_press_leaves_the_prompt_whole() -> None:
    model = tiny_model("llama")
    with kvpress.get_press("decoding(knorm):compression_interval=8,target_size=4")(model):
        cache = generate(model, tokens(1, 28), max_new_tokens=8).past_key_values
    assert pairs(cache) == {28 + 7}


@pytest.mark.parametrize("reading", [False, True], ids=["press", "reading"])
@pytest.mark.parametrize("base", ["knorm", "adakv(knorm)", "snapkv:window_size=2"])
def test_a_turn_counts_as_one_step_of_decoding(base: str, reading: bool) -> None:
    model, cache = tiny_model("llama"), DynamicCache()
    press = kvpress.get_press(f"decoding({base}):compression_interval=4,target_size=6")
    if reading:
        model(tokens(1, 20), past_key_values=cache)
    counts = []
    with kvpress.reading(model, press) if reading else press(model):
        for length in [20, 3, 1, 1, 1, 1][reading:]:
            model(tokens(1, length, seed=length), past_key_values=cache)
            counts.append(sum(cache.layers[0].store.stored()) / 2)
    assert counts[-5:] == [23, 24, 25, 6, 7]


@pytest.mark.parametrize("length", [5, 6, 9])
def test_a_turn_that_alone_fills_the_target_is_cut_at_once(length: int) -> None:
    model, cache = tiny_model("llama"), DynamicCache()
    with kvpress.get_press("decoding(knorm):compression_interval=100,target_size=6")(model):
        model(tokens(1, 20), past_key_values=cache)
        model(tokens(1, length, seed=1), past_key_values=cache)
    assert pairs(cache) == ({25} if length < 6 else {6})


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_turn_in_chunks_counts_as_one_step(chunk: int | None) -> None:
    model, cache = tiny_model("llama"), DynamicCache()
    with kvpress.get_press("decoding(knorm):compression_interval=3,target_size=6")(model):
        model(tokens(1, 20), past_key_values=cache)
        ids = torch.cat([tokens(1, 20), tokens(1, 5, seed=1)], dim=1)
        generate(model, ids, past_key_values=cache, max_new_tokens=4, prefill_chunk_size=chunk)
    assert pairs(cache) == {6 + 1}


def test_chunks_of_a_prompt_are_no_turns() -> None:
    model = tiny_model("llama")
    with kvpress.get_press("decoding(knorm):compression_interval=2,target_size=6")(model):
        cache = generate(model, tokens(1, 28), max_new_tokens=2, prefill_chunk_size=7).past_key_values
    assert pairs(cache) == {29}


@pytest.mark.parametrize("spec", [spec for spec, _, _ in SCHEDULES.values()])
def test_a_padded_row_decodes_on_schedule_as_if_it_were_alone(spec: str) -> None:
    model = tiny_model("llama")
    lengths = [30, 17, 11]
    ids, mask = padded_batch(lengths)
    with kvpress.get_press(spec)(model):
        together = generate(model, ids, mask, max_new_tokens=16).sequences
    for row, length in enumerate(lengths):
        with kvpress.get_press(spec)(model):
            alone = generate(model, ids[row : row + 1, -length:], max_new_tokens=16).sequences
        assert torch.equal(together[row, -16:], alone[0, -16:])


class OddPairs(kvpress.H2OPress):
    """Keeps every other pair of 24 or more, by a `compress` of its own."""

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return (keys, values) if keys.shape[2] < 24 else (keys[:, :, 1::2], values[:, :, 1::2])


BASES = {
    "scores": "knorm",
    "heads": "adakv(knorm)",
    "layers": "pyramidkv:window_size=4,beta=2",
    "all layers": "cake:window_size=4",
}


def read_turns(press: Any, ids: torch.Tensor, mask: torch.Tensor, rows: list[int]) -> list[Any]:
    """Read a prompt, a turn of 24 tokens and eight tokens; return the positions of all kept pairs after every pass."""
    model, cache, kept = tiny_model("llama"), DynamicCache(), []
    turns = [tokens(1, 24, seed=row + 1) for row in rows]
    generated = [tokens(1, 8, seed=row + 9) for row in rows]
    with press(model):
        for new in (ids, torch.cat(turns), *torch.cat(generated).split(1, dim=1)):
            mask = mask if new is ids else torch.cat([mask, torch.ones_like(new)], dim=1)
            model(new, attention_mask=mask, position_ids=position_ids(mask, new.shape[1]), past_key_values=cache)
            kept.append(positions(cache))
    return kept


def check_turns_of_rows(press: Any) -> list[Any]:
    """Check that two rows of a batch keep the pairs that they keep alone; return those of the batch after every pass."""
    ids, mask = padded_batch([40, 11])
    together = read_turns(press, ids, mask, [0, 1])
    for row, length in enumerate([40, 11]):
        pads = 40 - length
        alone = read_turns(press, ids[row : row + 1, -length:], torch.ones(1, length, dtype=torch.long), [row])
        for kept, expected in zip(together, alone, strict=True):
            for layer, layer_alone in zip(kept, expected, strict=True):
                assert [[at - pads for at in head if at >= pads] for head in layer[row]] == layer_alone[0]
    return together


@pytest.mark.parametrize("base", BASES)
def test_a_turn_is_cut_in_the_rows_whose_target_it_fills(base: str) -> None:
    """A turn of 24 tokens is as long as half of the text of the short row, and shorter than that of the long row."""
    together = check_turns_of_rows(
        kvpress.get_press(f"compression_ratio_decoding({BASES[base]}):compression_interval=4")
    )
    counts = [sum(map(len, heads)) for heads in together[1][0]]
    assert counts[0] == 2 * 64
    assert counts[1] < 2 * 35


def test_intervals_of_rows_begin_when_a_compress_of_users_cuts_them() -> None:
    check_turns_of_rows(OddPairs(0.5, interval=4))


def test_a_press_that_keeps_everything_delays_no_schedule() -> None:
    """Turns in which a lazy-layer press finds no lazy layer, beside an eviction every three tokens."""
    model, counts = tiny_model("llama"), []
    for spec in ("", "simlayerkv:n_recent=12,n_initial=2 + "):
        press = kvpress.get_press(f"{spec}decoding(keydiff):compression_interval=3,target_size=14")
        cache = DynamicCache(config=model.config)
        counts.append([])
        for turn, (length, steps) in enumerate([(40, 5), (9, 4), (20, 3)]):
            with press(model):
                for new in (tokens(1, length, seed=turn), *tokens(1, steps, seed=turn + 5).split(1, dim=1)):
                    model(new, past_key_values=cache)
                    counts[-1].append(pairs(cache))
    assert counts[0] == counts[1]


def test_parts_for_prompts_of_the_first_press_act() -> None:
    press = kvpress.get_press("prefill_decoding(knorm:0.5 + fastv:0.5,layer=1,tokens=4:26)")
    cache = prefill(tiny_model("llama"), press, tokens(1, 40))
    assert [layer.store.stored() for layer in cache.layers] == [[20, 20], [20, 20], [14, 14]]
    spec = "prefill_decoding(snapkv:0.5 + minference:vertical=16,slash=32; decoding(knorm):target_size=8)"
    assert kvpress.get_press(spec).recipe().pattern is not None


def test_parts_for_prompts_of_the_second_press_are_refused() -> None:
    with pytest.raises(ValueError, match="give that part to prefilling_press"):
        kvpress.get_press("prefill_decoding(decoding_press=h2o:0.5 + fastv:0.5,layer=1,tokens=4:26)")
    with pytest.raises(TypeError, match="drop tokens"):
        kvpress.get_press("twilight(quest:budget=16 + fastv:0.5,layer=1,tokens=4:26)")


def test_a_score_gets_no_hidden_states_from_before_tokens_read_without_the_press() -> None:
    """They would count as those of the tokens in between."""
    model, states = tiny_model("llama"), []

    class Watching(kvpress.ScorerPress):
        def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            states.append(hidden_states.shape[1])
            return keys.norm(dim=-1)

    press, cache = kvpress.DecodingPress(Watching(), 3, 12), DynamicCache(config=model.config)
    with press(model):
        model(tokens(1, 20), past_key_values=cache)
        model(tokens(1, 1), past_key_values=cache)
    with kvpress.reading(model):
        model(tokens(1, 5), past_key_values=cache)
    with press(model):
        for _ in range(5):
            model(tokens(1, 1), past_key_values=cache)
    assert states == [1] * 3 + [4] * 3
