# SPDX-License-Identifier: Apache-2.0
"""Rounds of the engine: a burst of short requests, several requests about one text, and clients that wait."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from kvpress_eval.serve.engine import BatchEngine
from kvpress_eval.serve.metrics import Metrics
from kvpress_eval.serve.prefixes import Prefixes
from kvpress_eval.serve.requests import Event, GenerationJob, SamplingSettings, TokenEvent
from kvpress_eval.serve.settings import EngineSettings
from kvpress_eval.serve.text import TextStream

import kvpress
from tests.eval.serve.servers import PRESSES, loaded, running, text_of
from tests.eval.serve.test_serve import wait_for

CHUNK = 64


@contextmanager
def still_engine(settings: EngineSettings) -> Iterator[BatchEngine]:
    """Yield an engine without a thread, whose rounds the test runs."""
    model, tokenizer = loaded()
    metrics = Metrics()
    engine = BatchEngine(model, tokenizer, settings, Prefixes(model, 2**28, None, metrics), metrics)
    try:
        yield engine
    finally:
        engine._shut_down()


def submit(
    engine: BatchEngine,
    prompt: str,
    max_tokens: int,
    prefix: str = "",
    deliver: Callable[[Event], None] = lambda event: None,
) -> GenerationJob:
    _, tokenizer = loaded()
    ids, prefix_ids = (
        tuple(tokenizer.encode(text, add_special_tokens=False) if text else ()) for text in (prompt, prefix)
    )
    press = engine.settings.presses[0]
    sampling, text = SamplingSettings(temperature=0), TextStream(tokenizer)
    name = f"cmpl-{len(engine._queue) + len(engine._prompts)}-{prompt[:9]}"
    job = GenerationJob(name, press, prefix_ids, ids, max_tokens, sampling, text, deliver, evicts=not prefix)
    engine.submit(job)
    return job


def rounds_until(engine: BatchEngine, condition: Callable[[], bool], most: int = 200) -> int:
    for count in range(most):
        if condition():
            return count
        engine._round()
    raise AssertionError(f"not within {most} rounds")


def test_a_burst_of_short_requests_is_answered_beside_long_answers() -> None:
    """Four short prompts are read in a round, in the order of their arrival; a part of a long prompt is read alone."""
    with still_engine(EngineSettings(("none",), 2**30, chunk=CHUNK, rows=64)) as engine:
        running_jobs = [submit(engine, text_of(number), 500) for number in range(2)]
        rounds_until(engine, lambda: engine.load["rows"] == 2)
        finished: list[int] = []

        def note(number: int) -> Callable[[Event], None]:
            return lambda event: None if isinstance(event, TokenEvent) else finished.append(number)

        short_jobs = [submit(engine, "A king", 1, deliver=note(number)) for number in range(40)]
        assert rounds_until(engine, lambda: all(job.is_ended for job in short_jobs)) == 10
        assert finished == list(range(40))
        assert not any(job.is_ended for job in running_jobs)


def test_a_long_prompt_and_short_ones_take_turns() -> None:
    with still_engine(EngineSettings(("none",), 2**30, chunk=CHUNK)) as engine:
        long_job = submit(engine, text_of(1, 40), 1)
        num_parts = -(-len(long_job.prompt) // CHUNK)
        engine._round()
        short_jobs = [submit(engine, "A king", 1) for _ in range(num_parts)]
        while not long_job.is_ended:
            engine._round()
        assert all(job.is_ended for job in short_jobs[: num_parts - 2])


def test_requests_about_one_text_do_not_delay_its_reading() -> None:
    text = text_of(2, 40)
    with still_engine(EngineSettings(("none",), 2**30, chunk=CHUNK)) as engine:
        jobs = [submit(engine, " A king", 1, prefix=text) for _ in range(4)]
        num_parts = -(-len(jobs[0].prefix) // CHUNK)
        assert num_parts > 8
        assert rounds_until(engine, lambda: all(job.is_ended for job in jobs)) <= num_parts + 2
        assert [job.cached_tokens for job in jobs] == [0, *3 * [len(jobs[0].prefix)]]


def test_clients_that_wait_cost_the_event_loop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 clients wait for an engine that stands still."""
    resumed, next_round = threading.Event(), BatchEngine._round
    monkeypatch.setattr(BatchEngine, "_round", lambda engine: resumed.wait(60) and next_round(engine))
    settings = EngineSettings(("none",), 2**30, chunk=CHUNK, queue=500)
    content = json.dumps({"model": "reference", "prompt": "A king", "max_tokens": 1}).encode()
    head = "POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json"
    with running(settings) as server, ExitStack() as stack:
        stack.callback(resumed.set)
        for _ in range(500):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1]))))
            connection.sendall("\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content)
        wait_for(lambda: server.engine.load["queued"] == 500)
        assert server.thread.ident is not None
        clock = time.pthread_getcpuclockid(server.thread.ident)
        begin = time.clock_gettime(clock)
        time.sleep(1.5)
        assert server.engine.load["queued"] == 500
        assert time.clock_gettime(clock) - begin < 0.05


@pytest.mark.parametrize(
    "press",
    [
        "none",
        "snapkv:0.3,window_size=16",
        "kivi:bits=4,residual_length=32",
        "h2o:0.2",
        "decoding(knorm):compression_interval=8,target_size=100",
        "snapkv:0.3 + quest:budget=64",
    ],
)
def test_answers_about_one_text_hold_no_more_than_they_reserve(press: str) -> None:
    with still_engine(EngineSettings((press,), 2**30, chunk=CHUNK)) as engine:
        jobs = [submit(engine, f" A king {number}", 40 + number, prefix=text_of(3, 60)) for number in range(5)]
        while not all(job.is_ended for job in jobs):
            engine._round()
            caches = [prefix.cache for prefix in engine.prefixes._by_key.values()]
            caches += [batch.cache for batch in engine._batches]
            if caches and not engine._prompts:
                held_bytes = kvpress.memory_report(*caches).total_bytes
                # Beside the pairs, caches have tables of angles and masks of rows, and a selector an index of the text.
                assert held_bytes <= 1.05 * (engine.admission.reserved + engine.prefixes.held_bytes)
        assert engine.admission.reserved == 0


@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize("sentences", [7, 40])
def test_a_request_that_fits_alone_is_never_blocked_for_ever(press: str, sentences: int) -> None:
    """The limit is exactly what the request needs, so its text takes more than was planned if the plan is too low."""
    with still_engine(EngineSettings((press,), 2**30, chunk=CHUNK)) as engine:
        text = text_of(3, sentences)
        job = submit(engine, " A king", 400, prefix=text)
        engine.admission.limit = max(engine.admission.price(job, None))
        rounds_until(engine, lambda: job.is_ended, 600)
        again = submit(engine, " A king", 400, prefix=text)
        rounds_until(engine, lambda: bool(again.tokens), 50)
        assert (again.cached_tokens, again.tokens[0]) == (len(job.prefix), job.tokens[0])


def test_a_request_whose_text_takes_more_than_was_planned_does_not_block_the_queue() -> None:
    events: list[Event] = []
    with still_engine(EngineSettings(("none",), 2**30, chunk=CHUNK)) as engine:
        first = submit(engine, " A king", 4, prefix=text_of(3))
        rounds_until(engine, lambda: first.is_ended)
        engine.admission.limit = max(engine.admission.price(first, None))
        prefix = engine.prefixes._by_key[first.key]
        engine.prefixes._by_key[first.key] = dataclasses.replace(prefix, held_bytes=2 * engine.admission.limit)
        submit(engine, " A king", 4, prefix=text_of(3), deliver=events.append)
        other = submit(engine, "A queen", 4)
        rounds_until(engine, lambda: other.is_ended, 20)
        assert [getattr(event, "status", 200) for event in events] == [503]
        assert other.generated == 4
