# SPDX-License-Identifier: Apache-2.0
"""Rows with a common prefix store it once, and go on as separate rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache import common
from kvpress.cache.attention import Logits
from kvpress.cache.common import CommonSegment
from kvpress.hf.cache.layer import PressLayer
from tests.caches import CODEC, STORAGES, generate, positions, prefill
from tests.models import grow, padded_batch, tiny_model, tokens
from tests.sparse.selecting import channels_file

LLAMA = tiny_model("llama")
HELD = {
    **{name: spec for name, spec in STORAGES.items() if name != "window"},
    "zipcache": "zipcache:interval=4",
    "gear": "gear:group_size=4,buffer_length=4,outliers=0.1",
    "rotated": "snapkv:0.5,window_size=4 + rotated:bits=4",
    "merged": "minicache:group_size=4",
    "weighted": "sample(knorm:0.5) + rotated:bits=4",
    "coded": "turboquant:bits=4,residual_length=4",
    "offloaded": f"double_sparsity:offload=true,budget=16,channels=8,skip_layers=0,calibration={channels_file(LLAMA)}",
    "decoding": "prefill_decoding(knorm:0.5; decoding(knorm):target_size=24,compression_interval=4)",
}
stored = pytest.mark.parametrize("spec", HELD.values(), ids=HELD)


def in_common(cache: Any) -> list[CommonSegment]:
    stores = [layer.store for layer in cache.layers if isinstance(layer, PressLayer)]
    return [part for store in stores for part in store.sealed if isinstance(part, CommonSegment)]


def answer(model: Any, press: Any, cache: Any, mask: Tensor, ids: Tensor) -> Tensor:
    """Read ids and generate eight tokens; return these."""
    with kvpress.reading(model, press):
        sequences: Tensor = generate(model, ids, grow(mask, ids.shape[1]), past_key_values=cache).sequences
    return sequences[:, ids.shape[1] :]


@stored
def test_questions_about_one_text_are_answered_as_each_alone(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    ids, mask = padded_batch([150, 134])
    cache, order = prefill(model, press, ids, mask), torch.tensor([0, 0, 1, 0, 1])
    questions = tokens(5, 6, seed=3)
    alone = []
    for row, question in zip(order.tolist(), questions, strict=True):
        copied = copy.deepcopy(cache)
        copied.batch_select_indices(torch.tensor([row]))
        alone.append(answer(model, press, copied, mask[[row]], question[None]))
    before = kvpress.memory_report(cache)
    cache.batch_select_indices(order)
    assert in_common(cache)
    grown = kvpress.memory_report(cache).total_bytes - before.total_bytes
    window = max(layer.store.window.length for layer in cache.layers)
    dense = 3 * 3 * 2 * 2 * 32 * 4 * (window + 64)  # layers x new rows x heads x (keys, values) x channels x bytes
    assert grown <= dense + before.components.get("scores", 0) * 2 + 2**14
    assert torch.equal(answer(model, press, cache, mask[order], questions), torch.cat(alone))


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
@pytest.mark.parametrize("spec", ["none", "snapkv:0.5,window_size=4", f"adakv(snapkv:0.5,window_size=4) + {CODEC}"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_a_prompt_that_generate_repeats_is_stored_once(
    family: str, spec: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, press = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa"), kvpress.get_press(spec)
    ids, mask = padded_batch([100, 84])

    def answers() -> tuple[Tensor, Any]:
        torch.manual_seed(1)
        with press(model) as session:
            return generate(model, ids, mask, **settings).sequences, session.cache

    answered, cache = answers()
    assert in_common(cache)
    monkeypatch.setattr(common, "LEAST", 10**9)
    expected, copied = answers()
    assert not in_common(copied)
    assert torch.equal(answered, expected)
    assert positions(cache) == positions(copied)
    shared, copies = (kvpress.memory_report(stored).total_bytes for stored in (cache, copied))
    assert shared < 0.85 * copies


def test_short_and_observed_pairs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    cache = prefill(model, kvpress.get_press("h2o:budget=24"), tokens(2, 60))
    cache.batch_repeat_interleave(2)
    assert not in_common(cache)
    monkeypatch.setattr(common, "LEAST", 64)
    cache = prefill(model, kvpress.get_press("knorm:budget=63"), tokens(2, 80))
    cache.batch_repeat_interleave(2)
    assert not in_common(cache)
    cache = prefill(model, kvpress.get_press("knorm:budget=64"), tokens(2, 80))
    cache.batch_repeat_interleave(2)
    assert in_common(cache)


@stored
def test_pairs_of_no_row_are_freed(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    cache = prefill(model, press, tokens(3, 60))
    lone = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    for rows in ([0, 1, 4, 4], [3, 2], [1]):
        cache.batch_select_indices(torch.tensor(rows))
    lone.batch_select_indices(torch.tensor([2]))
    assert not in_common(cache)
    assert positions(cache) == positions(lone)
    shared, expected = (kvpress.memory_report(compressed).total_bytes for compressed in (cache, lone))
    assert shared <= expected + 3 * 64  # offsets of streams


@stored
def test_copies_branches_and_files_hold_it_once_too(spec: str, tmp_path: Path) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    cache = prefill(model, press, tokens(2, 60))
    cache.batch_repeat_interleave(3)
    kvpress.save(cache, tmp_path / "cache.kv", model, press=press)
    loaded = kvpress.load(tmp_path / "cache.kv", model)
    for compressed in (cache, loaded):  # the first reading computes the tables of both
        kvpress.kept_positions(compressed)
        for layer in compressed.layers:
            for segment in layer.store.sealed:
                segment.read(torch.arange(segment.layout.total))
    total = kvpress.memory_report(cache).total_bytes
    assert kvpress.memory_report(loaded).total_bytes <= 1.02 * total
    assert len(in_common(loaded)) == len(in_common(cache))
    mask, question = torch.ones(6, 60, dtype=torch.int64), tokens(6, 4, seed=5)
    branch = kvpress.branch(cache)
    answers = [answer(model, press, twin, mask, question) for twin in (cache, branch, loaded)]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_attention_is_that_of_copies(rows: int) -> None:
    """As many queries as kernels take at a time, and more; few streams and many."""
    model = tiny_model("llama")
    cache = prefill(model, kvpress.get_press("adakv(snapkv:0.5,window_size=4)"), tokens(3, 60))
    cache.batch_select_indices(torch.tensor([2, 0, 0, 1, 2, 0, 0, 2] * 5))
    for part in in_common(cache):
        queries = torch.randn(part.layout.streams, rows, 32)
        hidden = torch.rand(part.layout.total) < 0.3
        for leaving_out in (None, hidden):
            shared = part.attend(queries, Logits(0.2), leaving_out)
            for ours, theirs in zip(shared, part.own().attend(queries, Logits(0.2), leaving_out), strict=True):
                torch.testing.assert_close(ours, theirs)
