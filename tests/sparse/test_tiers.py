# SPDX-License-Identifier: Apache-2.0
"""Pairs in a file: outputs are equal, and fetched bytes are counted."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpress_eval.fidelity.layers import watching
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache.tier import FileTier, in_file
from tests.models import padded_batch, tiny_model, tokens

SELECTORS = {
    "quest": "quest:budget=32,page_size=8,skip_layers=0",
    "loki": "loki:budget=0.2,n_sink=4,skip_layers=0",
    "sparq": "sparq:budget=32",
    "twilight": "twilight(quest:budget=64,page_size=8,skip_layers=0)",
    "evicted": "adakv(snapkv:0.3,window_size=4) + quest:budget=32,page_size=8,skip_layers=0",
    "encoded": "kivi:bits=4,group_size=16,residual_length=16 + quest:budget=32,page_size=8,skip_layers=0",
    "mixed": "zipcache:interval=16 + loki:budget=32,skip_layers=0",
}


def answer(model: Any, spec: str, **settings: Any) -> tuple[Tensor, Any]:
    ids, mask = padded_batch([200, 140])
    with kvpress.get_press(spec)(model) as session:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, **settings)
    return out, session.cache


def sealed(cache: Any) -> list[Any]:
    return [segment for layer in cache.layers if hasattr(layer, "store") for segment in layer.store.segments]


@pytest.mark.parametrize("name", SELECTORS)
def test_outputs_are_those_without_a_tier(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected, plain = answer(model, SELECTORS[name])
    out, cache = answer(model, f"offload({SELECTORS[name]}):folder={tmp_path}")
    assert torch.equal(out, expected)
    assert not os.listdir(tmp_path)
    ours, theirs = kvpress.memory_report(cache), kvpress.memory_report(plain)
    assert ours.total_bytes == theirs.total_bytes
    assert ours.file_bytes > 0
    assert theirs.file_bytes == 0
    assert ours.device_bytes == ours.total_bytes - ours.file_bytes
    assert theirs.fetched_bytes == 0 < ours.fetched_bytes


@pytest.mark.parametrize(("family", "beams"), [("qwen3", 3), ("gpt_oss", 1), ("gemma3_text", 1), ("phi3", 1)])
def test_other_models_and_beam_search_give_equal_outputs(family: str, beams: int) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    expected, _ = answer(model, SELECTORS["quest"], num_beams=beams)
    out, cache = answer(model, f"offload({SELECTORS['quest']})", num_beams=beams)
    assert torch.equal(out, expected)
    assert bool(kvpress.memory_report(cache).file_bytes) == bool(sealed(cache))


def test_fetched_bytes_are_those_of_the_chosen_pairs() -> None:
    model, cache, expected = tiny_model("llama"), None, 0

    def count(call: Any, output: Tensor) -> None:
        nonlocal expected
        pair = 2 * call.queries.shape[3] * call.queries.element_size()
        expected += sum(int(pairs.counts.sum()) * pair for pairs in (call.read or [[]])[0])

    cache = DynamicCache(config=model.config)
    press = kvpress.get_press(f"offload({SELECTORS['quest']})")
    with press(model) as session:
        model(tokens(2, 300), past_key_values=cache)
        assert kvpress.memory_report(cache).fetched_bytes == 0
        with watching(session, count):
            for seed in range(3):
                model(tokens(2, 1, seed=seed), past_key_values=cache)
    report = kvpress.memory_report(cache)
    streams, budget = len(cache.layers) * 2 * 2, 32
    assert report.fetched_bytes == expected == 3 * streams * budget * 2 * 32 * 4
    assert sum(layer.fetched_bytes for layer in report.layers) == report.fetched_bytes
    assert "fetched so far" in str(report)


def test_all_pairs_count_if_all_are_read() -> None:
    _, cache = answer(tiny_model("llama"), "offload(quest:budget=4096,page_size=8,skip_layers=0)")
    pairs = [segment.layout.total * segment.away() for segment in sealed(cache)]
    assert sum(pairs) == kvpress.memory_report(cache).file_bytes
    assert kvpress.memory_report(cache).fetched_bytes >= 20 * sum(pairs)


def test_copies_share_files_and_outlive_each_other() -> None:
    model = tiny_model("llama")
    press = kvpress.get_press(f"offload({SELECTORS['encoded']})")
    cache = DynamicCache(config=model.config)
    with press(model):
        model(tokens(2, 300), past_key_values=cache)
        twin = copy.deepcopy(cache)
        shared_bytes = kvpress.memory_report(cache, twin).file_bytes
        assert shared_bytes == kvpress.memory_report(twin).file_bytes > 0
        expected = model(tokens(2, 1, seed=3), past_key_values=cache).logits
        del cache
        assert torch.equal(model(tokens(2, 1, seed=3), past_key_values=twin).logits, expected)


def test_a_cache_that_is_loaded_stores_its_pairs_in_files_again(tmp_path: Path) -> None:
    model = tiny_model("llama")
    press = kvpress.get_press(f"offload({SELECTORS['encoded']}):folder={tmp_path}")
    cache = DynamicCache(config=model.config)
    with press(model):
        model(tokens(2, 300), past_key_values=cache)
        kvpress.save(cache, tmp_path / "cache.kv", model, press)
        loaded = kvpress.load(tmp_path / "cache.kv", model)
        assert kvpress.memory_report(loaded).file_bytes == kvpress.memory_report(cache).file_bytes > 0
        expected = model(tokens(2, 1, seed=3), past_key_values=cache).logits
        assert torch.equal(model(tokens(2, 1, seed=3), past_key_values=loaded).logits, expected)


def test_a_full_disk_loses_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, write, room = tiny_model("llama"), os.write, 20_000

    def write_until_full(file: int, data: Any) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, data[:room])
        room -= written
        return written

    cache = DynamicCache(config=model.config)
    with kvpress.get_press(f"offload({SELECTORS['quest']}):folder={tmp_path}")(model):
        monkeypatch.setattr(os, "write", write_until_full)
        with pytest.raises(OSError, match=r"cannot be kept in a file of .*No space left.*more space"):
            model(tokens(2, 300), past_key_values=cache)
    assert not os.listdir(tmp_path)
    store = cache.layers[0].store
    assert store.segments == []
    assert store.stored() == [300] * 4


def test_a_tier_maps_the_written_values(tmp_path: Path) -> None:
    tier = FileTier(str(tmp_path))
    for dtype in (torch.bfloat16, torch.uint8, torch.float32):
        rows = (100 * torch.rand(33, 3, 5)).to(dtype)[:, 1:]
        mapped = tier.kept(rows)
        assert torch.equal(mapped, rows)
        assert mapped.dtype == dtype
        assert in_file(mapped)
        assert in_file(mapped[3:])
        assert not in_file(mapped.clone())
    assert not in_file(tier.kept(torch.empty(0, 4)))


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("offload(snapkv:0.5)", TypeError, "needs a selector"),
        ("offload(tidal_decode)", TypeError, "some of its layers read all pairs to choose"),
        ("offload(double_sparsity:offload=true)", TypeError, "offloads them itself; remove one of the two"),
        ("offload(kivi + quest):to=host", ValueError, "use to='file'"),
        ("kivi + offload(quest)", ValueError, "one codec"),
        ("offload(quest):folder=/no/such/folder", ValueError, "'/no/such/folder'; create it first"),
        ("offload(quest):to=host,folder=/tmp", ValueError, "is for to='file'"),
        ("offload(quest):to=disk", ValueError, "'disk'"),
    ],
)
def test_impossible_compositions_are_refused(spec: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kvpress.get_press(spec)


def test_host_memory_warns_for_a_model_on_the_cpu() -> None:
    model = tiny_model("llama")
    expected, _ = answer(model, SELECTORS["quest"])
    with pytest.warns(RuntimeWarning, match="changes nothing for a model on the CPU"):
        out, cache = answer(model, f"offload({SELECTORS['quest']}):to=host")
    assert torch.equal(out, expected)
    assert kvpress.memory_report(cache).host_bytes > 0
