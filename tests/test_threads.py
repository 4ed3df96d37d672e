# SPDX-License-Identifier: Apache-2.0
"""Requests beside each other: every thread gets the result that it gets alone, or an error with the fix."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer

import kvpress
from tests.caches import positions
from tests.models import fingerprint, tokens
from tests.threads import (
    SPECS,
    THREADS,
    every_spec,
    expected_of,
    generate,
    in_threads,
    prompt,
    results,
    same,
    small_model,
)

pytestmark = pytest.mark.usefixtures("busy")


@every_spec
def test_threads_in_one_block(spec: str) -> None:
    requests = 15 if spec in (SPECS["knorm"], SPECS["adakv-kivi"]) else 6
    model, press = small_model(), kvpress.get_press(spec)
    before, expected = fingerprint(model), expected_of(model, press)

    def work(thread: int) -> list[int]:
        order = [(thread + n) % len(expected) for n in range(requests)]
        return [number for number in order if not same(results(model, number), expected[number])]

    with press(model):
        assert in_threads(work) == [[]] * THREADS
    assert fingerprint(model) == before


@every_spec
def test_a_block_in_every_thread(spec: str) -> None:
    """Threads may use press objects of their own; `cache` and `last_cache` are those of the thread."""
    model, press = small_model(), kvpress.get_press(spec)
    before, expected = fingerprint(model), expected_of(model, press)

    def work(thread: int) -> int:
        right = 0
        for n in range(4):
            number = (thread + n) % len(expected)
            thread_press = kvpress.get_press(spec) if thread % 2 else press
            with thread_press(model) as session:
                output = generate(model, number)
                right += session.cache is output.past_key_values
            right += thread_press.last_cache is output.past_key_values
            right += same((output.sequences, positions(output.past_key_values)), expected[number])
        return right

    assert in_threads(work) == [12] * THREADS
    assert fingerprint(model) == before


class Numbers:
    """Replaces a tokenizer: ids as text."""

    def decode(self, ids: list[int], **settings: Any) -> str:
        return "".join(f"{int(i)} " for i in ids)


def stream(model: Any, number: int, **settings: Any) -> tuple[Any, threading.Thread]:
    streamer = TextIteratorStreamer(Numbers(), skip_prompt=True, timeout=60)
    settings = {"max_new_tokens": 12, "do_sample": False, **settings}
    thread = threading.Thread(target=model.generate, args=(prompt(number),), kwargs={"streamer": streamer, **settings})
    thread.start()
    return streamer, thread


def ids_of(streamer: Any) -> list[int]:
    return [int(i) for i in "".join(streamer).split()]


@every_spec
def test_streamers(spec: str) -> None:
    model, press = small_model(), kvpress.get_press(spec)
    numbers = (0, 2, 4)  # a streamer takes one row
    with press(model):
        expected = [generate(model, n, max_new_tokens=12).sequences[0, prompt(n).shape[1] :].tolist() for n in numbers]
        streams = [stream(model, n) for n in numbers]
        assert [ids_of(streamer) for streamer, _ in streams] == expected
        for _, thread in streams:
            thread.join()
    with press(model) as session:
        streamer, thread = stream(model, 0)
        assert ids_of(streamer) == expected[0]
        thread.join()
        assert session.cache.get_seq_length() == prompt(0).shape[1] + 11


class Paused:
    """Streamer that waits for `go_on` after `after` pushes."""

    def __init__(self, after: int = 3) -> None:
        self.left, self.reached, self.go_on = after, threading.Event(), threading.Event()

    def put(self, value: Any) -> None:
        self.left -= 1
        if not self.left:
            self.reached.set()
            assert self.go_on.wait(60)

    def end(self) -> None:
        pass


def test_leaving_the_block_while_another_thread_generates() -> None:
    model, press, mild = small_model(), kvpress.get_press(SPECS["h2o"]), kvpress.get_press("knorm:0.3")
    before, plain = fingerprint(model), generate(model, 3)
    settings = {"max_new_tokens": 12}
    with press(model):
        expected = generate(model, 2, **settings)
    with mild(model):
        others = generate(model, 4)
    paused = Paused()
    with ThreadPoolExecutor(1) as pool:
        with press(model):
            running = pool.submit(generate, model, 2, streamer=paused, **settings)
            assert paused.reached.wait(60)
        assert "generate" not in model.__dict__
        # Later requests run a plain model, and another press can be installed.
        output = generate(model, 3)
        assert torch.equal(output.sequences, plain.sequences)
        assert type(output.past_key_values.layers[0]) is type(plain.past_key_values.layers[0])
        with mild(model):
            assert torch.equal(generate(model, 4).sequences, others.sequences)
        paused.go_on.set()
        output = running.result()
    assert torch.equal(output.sequences, expected.sequences)
    assert positions(output.past_key_values) == positions(expected.past_key_values)
    assert fingerprint(model) == before


def test_generate_is_not_run_without_the_press_that_it_was_taken_under() -> None:
    model = small_model()
    with kvpress.KnormPress(0.5)(model):
        late = model.generate
    with pytest.raises(RuntimeError, match=r"read from the model inside.*has ended.*thread\.join"):
        late(prompt(0), max_new_tokens=2)


def test_passes_after_the_block_was_left_in_another_thread() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["adakv-kivi"])
    ready, closed = threading.Event(), threading.Event()

    def work() -> None:
        cache = model(prompt(0), use_cache=True).past_key_values
        ready.set()
        assert closed.wait(60)
        with pytest.raises(RuntimeError, match="can only be read inside a press"):
            model(tokens(1, 1), past_key_values=cache)

    with ThreadPoolExecutor(1) as pool:
        with press(model):
            running = pool.submit(work)
            assert ready.wait(60)
        closed.set()
        running.result()


def test_a_block_that_is_left_in_the_middle_of_a_pass() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["adakv-kivi"])
    before, expected = fingerprint(model), expected_of(model, press)
    inside, closed = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert closed.wait(60)

    with ThreadPoolExecutor(1) as pool:
        handle = model.model.layers[0].mlp.register_forward_hook(wait)
        with press(model):
            running = pool.submit(results, model, 1)
            assert inside.wait(60)
        closed.set()
        assert same(running.result(), expected[1])
        handle.remove()
    assert fingerprint(model) == before


def test_a_plain_generate_goes_on_plainly_when_a_block_opens() -> None:
    """Its passes go on plainly under a press that evicts, that reads prompts in chunks, and after the session."""
    model = small_model()
    before, plain = fingerprint(model), generate(model, 2, max_new_tokens=12)
    for spec in (SPECS["h2o"], SPECS["adakv-kivi"], "bounded(knorm:0.5):chunk=8"):
        press, paused = kvpress.get_press(spec), Paused()
        expected = expected_of(model, press, 1)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(generate, model, 2, max_new_tokens=12, streamer=paused)
            assert paused.reached.wait(60)
            with press(model):
                assert same(results(model, 0), expected[0])
                paused.go_on.set()
                output = running.result()
                # The thread's next request is one inside the session.
                assert same(pool.submit(results, model, 0).result(), expected[0])
        assert torch.equal(output.sequences, plain.sequences)
        assert type(output.past_key_values.layers[0]) is type(plain.past_key_values.layers[0])
    assert fingerprint(model) == before
