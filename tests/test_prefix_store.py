# SPDX-License-Identifier: Apache-2.0
"""A stored prefix is not read again, is right, and survives crashes of other processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.hf.cache import prefix_store
from kvpress.hf.generation.ask import read_text
from kvpress.hf.generation.pipeline import KVPressTextGenerationPipeline
from tests.caches import STORAGES, positions, prefill
from tests.models import padded_batch, tiny_model, tokens

PRESSES = ["none", STORAGES["composed"], "adakv(snapkv:0.5,window_size=4)", STORAGES["kivi"]]


def logits(model: Any, press: Any, cache: Any, seed: int = 3) -> Tensor:
    with kvpress.reading(model, press):
        output: Tensor = model(tokens(cache.layers[0].batch_size, 4, seed), past_key_values=cache).logits
    return output


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """Record the numbers of tokens of every pass of the tiny Llama."""
    seen: list[int] = []
    handle = (
        tiny_model("llama")
        .get_input_embeddings()
        .register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    )
    yield seen
    handle.remove()


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("spec", PRESSES)
def test_a_stored_prefix_is_not_read_again(spec: str, padded: bool, tmp_path: Path, passes: list[int]) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    ids, mask = padded_batch([60, 37]) if padded else (tokens(2, 60), None)
    first = kvpress.PrefixStore(tmp_path).read(model, press, ids, mask)
    again = kvpress.PrefixStore(tmp_path).read(model, press, ids, mask)
    assert passes == [60]
    expected = prefill(model, press, ids, mask)
    assert positions(first) == positions(again) == positions(expected)
    if not padded:
        assert torch.equal(logits(model, press, again), logits(model, press, expected))


def test_only_a_press_that_keeps_every_pair_takes_a_shorter_prefix(tmp_path: Path, passes: list[int]) -> None:
    model, ids = tiny_model("llama"), tokens(1, 60)
    store = kvpress.PrefixStore(tmp_path)
    plain, knorm = (kvpress.get_press(spec) for spec in ("none", "knorm:0.5"))
    for press in (plain, knorm):
        for length in (20, 40):
            store.read(model, press, ids[:, :length])
    assert passes == [20, 20, 20, 40]  # 40 behind 20 without eviction, all 60 with eviction
    assert store.find(model, plain, ids).length == 40
    assert store.find(model, knorm, ids) is None
    assert store.find(model, knorm, ids, turns=True).length == 40
    assert store.find(model, plain, torch.cat([ids[:, :39], ids[:, :1]], dim=1)).length == 20
    assert store.find(model, plain, ids[:, :19]) is None
    resumed = store.read(model, plain, ids)
    torch.testing.assert_close(
        logits(model, plain, resumed), logits(model, plain, prefill(model, plain, ids)), atol=1e-4, rtol=1e-4
    )
    del passes[:]
    talk = store.read(model, knorm, ids, turns=True)
    assert passes == [20]
    expected = prefill(model, knorm, ids[:, :40])
    with knorm(model):
        model(ids[:, 40:], past_key_values=expected)
    assert positions(talk) == positions(expected)


def test_other_models_presses_and_paddings_are_distinguished(tmp_path: Path) -> None:
    store, ids = kvpress.PrefixStore(tmp_path), tokens(1, 30)
    model, press = tiny_model("llama"), kvpress.get_press("knorm:0.5")
    store.read(model, press, ids)
    assert store.find(model, press, ids, torch.ones_like(ids)) is not None
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    assert store.find(model, press, ids, mask) is None
    assert store.find(model, kvpress.get_press("knorm:0.25"), ids) is None
    assert store.find(tiny_model("llama", seed=1), press, ids) is None
    assert store.find(tiny_model("qwen3"), press, ids) is None
    assert store.find(model, press, ids + 1) is None
    assert (store.hits, store.misses) == (1, 6)


@pytest.mark.parametrize("spec", ["none", "knorm:0.5"])
def test_a_variant_is_found_by_its_name_alone(spec: str, tmp_path: Path) -> None:
    model, press, ids = tiny_model("llama"), kvpress.get_press(spec), tokens(1, 40)
    store = kvpress.PrefixStore(tmp_path)
    with torch.no_grad(), press(model):
        turns = model(ids[:, :30]).past_key_values
        model(ids[:, 30:], past_key_values=turns)
    assert store.keep(model, press, ids, turns, variant="answer 1")
    assert store.find(model, press, ids) is None
    assert store.find(model, press, ids, variant="answer 2") is None
    found = store.find(model, press, ids, variant="answer 1")
    assert found is not None
    assert positions(found.cache) == positions(turns)
    assert positions(store.read(model, press, ids)) == positions(prefill(model, press, ids))


def test_files_of_a_press_are_distinguished_by_content(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    press = kvpress.get_press(f"adakv(snapkv:0.5) + kvquant:calibration='{path}'")
    store = kvpress.PrefixStore(tmp_path / "store")
    folders = [store._folder(tiny_model("llama"), press)]
    for content in ("{}", "[]", "{}"):
        path.write_text(content)
        folders.append(store._folder(tiny_model("llama"), press))
    assert folders[1] == folders[3]
    assert len(set(folders)) == 3


def test_the_least_recently_used_prefix_is_deleted_first(tmp_path: Path) -> None:
    model, press = tiny_model("llama"), kvpress.get_press("knorm:0.5")
    prompts = [tokens(1, 60, seed) for seed in range(4)]
    store = kvpress.PrefixStore(tmp_path)
    for prompt in prompts[:3]:
        store.read(model, press, prompt)
    for age, path in enumerate(sorted(tmp_path.glob("*/*.kv"), key=lambda path: path.stat().st_mtime)):
        os.utime(path, (time.time() - 100 + age,) * 2)
    assert store.find(model, press, prompts[0]) is not None  # now the newest
    tight = kvpress.PrefixStore(tmp_path, store.bytes)
    tight.read(model, press, prompts[3])
    hits = [tight.find(model, press, prompt) is not None for prompt in prompts]
    assert hits == [True, False, True, True]
    assert tight.bytes <= tight.limit
    assert len(tight) == 3
    small = kvpress.PrefixStore(tmp_path / "small", "1kB")
    cache = small.read(model, press, prompts[0])
    assert cache.get_seq_length() == 60
    assert len(small) == 0
    tight.clear()
    assert len(tight) == 0


def test_a_damaged_prefix_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, press, ids = tiny_model("llama"), kvpress.get_press("knorm:0.5"), tokens(1, 60)
    store = kvpress.PrefixStore(tmp_path)
    expected = positions(store.read(model, press, ids))
    (path,) = tmp_path.glob("*/*.kv")
    original = path.read_bytes()
    for content in (original[:-100], original[:2000] + b"?" + original[2001:], b""):
        path.write_bytes(content)
        assert positions(store.read(model, press, ids)) == expected
        assert path.read_bytes()[-500:] == original[-500:]
    assert caplog.text.count("it is removed, and read again") == 3


def test_a_full_disk_is_no_reason_not_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "no space left on device")

    model, store = tiny_model("llama"), kvpress.PrefixStore(tmp_path)
    monkeypatch.setattr(prefix_store, "save", full)
    assert store.read(model, kvpress.get_press("knorm:0.5"), tokens(1, 60)).get_seq_length() == 60
    assert "no space left" in caplog.text
    assert len(store) == 0


def test_threads_that_ask_for_the_same_wait_for_one_reading(tmp_path: Path, passes: list[int]) -> None:
    model, press, ids = tiny_model("llama"), kvpress.get_press("knorm:0.5"), tokens(1, 200)
    caches: list[Any] = []
    threads = [
        threading.Thread(target=lambda: caches.append(kvpress.PrefixStore(tmp_path).read(model, press, ids)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passes == [200]
    assert all(positions(cache) == positions(caches[0]) for cache in caches)


def read_in_turns(folder: Path, first: int, rounds: int) -> None:
    """Read six prompts again and again from a folder that holds three of them."""
    model, press, store = tiny_model("llama"), kvpress.get_press("knorm:0.5"), kvpress.PrefixStore(folder, "120kB")
    for number in range(first, first + 6 * rounds):
        prompt = tokens(1, 60, number % 6)
        assert positions(store.read(model, press, prompt)) == positions(prefill(model, press, prompt))
    assert store.hits + store.misses == 6 * rounds


def test_several_processes_share_a_folder_and_one_may_be_killed(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    run = [(tmp_path, 0, 4), (tmp_path, 3, 4), (tmp_path, 0, 10_000)]
    *working, killed = (fork.Process(target=read_in_turns, args=arguments) for arguments in run)
    for process in (*working, killed):
        process.start()
    while not list(tmp_path.glob("*/*.kv")):
        time.sleep(0.01)
    killed.kill()
    for process in (*working, killed):
        process.join(timeout=240)
    assert [process.exitcode for process in working] == [0, 0]
    store = kvpress.PrefixStore(tmp_path, "120kB")
    store.read(tiny_model("llama"), kvpress.get_press("knorm:0.5"), tokens(1, 60, 9))
    assert 0 < store.bytes <= store.limit
    for path in tmp_path.glob("*/*.kv"):
        kvpress.cache_info(path)


def test_the_pipeline_reads_a_context_once(tmp_path: Path) -> None:
    model, tokenizer = kvpress.load_model("reference")
    pipe = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    contexts = [" The old river runs. The code for tiger is 4837." * 8, " The code for tiger is 2951." * 5]
    store, press = kvpress.PrefixStore(tmp_path), kvpress.get_press("snapkv:0.5 + kivi:bits=4,residual_length=32")
    request = {"question": "\nWhat is the code for tiger?", "press": press, "max_new_tokens": 8}
    expected = pipe(contexts, **request)
    assert [pipe(contexts, prefix_store=store, **request) for _ in range(2)] == [expected, expected]
    assert (store.hits, store.misses) == (1, 1)
    assert pipe(contexts[0], prefix_store=store, question=request["question"]) == pipe(
        contexts[0], question=request["question"]
    )
    with pytest.raises(ValueError, match="either cache or prefix_store"):
        pipe(contexts[0], prefix_store=store, cache=prefill(model, press, tokens(1, 20)), **request)


def test_a_prefix_is_read_with_the_tokenizer_of_the_pipeline(tmp_path: Path) -> None:
    """A tokenizer with another vocabulary finds other spans, so it reads the prefix anew."""
    model, tokenizer = kvpress.load_model("reference")
    model, other = copy.deepcopy(model), copy.deepcopy(tokenizer)
    model.config._name_or_path = ""
    other.add_tokens(["elephants"])
    request = {"question": "\nWhere?", "press": "protect(knorm:0.8):tags=<think>..</think>", "max_new_tokens": 4}
    context = " <think>The old river runs.</think> The code for tiger is 4837." * 4
    store = kvpress.PrefixStore(tmp_path)
    for each in (tokenizer, tokenizer, other):
        pipe = KVPressTextGenerationPipeline(model=model, tokenizer=each)
        assert pipe(context, prefix_store=store, **request) == pipe(context, **request)
    assert (store.hits, store.misses) == (1, 2)
    read, _ = read_text(model, tokenizer, request["press"], context)
    assert kvpress.memory_report(read).kept < kvpress.memory_report(read).seen


def test_wrong_limits_and_folders_are_refused(tmp_path: Path) -> None:
    for limit in ("much", "20 G", "-1GB"):
        with pytest.raises(ValueError, match="limit must be a size such as 4GB"):
            kvpress.PrefixStore(tmp_path, limit)
    with pytest.raises(ValueError, match="limit must be at least 1 byte, got 0"):
        kvpress.PrefixStore(tmp_path, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="a prefix store is a folder"):
        kvpress.PrefixStore(tmp_path / "file")
