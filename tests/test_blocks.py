# SPDX-License-Identifier: Apache-2.0
"""Blocks beside each other and inside each other: the same press shares them, another one is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kvpress
from tests.caches import positions
from tests.models import fingerprint
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


def test_different_presses_are_refused_with_both_names() -> None:
    model = small_model()
    words = r"KnormPress\(compression_ratio=0.5.*already active.*SnapKVPress\(.*press_a \+ press_b.*lock"

    def other(_: int) -> None:
        with pytest.raises(RuntimeError, match=words), kvpress.SnapKVPress(0.5)(model):
            pass
        with (
            pytest.raises(RuntimeError, match=r"KnormPress.*\(reading\)"),
            kvpress.reading(model, kvpress.KnormPress(0.5)),
        ):
            pass

    before = fingerprint(model)
    with kvpress.KnormPress(0.5)(model):
        inside = fingerprint(model)
        in_threads(other, 2)
        other(0)
        assert fingerprint(model) == inside
    assert fingerprint(model) == before


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
            with pytest.raises(RuntimeError, match=r"not known whose.*return_dict_in_generate=True"):
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
            found = await asyncio.to_thread(generate, model, number)
            await asyncio.sleep(0)
            return session.cache is found.past_key_values and same(
                (found.sequences, positions(found.past_key_values)), expected[number]
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
    model, other = small_model(), kvpress.get_press("knorm:0.3")
    plain, expected = results(model, 2), expected_of(model, other, 3)[2]
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
        with other(model):
            assert same(results(model, 2), expected)
        done.set()
        reading.result()
        handle.remove()
