# SPDX-License-Identifier: Apache-2.0
"""One cache and several threads: passes are refused, readers of figures wait."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache import guard
from tests.models import tokens
from tests.threads import (
    SPECS,
    in_threads,
    prompt,
    small_model,
)

pytestmark = pytest.mark.usefixtures("busy")


def test_one_cache_in_two_threads_is_refused() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["knorm"])
    inside, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        assert done.wait(60)

    cache = DynamicCache(config=model.config)
    with press(model), ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
        expected = model(prompt(0), past_key_values=copy.deepcopy(cache)).logits
        handle = model.model.layers[0].mlp.register_forward_hook(wait)
        running = pool.submit(lambda: model(prompt(0), past_key_values=cache).logits)
        assert inside.wait(60)
        handle.remove()
        with pytest.raises(RuntimeError, match="read by another forward pass, in thread 'first"):
            model(prompt(0), past_key_values=cache)
        done.set()
        assert torch.equal(running.result(), expected)
        model(tokens(1, 1), past_key_values=cache)


def test_a_compressed_cache_is_read_by_a_thread_without_a_block() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["adakv-kivi"])
    caches = []
    for _ in range(2):
        caches.append(DynamicCache(config=model.config))
        with press(model):
            model(prompt(0), past_key_values=caches[-1])
    with press(model):
        expected = model(tokens(1, 1), past_key_values=caches[0]).logits
        logits = in_threads(lambda _: model(tokens(1, 1), past_key_values=caches[1]).logits, 1)
    assert torch.equal(logits[0], expected)


LOOKS = {
    "report": lambda cache: kvpress.memory_report(cache).kept,
    "positions": lambda cache: kvpress.kept_positions(cache)[1][0][0].tolist(),
    "keys": lambda cache: cache.layers[1].keys.tolist(),
    "copy": lambda cache: [store.seen for store in copy.deepcopy(cache).layers[0].stores],
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_readers_of_a_cache_wait_for_the_pass_of_another_thread(look: Callable[[Any], Any]) -> None:
    """Readers see the state after the pass, not a state between two layers."""
    model, press = small_model(), kvpress.get_press(SPECS["knorm"])
    inside, done, cache = threading.Event(), threading.Event(), DynamicCache(config=model.config)

    def wait(*_: Any) -> None:
        inside.set()
        assert done.wait(60)

    with press(model), ThreadPoolExecutor(2) as pool:
        model(prompt(0), past_key_values=cache)
        before, twin = look(cache), copy.deepcopy(cache)
        model(tokens(1, 1), past_key_values=twin)
        handle = model.model.layers[0].mlp.register_forward_hook(wait)
        running = pool.submit(torch.no_grad()(model), tokens(1, 1), past_key_values=cache)
        assert inside.wait(60)
        handle.remove()
        looking = pool.submit(look, cache)
        assert not looking.done()
        done.set()
        running.result()
        assert looking.result() == look(cache) == look(twin) != before


def test_looking_all_the_time_changes_nothing() -> None:
    model, press, stop = small_model(), kvpress.get_press(SPECS["adakv-kivi"]), threading.Event()

    @torch.no_grad()
    def watch(cache: Any) -> list[int]:
        seen = []
        while not stop.is_set():
            report, layers = kvpress.memory_report(cache), copy.deepcopy(cache).layers
            assert len({layer.seen for layer in report.layers}) == 1
            assert len({layer.get_seq_length() for layer in layers}) == 1
            seen.append(report.seen)
        return seen

    def steps(cache: Any) -> Tensor:
        return torch.cat([model(tokens(1, 1, seed=n), past_key_values=cache).logits for n in range(30)])

    with press(model), ThreadPoolExecutor(1) as pool:
        cache = model(prompt(0), use_cache=True).past_key_values
        expected = steps(copy.deepcopy(cache))
        watching = pool.submit(watch, cache)
        outputs = steps(cache)
        stop.set()
        assert watching.result() == sorted(watching.result())
    assert torch.equal(outputs, expected)


def test_a_deadlock_of_pass_and_reader_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PATIENCE", 0.05)
    model, press, cache = small_model(), kvpress.get_press(SPECS["knorm"]), DynamicCache()
    with press(model), ThreadPoolExecutor(1) as pool:
        errors = []

        def ask(*_: Any) -> None:
            kvpress.memory_report(cache)  # the thread of the pass may read figures meanwhile
            errors.append(pool.submit(kvpress.memory_report, cache).exception())

        handle = model.model.layers[0].mlp.register_forward_hook(ask)
        model(prompt(0), past_key_values=cache)
        handle.remove()
    with pytest.raises(RuntimeError, match="in a forward pass of another thread for 0 seconds"):
        raise errors[0]
