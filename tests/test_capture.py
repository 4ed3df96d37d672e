# SPDX-License-Identifier: Apache-2.0
"""Replayed decode steps give the same tokens as eager steps, and use no value of the host.

No GPU is needed: `Tape` replaces CUDA graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.hf.session.session import session
from kvpress.quant.uniform import UniformCodec
from tests.kernels.compiler import needs_compiler
from tests.models import fingerprint, tokens
from tests.pairwise import every_pair
from tests.tape import PROMPTS, SPECS, STEPS, TapeRecorder, assert_same_caches, generate, model_of

pytestmark = needs_compiler

# -- the same tokens ------------------------------------------------------------------------------------------


@every_pair(
    lambda row: row.get("family", "llama") == "llama" or row.get("spec") not in ("quest", "schedule"),
    family=["llama", "qwen3", "mistral", "phi3"],
    spec=SPECS,
    prompt=PROMPTS,
)
def test_same_tokens_and_same_cache(family: str, spec: str, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress.hf.generation.replay.SPARE", 24)
    model, press, recorder = model_of(family), kvpress.get_press(spec), TapeRecorder()
    with press(model):
        expected = generate(model, *prompt)
    with session(press, model, recorder=recorder):
        output = generate(model, *prompt)
    assert torch.equal(output.sequences, expected.sequences)
    assert_same_caches(output.past_key_values, expected.past_key_values)
    assert recorder.recorded > 1, "no window grew and no tile was encoded"
    assert recorder.replayed >= STEPS - recorder.warmed >= STEPS - 15


def test_sampling_and_several_sequences() -> None:
    model, press = model_of("llama"), kvpress.get_press(SPECS["snapkv"])
    settings = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 20}
    sequences = []
    for recorder in (None, TapeRecorder()):
        torch.manual_seed(3)
        with session(press, model, recorder=recorder):
            sequences.append(generate(model, *PROMPTS["padded"], **settings).sequences)
    assert torch.equal(*sequences)


def test_reading_a_compressed_context() -> None:
    model, press = model_of("llama"), kvpress.get_press(SPECS["ragged"])
    context, question = tokens(1, 40), tokens(1, 6, seed=5)
    ids = torch.cat([context, question], dim=1)
    sequences = []
    for recorder in (None, TapeRecorder()):
        cache = DynamicCache(config=model.config)
        with press(model):
            model(context, past_key_values=cache)
        with session(kvpress.NonePress(), model, evict=False, recorder=recorder):
            sequences.append(generate(model, ids, None, past_key_values=cache).sequences)
    assert torch.equal(*sequences)


# -- dependencies of a replayed step --------------------------------------------------------------------------


def test_a_recorded_step_runs_again_without_the_host() -> None:
    """Ten tokens through the recorded step alone, without any counter of the host."""
    model, press = model_of("qwen3"), kvpress.get_press(SPECS["ragged"])
    ids, mask = PROMPTS["padded"]
    new = tokens(3, 12, seed=8)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    positions = mask.sum(dim=1, keepdim=True)
    grown = [torch.cat([mask, torch.ones(3, t, dtype=mask.dtype)], dim=1) for t in range(13)]

    def read(cache: Any, t: int) -> Tensor:
        return model(
            new[:, t : t + 1], attention_mask=grown[t + 1], position_ids=positions + t, past_key_values=cache
        ).logits

    with press(model):
        model(ids, attention_mask=mask, past_key_values=caches[0])
        expected = [read(caches[0], t) for t in range(12)]
    with session(press, model, recorder=TapeRecorder()) as opened:
        model(ids, attention_mask=mask, past_key_values=caches[1])
        replayed = [read(caches[1], t) for t in range(2)]
        replay, seen = opened.captured.replay, caches[1].get_seq_length()
        for t in range(2, 12):
            replay.inputs["input_ids"].copy_(new[:, t : t + 1])
            replay.inputs["position_ids"].copy_(positions + t)
            replayed.append(replay.replay()["logits"].clone())
        assert caches[1].get_seq_length() == seen
    assert all(map(torch.equal, replayed, expected))


def test_outputs_are_the_callers_to_keep() -> None:
    model, press = model_of("llama"), kvpress.get_press("none")
    logits = []
    for recorder in (None, TapeRecorder()):
        with session(press, model, recorder=recorder):
            cache = model(tokens(1, 20), use_cache=True).past_key_values
            outputs = [model(tokens(1, 1, seed=t), past_key_values=cache) for t in range(6)]
        assert all(output.past_key_values is cache for output in outputs)
        logits.append(torch.cat([output.logits for output in outputs]))
    assert torch.equal(*logits)
    assert type(outputs[-1]) is type(outputs[0])


@pytest.mark.parametrize("spec", ["off", "kivi-quest", "ragged"])
def test_calls_that_are_no_plain_step_fall_in_between(spec: str) -> None:
    """A turn, hidden tokens, other rows and another cache, each between replayed steps."""
    model, press = model_of("llama"), kvpress.get_press(SPECS[spec])
    ids, mask = PROMPTS["padded"]

    def conversation() -> list[Tensor]:
        real, logits = mask, []
        caches = [DynamicCache(config=model.config) for _ in range(2)]

        def read(new: Tensor, which: int = 0, hidden: int = 0) -> None:
            nonlocal real
            if not which:
                real = torch.cat([real, torch.ones(real.shape[0], new.shape[1], dtype=mask.dtype)], dim=1)
            shown = real.clone()
            shown[:, 20 : 20 + hidden] = 0
            logits.append(model(new, attention_mask=None if which else shown, past_key_values=caches[which]).logits)

        model(ids, attention_mask=mask, past_key_values=caches[0])
        model(tokens(1, 30), past_key_values=caches[1])
        for t in range(4):
            read(tokens(3, 1, seed=t))
        read(tokens(3, 5, seed=20))
        for t in range(4):
            read(tokens(3, 1, seed=30 + t))
        read(tokens(3, 1, seed=40), hidden=3)
        for t in range(6):
            read(tokens(1 if t % 2 else 3, 1, seed=50 + t), which=t % 2)
        caches[0].batch_select_indices(torch.tensor([2, 0]))
        real = real[[2, 0]]
        for t in range(4):
            read(tokens(2, 1, seed=60 + t))
        caches[0] = copy.deepcopy(caches[0])
        caches[0].crop(-1)
        real = real[:, :-1]
        for t in range(4):
            read(tokens(2, 1, seed=70 + t))
        return logits

    recorder = TapeRecorder()
    with press(model):
        expected = conversation()
    with session(press, model, recorder=recorder):
        captured = conversation()
    assert recorder.replayed >= 8
    for ours, theirs in zip(captured, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_that_fails_reads_no_token() -> None:
    """Interrupted while it is recorded anew, for example with Ctrl-C."""
    model, press, new = model_of("llama"), kvpress.get_press("knorm:0.5"), tokens(1, 4, seed=3)
    logits = []
    for fails in (False, True):
        cache = DynamicCache(config=model.config)
        with session(press, model, recorder=TapeRecorder()):
            model(tokens(1, 30), past_key_values=cache)
            model(new[:, :1], past_key_values=cache)
            if fails:
                with pytest.raises(KeyboardInterrupt), interrupted(model.model.layers[1].mlp):
                    model(new[:, 1:2], past_key_values=cache)
            steps = [model(new[:, t : t + 1], past_key_values=cache).logits for t in range(1, 4)]
        logits.append(torch.cat(steps))
    assert torch.equal(*logits)


@contextmanager
def interrupted(module: Any) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = module.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()


def test_a_step_whose_pairs_cannot_be_encoded_is_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = model_of("llama"), DynamicCache(config=model_of("llama").config)

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    def read(steps: int) -> None:
        for _ in range(steps):
            model(tokens(1, 1), past_key_values=cache)

    with session(kvpress.get_press(SPECS["kivi"]), model, recorder=TapeRecorder()):
        model(tokens(1, 30), past_key_values=cache)
        monkeypatch.setattr(UniformCodec, "encode", fail)
        with pytest.raises(OSError, match="no space left"):
            read(20)
        with pytest.raises(RuntimeError, match="a forward pass that failed"):
            read(1)


def test_a_captured_cache_lives_on_without_capture() -> None:
    model, press = model_of("llama"), kvpress.get_press(SPECS["kivi"])
    sequences = []
    for recorder in (None, TapeRecorder()):
        with session(press, model, recorder=recorder):
            first = generate(model, *PROMPTS["one"], max_new_tokens=7)
        with press(model):
            sequences.append(generate(model, first.sequences, None, past_key_values=first.past_key_values).sequences)
    assert torch.equal(*sequences)


def test_a_generate_leaves_no_cache_behind() -> None:
    model, press = model_of("llama"), kvpress.get_press("none")
    before = fingerprint(model)
    with session(press, model, recorder=TapeRecorder()) as opened:
        generate(model, *PROMPTS["one"], max_new_tokens=5)
        assert not opened.captured.calls
        assert not opened.captured.replay.state
        assert opened.captured.replay.replay is None
    assert fingerprint(model) == before


def test_memory_of_the_counters_is_reported() -> None:
    model, press = model_of("llama"), kvpress.get_press(SPECS["snapkv"])
    with session(press, model, recorder=TapeRecorder()):
        cache = generate(model, *PROMPTS["padded"], max_new_tokens=5).past_key_values
    store = cache.layers[0].store
    counters = {tensor.data_ptr() for tensor in store.window.cursor.tensors()}
    assert counters <= {tensor.data_ptr() for parts in store.tensors().values() for tensor in parts}


@pytest.mark.parametrize("blocks", [1, 2], ids=["one block", "a block each"])
def test_threads_replay_steps_of_their_own(blocks: int) -> None:
    """One thread after another: a tape records everything that runs meanwhile, in other threads too."""
    model, press = model_of("llama"), kvpress.get_press(SPECS["kivi"])
    prompts = [tokens(1, 30), tokens(2, 22, seed=1)]

    @torch.no_grad()
    def start(ids: Tensor) -> Any:
        return model(ids, use_cache=True).past_key_values

    @torch.no_grad()
    def step(ids: Tensor, cache: Any, number: int) -> Tensor:
        return model(tokens(len(ids), 1, seed=number), past_key_values=cache).logits

    with press(model):
        caches = [start(ids) for ids in prompts]
        expected = [step(*pair, n) for n in range(12) for pair in zip(prompts, caches, strict=True)]
    recorders = [TapeRecorder() for _ in range(blocks)]
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in prompts]
        opened = [session(press, model, recorder=recorder) for recorder in recorders]
        for pool, block in zip(pools, opened, strict=False):
            (pool.submit(block.__enter__) if blocks > 1 else pool.submit(int)).result()
        if blocks == 1:
            stack.enter_context(opened[0])
        caches = [pool.submit(start, ids).result() for pool, ids in zip(pools, prompts, strict=True)]
        replayed = [
            pool.submit(step, ids, cache, n).result()
            for n in range(12)
            for pool, ids, cache in zip(pools, prompts, caches, strict=True)
        ]
        for pool, block in zip(pools, opened if blocks > 1 else [], strict=False):
            pool.submit(block.__exit__, None, None, None).result()
    assert all(map(torch.equal, replayed, expected))
    assert sum(recorder.replayed for recorder in recorders) >= 12


def test_a_captured_cache_goes_from_mode_to_mode() -> None:
    model, press = model_of("llama"), kvpress.get_press(SPECS["snapkv"])
    runs = []
    for recorder in (None, TapeRecorder()):
        logits, cache = [], DynamicCache(config=model.config)
        with session(press, model, recorder=recorder):
            for n, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad)):
                with mode():
                    for part in range(5):
                        new = tokens(1, 1 if n or part else 30, seed=10 * n + part)
                        logits.append(model(new, past_key_values=cache).logits.clone())
        runs.append(torch.cat(logits, dim=1))
    assert torch.equal(*runs)


# -- on a GPU -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("spec", SPECS)
def test_graphs_give_the_same_tokens(spec: str, prompt: str) -> None:
    model, press = copy.deepcopy(model_of("llama")).cuda(), kvpress.get_press(SPECS[spec])
    ids, mask = (None if part is None else part.cuda() for part in PROMPTS[prompt])
    with press(model):
        expected = generate(model, ids, mask)
    with press(model, capture=True):
        output = generate(model, ids, mask)
    assert torch.equal(output.sequences, expected.sequences)
