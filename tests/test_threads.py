"""Requests beside each other: every thread gets what it would have got alone, or an error that says what to do."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, TextIteratorStreamer

import kvpress
from tests.caches import positions
from tests.models import COMMON, fingerprint, tokens

THREADS = 4
SPECS = {
    "knorm": "knorm:0.5",
    "h2o": "h2o:0.5",
    "adakv-kivi": "adakv(snapkv:0.5,window_size=4) + kivi:bits=4,group_size=4,residual_length=4",
    "quest": "quest:budget=8,page_size=4,skip_layers=0",
    "kvzip": "kvzip:0.5,repeat_prompt=",
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.fixture(autouse=True)
def busy() -> Iterator[None]:
    """Let threads take turns fifty times as often as the interpreter does by itself."""
    before, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-4)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(before)
    torch.set_num_threads(threads)


@cache
def small_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, "num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8})).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def prompt(number: int) -> Tensor:
    return tokens(1 + number % 2, 20 + 3 * number, seed=number)


def generate(model: Any, number: int, **settings: Any) -> Any:
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, **settings}
    return model.generate(prompt(number), **settings)


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Run `work(n)` in so many threads, which begin together."""
    ready = threading.Barrier(count)

    def run(number: int) -> Any:
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def results(model: Any, number: int) -> tuple[Tensor, Any]:
    found = generate(model, number)
    return found.sequences, positions(found.past_key_values)


def expected_of(model: Any, press: Any, count: int = 8) -> list[Any]:
    with press(model):
        return [results(model, number) for number in range(count)]


def same(found: tuple[Tensor, Any], wanted: tuple[Tensor, Any]) -> bool:
    return torch.equal(found[0], wanted[0]) and found[1] == wanted[1]


@every_spec
def test_threads_in_one_block(spec: str) -> None:
    requests = 50 if spec in (SPECS["knorm"], SPECS["adakv-kivi"]) else 12
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
    """Also with presses that are other objects; what block and press say of caches is the thread's own."""
    model, press = small_model(), kvpress.get_press(spec)
    before, expected = fingerprint(model), expected_of(model, press)

    def work(thread: int) -> int:
        right = 0
        for n in range(4):
            number = (thread + n) % len(expected)
            own = kvpress.get_press(spec) if thread % 2 else press
            with own(model) as session:
                found = generate(model, number)
                right += session.cache is found.past_key_values
            right += own.last_cache is found.past_key_values
            right += same((found.sequences, positions(found.past_key_values)), expected[number])
        return right

    assert in_threads(work) == [12] * THREADS
    assert fingerprint(model) == before


class Numbers:
    """Stands in for a tokenizer: ids as text."""

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
    """A streamer that stops generation after `after` pushes until `go_on` is set."""

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
    model, press, other = small_model(), kvpress.get_press(SPECS["h2o"]), kvpress.get_press("knorm:0.3")
    before, plain = fingerprint(model), generate(model, 3)
    settings = {"max_new_tokens": 12}
    with press(model):
        expected = generate(model, 2, **settings)
    with other(model):
        others = generate(model, 4)
    paused = Paused()
    with ThreadPoolExecutor(1) as pool:
        with press(model):
            running = pool.submit(generate, model, 2, streamer=paused, **settings)
            assert paused.reached.wait(60)
        assert "generate" not in model.__dict__
        # Other requests are those of a plain model, and other presses can have it.
        found = generate(model, 3)
        assert torch.equal(found.sequences, plain.sequences)
        assert type(found.past_key_values.layers[0]) is type(plain.past_key_values.layers[0])
        with other(model):
            assert torch.equal(generate(model, 4).sequences, others.sequences)
        paused.go_on.set()
        found = running.result()
    assert torch.equal(found.sequences, expected.sequences)
    assert positions(found.past_key_values) == positions(expected.past_key_values)
    assert fingerprint(model) == before


def test_generate_is_not_run_without_the_press_that_it_was_taken_under() -> None:
    model = small_model()
    with kvpress.KnormPress(0.5)(model):
        late = model.generate
    with pytest.raises(RuntimeError, match=r"taken from the model inside.*left since.*thread\.join"):
        late(prompt(0), max_new_tokens=2)


def test_passes_after_the_block_was_left_in_another_thread() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["adakv-kivi"])
    made, left = threading.Event(), threading.Event()

    def work() -> None:
        found = model(prompt(0), use_cache=True).past_key_values
        made.set()
        assert left.wait(60)
        with pytest.raises(RuntimeError, match="can only be read inside a press"):
            model(tokens(1, 1), past_key_values=found)

    with ThreadPoolExecutor(1) as pool:
        with press(model):
            running = pool.submit(work)
            assert made.wait(60)
        left.set()
        running.result()


def test_a_block_that_is_left_in_the_middle_of_a_pass() -> None:
    model, press = small_model(), kvpress.get_press(SPECS["adakv-kivi"])
    before, expected = fingerprint(model), expected_of(model, press)
    inside, left = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert left.wait(60)

    with ThreadPoolExecutor(1) as pool:
        handle = model.model.layers[0].mlp.register_forward_hook(wait)
        with press(model):
            running = pool.submit(results, model, 1)
            assert inside.wait(60)
        left.set()
        assert same(running.result(), expected[1])
        handle.remove()
    assert fingerprint(model) == before


# -- blocks beside each other ----------------------------------------------------------------------------------


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


# -- one cache ---------------------------------------------------------------------------------------------------


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
        found = in_threads(lambda _: model(tokens(1, 1), past_key_values=caches[1]).logits, 1)
    assert torch.equal(found[0], expected)
