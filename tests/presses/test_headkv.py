# SPDX-License-Identifier: Apache-2.0
"""Budgets of HeadKV from files of scores, and the pairs that heads keep with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kvpress
from kvpress import HeadKVPress, SnapKVPress
from kvpress.testing.oracle import decode_both
from tests.caches import CODEC, generate, positions, prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.presses.test_cake import by_hand

LENGTH, WINDOW = 48, 8


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    """Scores of 3 layers of 4 query heads, in the authors' form: numbers whose mean counts."""
    path = tmp_path / "head_scores.json"
    table = {f"{layer}-{head}": [0.1 * layer, 0.3 * head + 0.02] for layer in range(3) for head in range(4)}
    path.write_text(json.dumps(table))
    return path


def budgets(layers: list[int], length: int, ratio: float, beta: float, power: float) -> list[int]:
    means = torch.tensor([[(0.1 * layer + 0.3 * head + 0.02) / 2 for head in range(4)] for layer in layers]).double()
    kv = means.view(len(layers), 2, 2).sum(dim=2) ** power
    shares = 1 - 1 / beta + kv / kv.sum() * kv.numel() / beta
    total = kv.numel() * (int(length * (1 - ratio)) - WINDOW)
    return by_hand(total, shares.flatten().tolist(), [length - WINDOW] * kv.numel())


@pytest.mark.parametrize(("beta", "power"), [(1.2, 1.0), (2.0, 0.5), (1.0, 1.0)])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_heads_keep_their_best_pairs_by_their_scores(family: str, beta: float, power: float, scores: Path) -> None:
    model, (ids, mask) = tiny_model(family), padded_batch([LENGTH, 31])
    press = HeadKVPress(0.5, window_size=WINDOW, kernel_size=3, beta=beta, power=power, table=scores)
    kept, layers = positions(prefill(model, press, ids, mask)), full_layers(model)
    for row, length in enumerate([LENGTH, 31]):
        expected = budgets(layers, length, 0.5, beta, power)
        assert len(set(expected)) > 1
        for index, layer in enumerate(layers):
            for head in range(2):
                budget = WINDOW + expected[2 * index + head]
                snap = SnapKVPress(budget=budget, window_size=WINDOW, kernel_size=3)
                alone = positions(prefill(model, snap, ids[row : row + 1, -length:]))[layer][0][head]
                assert kept[layer][row][head] == [at + LENGTH - length for at in alone]


def test_decoding_reads_the_kept_pairs(scores: Path) -> None:
    press = HeadKVPress(0.5, window_size=WINDOW, table=scores)
    actual, expected, _ = decode_both(tiny_model("gpt_oss", "eager"), press, *padded_batch([40, 26]))
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_it_composes_with_schedules_and_codecs(scores: Path) -> None:
    model = tiny_model("llama")
    press = kvpress.DecodingPress(HeadKVPress(window_size=4, table=scores), compression_interval=4, target_size=16)
    with (press + kvpress.get_press(CODEC))(model):
        kept = positions(generate(model, *padded_batch([40, 26]), max_new_tokens=5).past_key_values)
    assert [sum(len(head) for layer in kept for head in layer[row]) for row in range(2)] == [6 * 16] * 2


def test_tables_of_kv_heads_do_as_well_and_others_are_refused(scores: Path, tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    table = tmp_path / "table.tsv"
    table.write_text("\n".join("\t".join(str(0.1 * layer + 0.3 * head) for head in range(2)) for layer in range(3)))
    kept = positions(prefill(model, HeadKVPress(0.5, window_size=WINDOW, table=str(table)), ids))
    assert len({len(head) for layer in kept for head in layer[0]}) > 2
    table.write_text("0.1\t0.2\t0.3\n0.1\t0.2\t0.3")
    with pytest.raises(ValueError, match="scores of 2 layers of 3 heads, but"):
        prefill(model, HeadKVPress(0.5, table=str(table)), ids)
    for content in ('{"0-0": []}', '{"0": [1]}', "[]", '{"0-0": [-1]}'):
        scores.write_text(content)
        with pytest.raises(ValueError, match=r"must hold"):
            HeadKVPress(0.5, table=str(scores))
    with pytest.raises(ValueError, match=r"beta must be >= 1, got 0\.5"):
        HeadKVPress(0.5, beta=0.5)
    with pytest.raises(ValueError, match="set table="):
        prefill(model, HeadKVPress(0.5), ids)


def test_tables_in_the_folder_of_the_model_are_read(scores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The authors' scores come first, then the table of `duo_attention`."""
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    duo = scores.with_name("full_attention_heads.tsv")
    duo.write_text("0.9\t0.1\n0.2\t0.6\n0.1\t0.3\n")

    def counts(table: Path | None) -> list[int]:
        press = HeadKVPress(0.5, window_size=WINDOW, table=None if table is None else str(table))
        return [len(head) for layer in positions(prefill(model, press, ids)) for head in layer[0]]

    from_json, from_table = counts(scores), counts(duo)
    assert from_json != from_table
    monkeypatch.setattr(model.config, "_name_or_path", str(scores.parent))
    assert counts(None) == from_json
    scores.unlink()
    assert counts(None) == from_table


def test_a_table_of_nothing_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "heads.tsv"
    table.write_text("0\t0\n0\t0\n0\t0\n")
    with pytest.raises(ValueError, match="not all of them 0"):
        HeadKVPress(0.5, table=str(table))
