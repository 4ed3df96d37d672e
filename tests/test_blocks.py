# SPDX-License-Identifier: Apache-2.0
"""Sessions beside and inside each other: each thread has its own; another press inside a session is refused."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from tests.caches import positions
from tests.models import fingerprint, tokens
from tests.threads import (
    SPECS,
    expected_of,
    generate,
    in_threads,
    prompt,
    results,
    same,
    small_model,
)

pytestmark = pytest.mark.usefixtures("busy")


def test_another_press_inside_a_block_is_refused_with_both_names() -> None:
    model = small_model()
    words = r"KnormPress\(compression_ratio=0.5.*already active.*in this thread.*SnapKVPress\(.*press_a \+ press_b"
    before = fingerprint(model)
    with kvpress.KnormPress(0.5)(model):
        inside = fingerprint(model)
        with pytest.raises(RuntimeError, match=words), kvpress.SnapKVPress(0.5)(model):
            pass
        reading = kvpress.reading(model, kvpress.KnormPress(0.5))
        with pytest.raises(RuntimeError, match=r"KnormPress.*\(reading\)"), reading:
            pass
        with pytest.raises(RuntimeError, match="already active"):
            kvpress.prefill(model, [kvpress.KnormPress(0.5)], prompt(0))
        assert fingerprint(model) == inside
    assert fingerprint(model) == before


def test_blocks_of_different_presses_in_different_threads() -> None:
    """Each thread reads, answers and leaves while the others are in the middle of theirs."""
    model = small_model()
    presses = [kvpress.get_press(spec) for spec in (*SPECS.values(), "none", "bounded(knorm:0.5):chunk=8")]
    before = fingerprint(model)

    def answer(number: int) -> list[Any]:
        press, cache = presses[number % len(presses)], DynamicCache(config=model.config)
        ids = prompt(number)[:1]
        with press(model) as session:
            model(ids, past_key_values=cache, logits_to_keep=1)
            assert session.cache is cache
        with kvpress.reading(model, press) as session:
            extended = torch.cat([ids, tokens(1, 3, seed=number)], dim=1)
            sequences = model.generate(extended, past_key_values=cache, max_new_tokens=6, do_sample=False)
            assert session.cache is cache
        return [sequences.tolist(), positions(cache)]

    threads = 12
    expected = [answer(number) for number in range(threads)]
    for _ in range(3):
        assert in_threads(answer, threads) == expected
    assert fingerprint(model) == before


def test_one_thread_compresses_while_others_answer() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["adakv-kivi"])
    compressed, caches = expected_of(model, press, 1)[0], []
    for _ in range(4):
        caches.append(DynamicCache(config=model.config))
        with press(model):
            model(prompt(2), past_key_values=caches[-1])
    question = torch.cat([prompt(2), tokens(1, 3)], dim=1)

    def answer(number: int) -> Any:
        if number == 0:
            with press(model):
                return same(results(model, 0), compressed)
        with kvpress.reading(model, press):
            return model.generate(question, past_key_values=caches[number], max_new_tokens=6, do_sample=False).tolist()

    with kvpress.reading(model, press):
        expected = model.generate(question, past_key_values=caches[0], max_new_tokens=6, do_sample=False).tolist()
    assert in_threads(answer, 4) == [True, *[expected] * 3]


def test_a_thread_without_a_block_beside_several_presses() -> None:
    """Such a thread is refused, unless it was started with the context of a session."""
    model = small_model()
    presses = [kvpress.get_press(SPECS["knorm"]), kvpress.get_press(SPECS["h2o"])]
    expected = [expected_of(model, press, 1)[0] for press in presses]
    opened, done = threading.Event(), threading.Event()

    def hold() -> None:
        with presses[1](model):
            opened.set()
            assert done.wait(60)

    with ThreadPoolExecutor(2) as pool:
        with presses[0](model):
            holding = pool.submit(hold)
            assert opened.wait(60)
            for use in (results, lambda model, number: model(prompt(number))):
                words = r"entered no block.*KnormPress.* and H2OPress.*copy_context\(\)\.run"
                with pytest.raises(RuntimeError, match=words):
                    pool.submit(use, model, 0).result()
            assert same(pool.submit(contextvars.copy_context().run, results, model, 0).result(), expected[0])
            assert same(results(model, 0), expected[0])
        # The session of the other thread is the only open one.
        assert same(pool.submit(results, model, 0).result(), expected[1])
        done.set()
        holding.result()


def test_the_same_press_inside_itself() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["knorm"])
    before, expected = fingerprint(model), expected_of(model, press, 1)
    with press(model) as outer:
        with kvpress.get_press(SPECS["knorm"])(model) as inner:
            assert same(results(model, 0), expected[0])
            assert inner.cache is not None
        assert same(results(model, 0), expected[0])
        assert outer.cache is not None
        assert outer.cache is not inner.cache
    assert fingerprint(model) == before


@pytest.mark.parametrize("spec", [SPECS["knorm"], SPECS["kvzip"]])
def test_a_cache_that_could_be_of_several_blocks_is_nobodys(spec: str) -> None:
    model, press = small_model(), kvpress.get_press(spec)
    with press(model) as first, kvpress.get_press(spec)(model) as second:
        in_threads(lambda n: results(model, n), 1)
        for session in (first, second):
            with pytest.raises(RuntimeError, match=r"belongs to no single block.*return_dict_in_generate=True"):
                _ = session.cache
        results(model, 0)
        assert second.cache is not None
    assert press.last_cache is None


def test_a_block_entered_in_one_thread_and_left_in_another() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["knorm"])
    before, expected = fingerprint(model), expected_of(model, press, 2)
    block = press(model)
    in_threads(lambda _: block.__enter__(), 1)
    assert same(results(model, 1), expected[1])
    block.__exit__(None, None, None)
    assert fingerprint(model) == before
    assert press.last_cache is not None


def test_a_generator_that_is_not_exhausted() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["knorm"])
    before = fingerprint(model)

    def answers() -> Iterator[Any]:
        with press(model):
            for number in range(8):
                yield results(model, number)

    running = answers()
    next(running)
    with pytest.raises(RuntimeError, match=r"KnormPress.*already active"), kvpress.SnapKVPress(0.5)(model):
        pass
    running.close()
    assert fingerprint(model) == before


def test_asynchronous_tasks() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["h2o"])
    before, expected = fingerprint(model), expected_of(model, press)

    async def ask(number: int) -> bool:
        with press(model) as session:
            output = await asyncio.to_thread(generate, model, number)
            await asyncio.sleep(0)
            return session.cache is output.past_key_values and same(
                (output.sequences, positions(output.past_key_values)), expected[number]
            )

    async def ask_all() -> list[bool]:
        return await asyncio.gather(*map(ask, range(len(expected))))

    assert asyncio.run(ask_all()) == [True] * len(expected)
    assert fingerprint(model) == before


def test_shared_readings_with_different_presses_beside_each_other() -> None:
    model, specs = small_model(), list(SPECS.values())[:4]
    before = fingerprint(model)
    ids = [prompt(n) for n in range(4)]

    def read(number: int) -> Any:
        presses = [kvpress.get_press(specs[number]), kvpress.get_press(specs[number - 1])]
        return [positions(cache) for cache in kvpress.prefill(model, presses, ids[number]).caches]

    expected = [read(number) for number in range(4)]
    for _ in range(5):
        assert in_threads(read) == expected
    assert fingerprint(model) == before


def test_private_blocks_leave_other_threads_alone() -> None:
    model, private = small_model(), kvpress.get_press("knorm:0.3")
    plain, expected = results(model, 2), expected_of(model, private, 3)[2]
    inside, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert done.wait(60)

    with ThreadPoolExecutor(1) as pool:
        handle = model.model.layers[1].mlp.register_forward_hook(wait)
        reading = pool.submit(kvpress.prefill, model, [kvpress.KnormPress(0.5)], prompt(0))
        assert inside.wait(60)
        assert same(results(model, 2), plain)
        with private(model):
            assert same(results(model, 2), expected)
        done.set()
        reading.result()
        handle.remove()
