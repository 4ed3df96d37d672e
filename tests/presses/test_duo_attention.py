# SPDX-License-Identifier: Apache-2.0
"""Streaming heads beside full heads, from tables and measured on the prompt."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import DuoAttentionPress, RLKVPress
from kvpress.presses import duo_attention
from kvpress.presses.head_table import read_head_table
from kvpress.testing.oracle import Oracle, decode_both
from tests.caches import generate, positions, prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.presses.test_head_table import write
from tests.presses.test_scores import weights

MEASURED = "duo_attention:0.5,on_the_fly_scoring=true,sink_size=2,recent_size=6,interval=4"
TABLE = [[0.9, 0.1], [0.2, 0.8], [0.3, 0.4]]
STREAMING = {(0, 1), (1, 0), (2, 0)}


@pytest.fixture
def table(tmp_path: Path) -> str:
    return write(tmp_path, "\n".join("\t".join(map(str, line)) for line in TABLE))


def by_table(table: str, interval: int = 4) -> RLKVPress:
    return RLKVPress(0.5, table=table, sink_size=2, recent_size=6, interval=interval)


def streams(cache: Any, row: int = 0) -> set[tuple[int, int]]:
    """Return (layer, head) of the streaming heads of a row: those with fewer pairs than the longest head."""
    growing = [
        layer_pairs
        for layer_pairs, layer in zip(positions(cache), cache.layers, strict=True)
        if hasattr(layer, "store")
    ]
    longest = max(len(head) for layer in growing for head in layer[row])
    return {(i, h) for i, layer in enumerate(growing) for h, head in enumerate(layer[row]) if len(head) < longest}


@pytest.mark.parametrize("press", [RLKVPress, DuoAttentionPress])
def test_listed_heads_keep_sinks_and_the_recent_window(press: Any, table: str) -> None:
    cache = prefill(tiny_model("llama"), press(0.5, table=table, sink_size=2, recent_size=6), tokens(2, 40))
    for row in range(2):
        assert streams(cache, row) == STREAMING
        for i, layer in enumerate(positions(cache)):
            for h, head in enumerate(layer[row]):
                assert head == ([0, 1, *range(34, 40)] if (i, h) in STREAMING else list(range(40)))


@pytest.mark.parametrize("chunk", [None, 9])
def test_streaming_heads_stay_bounded_while_tokens_are_generated(table: str, chunk: int | None) -> None:
    model = tiny_model("llama")
    cache, sizes = DynamicCache(config=model.config), []
    follow = tokens(2, 30, seed=3)
    with by_table(table)(model):
        generate(model, tokens(2, 40), past_key_values=cache, max_new_tokens=1, prefill_chunk_size=chunk)
        for step in range(30):
            model(follow[:, step : step + 1], past_key_values=cache)
            for i, layer in enumerate(positions(cache)):
                for row in layer:
                    for h, head in enumerate(row):
                        if (i, h) in STREAMING:
                            assert head[:2] == [0, 1]
                            assert set(range(41 + step - 6, 41 + step)) <= set(head)
                            sizes.append(len(head))
                        else:
                            assert head == list(range(41 + step))
    assert max(sizes) <= 2 + 6 + 4
    assert min(sizes) == 2 + 6


def test_half_the_heads_streaming_saves_almost_half_the_memory(table: str) -> None:
    model = tiny_model("llama")
    for press in (by_table(table), kvpress.get_press(MEASURED)):
        with press(model) as session:
            generate(model, tokens(2, 512), max_new_tokens=100)
        report = kvpress.memory_report(session.cache)
        assert 3 * 2 * 611 < report.kept <= 3 * 2 * (611 + 2 + 6 + 4)
        assert report.total_bytes <= 0.55 * report.uncompressed_bytes


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "phi3"])
def test_mask_oracle_after_the_prompt(family: str, padded: bool, table: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask = padded_batch([40, 26, 13]) if padded else (tokens(2, 40), None)
    for press in (by_table(table, interval=100), kvpress.get_press(MEASURED.replace("=4", "=100"))):
        actual, expected, cache = decode_both(model, press, ids, mask)
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
        report = kvpress.memory_report(cache)
        assert report.kept < report.seen


@pytest.mark.parametrize("source", ["table", "measured"])
def test_mask_oracle_while_tokens_are_generated(source: str, table: str) -> None:
    """Every step equals full attention with the evicted pairs masked."""
    model = tiny_model("llama")
    press = by_table(table) if source == "table" else kvpress.get_press(MEASURED)
    cache, stock = DynamicCache(config=model.config), DynamicCache(config=model.config)
    ids, follow = tokens(2, 40), tokens(2, 14, seed=6)
    steps = []
    with press(model):
        model(ids, past_key_values=cache)
        for step in range(14):
            kept = kvpress.kept_positions(cache)
            steps.append((kept, model(follow[:, step : step + 1], past_key_values=cache).logits))
    model(ids, past_key_values=stock)
    for step, (kept, logits) in enumerate(steps):
        expected = Oracle(model, kept, 40 + step).logits(follow[:, step : step + 1], stock, None, None)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert len({len(kept[1][0][0]) for kept, _ in steps} | {len(kept[0][0][0]) for kept, _ in steps}) > 4


def outside(model: Any, ids: Tensor, sink: int, recent: int) -> Tensor:
    """Mean attention per kv head, `[B, L, H]`, that sampled queries pay beyond sinks and their recent window."""
    length = ids.shape[1]
    sample = [i for i in range(sink + recent, length) if bool(duo_attention.in_sample(torch.tensor(i)))]
    assert len(sample) > 2
    layer_means = []
    for layer in full_layers(model):
        rows = [weights(model, ids)[layer][:, :, i, sink : i - recent + 1].sum(dim=-1) for i in sample]
        layer_means.append(torch.stack(rows).mean(dim=0).unflatten(1, (2, -1)).mean(dim=2))
    return torch.stack(layer_means, dim=1)


@pytest.mark.parametrize("chunk", [None, 17])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss", "smollm3"])
def test_measured_heads_are_those_that_look_least_far(family: str, chunk: int | None, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvpress.cache.attention.BLOCK_BYTES", 4 * 4 * 2 * 80 * 3)
    model, ids = tiny_model(family, "eager"), tokens(2, 80)
    with kvpress.get_press(MEASURED)(model) as session:
        generate(model, ids, max_new_tokens=1, prefill_chunk_size=chunk)
    scores = outside(model, ids, 2, 6)
    layers = full_layers(model)
    for row in range(2):
        order = scores[row].flatten().argsort()[: len(layers)].tolist()
        assert streams(session.cache, row) == {(n // 2, n % 2) for n in order}


def test_a_padded_row_equals_that_row_alone() -> None:
    model, lengths = tiny_model("llama"), [60, 46, 20]
    ids, mask = padded_batch(lengths)
    press = kvpress.get_press(MEASURED)
    with press(model):
        together = generate(model, ids, mask, max_new_tokens=12)
    for row, length in enumerate(lengths):
        with press(model):
            alone = generate(model, ids[row : row + 1, -length:], max_new_tokens=12)
        assert torch.equal(together.sequences[row, 60:], alone.sequences[0, length:])
        for batch_layer, alone_layer in zip(
            positions(together.past_key_values), positions(alone.past_key_values), strict=True
        ):
            assert [
                [at - (60 - length) for at in head if at >= 60 - length] for head in batch_layer[row]
            ] == alone_layer[0]


def test_the_first_prompt_decides_for_later_turns_and_rows_take_their_choice_along() -> None:
    model, press = tiny_model("llama"), kvpress.get_press(MEASURED)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(tokens(3, 60), past_key_values=cache)
        before = [streams(cache, row) for row in range(3)]
        assert len({frozenset(heads) for heads in before}) > 1
        model(tokens(3, 40, seed=5), past_key_values=cache)
        assert [streams(cache, row) for row in range(3)] == before
        cache.batch_select_indices(torch.tensor([2, 0]))
        for step in range(9):
            model(tokens(2, 1, seed=step), past_key_values=cache)
        assert [streams(cache, row) for row in range(2)] == [before[2], before[0]]


def test_beams() -> None:
    model = tiny_model("llama")
    with kvpress.get_press(MEASURED)(model) as session:
        model.generate(tokens(2, 60), max_new_tokens=12, num_beams=3, do_sample=False)
    assert all(len(streams(session.cache, row)) == 3 for row in range(6))


@pytest.mark.parametrize("length", [1, 8, 9])
def test_a_prompt_inside_the_window_is_left_whole(length: int, table: str) -> None:
    for press in (by_table(table), kvpress.get_press(MEASURED)):
        cache = prefill(tiny_model("llama"), press, tokens(2, length))
        lengths = {len(head) for layer in positions(cache) for row in layer for head in row}
        assert lengths == ({length} if length <= 8 else {8, 9})


def test_all_and_no_heads(table: str) -> None:
    model = tiny_model("llama")
    everything = prefill(model, RLKVPress(1.0, table=table, sink_size=2, recent_size=6), tokens(1, 40))
    window = prefill(model, kvpress.get_press("streaming_llm:budget=8,n_sink=2"), tokens(1, 40))
    assert positions(everything) == positions(window)
    for press in (RLKVPress(), DuoAttentionPress(), RLKVPress(0.0, table=table)):
        assert kvpress.memory_report(prefill(model, press, tokens(1, 200))).compression_factor == 1.0


def test_sizes_come_from_the_argument_then_the_table_then_the_method(tmp_path: Path) -> None:
    without_sizes = write(tmp_path / "bare", "1 0\n")
    with_sizes = write(tmp_path / "known", "1 0\n", sink_size=5, recent_size=7)
    assert DuoAttentionPress(0.5, table=without_sizes).window(read_head_table(without_sizes)) == (128, 256)
    assert RLKVPress(0.5, table=without_sizes).window(read_head_table(without_sizes)) == (16, 64)
    assert DuoAttentionPress(0.5, table=with_sizes).window(read_head_table(with_sizes)) == (5, 7)
    assert DuoAttentionPress(0.5, table=with_sizes, sink_size=0).window(read_head_table(with_sizes)) == (0, 7)
    assert RLKVPress(0.5, table=without_sizes).recipe().kept(280) == 180


@pytest.mark.parametrize("press", [RLKVPress, DuoAttentionPress])
def test_a_table_in_the_folder_of_the_model_is_found(press: Any, table: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(Path(table) / "full_attention_heads.tsv", folder / press.beside)
    model = copy.deepcopy(tiny_model("llama"))
    model.config._name_or_path = str(folder)
    configured = press(sink_size=2, recent_size=6)
    configured.head_compression_ratio = 0.5  # as evaluation scripts set it
    assert streams(prefill(model, configured, tokens(2, 40))) == STREAMING


def test_configuration(table: str) -> None:
    for press in (RLKVPress, DuoAttentionPress):
        with pytest.raises(ValueError, match=r"which heads of LlamaForCausalLM stream: give table="):
            prefill(tiny_model("llama"), press(0.5), tokens(1, 20))
        with pytest.raises(ValueError, match=r"head_compression_ratio must be in \[0, 1\], got 1.5"):
            press(1.5, table=table)
        with pytest.raises(TypeError, match="head_compression_ratio"):
            press("half", table=table)
        with pytest.raises(ValueError, match="interval must be >= 1"):
            press(0.5, table=table, interval=0)
        with pytest.raises(ValueError, match="recent_size must be >= 1"):
            press(0.5, table=table, recent_size=0)
        with pytest.raises(FileNotFoundError, match="table must be"):
            press(0.5, table="/nowhere")
    with pytest.raises(ValueError, match="either table or on_the_fly_scoring"):
        DuoAttentionPress(0.5, True, table=table)
    for press in (DuoAttentionPress(0.5, True, interval=9), RLKVPress(0.25, table=table)):
        assert kvpress.get_press(kvpress.to_spec(press)) == press


def test_composed_with_a_codec(table: str) -> None:
    model, codec = tiny_model("llama"), kvpress.get_press("kivi:bits=8,group_size=4,residual_length=4")
    with (by_table(table) + codec)(model) as session:
        generate(model, tokens(2, 40), max_new_tokens=20)
    assert all(len(h) <= 12 for i, j in STREAMING for h in [positions(session.cache)[i][0][j]])
    assert all(layer.store.segments for layer in session.cache.layers)


def test_a_long_prompt_is_sampled_thinly_and_a_longer_one_keeps_its_sample() -> None:
    positions = torch.arange(2**17)
    chosen = duo_attention.in_sample(positions)
    assert torch.equal(duo_attention.in_sample(positions[:1000]), chosen[:1000])
    assert abs(int(chosen[:512].sum()) - 64) < 24
    for start in (512, 2048, 8192, 32768):
        expected = 64 * math.log(4)
        assert abs(int(chosen[start : 4 * start].sum()) - expected) < 4 * expected**0.5
