# SPDX-License-Identifier: Apache-2.0
"""Errors in any stage of the engine end the requests of that stage alone; an engine that cannot go on ends the server."""

from __future__ import annotations

import errno
import gc
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from kvpress_eval.serve.admission import Admission
from kvpress_eval.serve.answers import AnswerFormat
from kvpress_eval.serve.batch import Batch, PromptReader
from kvpress_eval.serve.engine import BatchEngine
from kvpress_eval.serve.prefixes import Prefixes
from kvpress_eval.serve.settings import EngineSettings
from kvpress_eval.serve.suspension import SuspendedRows
from kvpress_eval.serve.text import TextStream

from kvpress.hf.cache.prefix_store import PrefixStore
from tests.eval.serve.servers import PRESSES, RunningServer, alone, loaded, running, text_of
from tests.eval.serve.test_serve import QUESTION, complete, post, wait_for

VICTIM = "none"
QUOTED = "a text that the error quotes"
MARK = "no such text"
"""Stop string by which the text of the victim is known."""


class PanicError(BaseException):
    """Error outside `Exception`, as panics of Rust libraries are."""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as current:
        yield current


def failures(server: RunningServer, stage: str) -> float:
    return server.engine.metrics.registry.get_sample_value("kvpress_failures_total", {"stage": stage}) or 0.0


def fail(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_victim: Callable[..., bool], error: BaseException
) -> None:
    """Let the first call for the victim raise an error."""
    original, pending = getattr(owner, name), [error]

    def faulty(*args: Any, **settings: Any) -> Any:
        if pending and is_victim(*args):
            raise pending.pop()
        return original(*args, **settings)

    monkeypatch.setattr(owner, name, faulty)


FAULTS: dict[str, tuple[str, Any, str, Callable[..., bool]]] = {
    "admission": ("admission", Admission, "admit", lambda _, job, *rest: job.press == VICTIM),
    "pin": ("admission", Prefixes, "pin", lambda _, key, user: key.press == VICTIM),
    "prefill": ("prefill", PromptReader, "read_part", lambda prompt: prompt.job.press == VICTIM),
    "decode": ("decode", Batch, "step", lambda batch: batch.steps.press == VICTIM),
    "leave": ("decode", Batch, "keep", lambda batch, _: batch.steps.press == VICTIM),
    "text": ("sampling", TextStream, "feed", lambda text, _: text.stop == (MARK,)),
    "end of the text": ("sampling", TextStream, "finish", lambda text: text.stop == (MARK,)),
}


@pytest.mark.parametrize(
    ("fault", "error"),
    [*((fault, ValueError(QUOTED)) for fault in FAULTS), ("decode", PanicError(QUOTED)), ("text", PanicError(QUOTED))],
)
def test_a_fault_ends_its_request_and_no_other(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    error: BaseException,
) -> None:
    stage, owner, name, is_victim = FAULTS[fault]
    before = failures(server, stage)
    prompt = text_of(1) + QUESTION
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        bystander = pool.submit(complete, server, prompt, 40)
        wait_for(lambda: server.engine.load["rows"] == 1)
        fail(patch, owner, name, is_victim, error)
        with pytest.raises(openai.InternalServerError, match=QUOTED):  # to its client, not to the log
            complete(server, prompt, 8, stop=MARK, extra_body={"press": VICTIM})
        assert bystander.result().choices[0].text == alone(PRESSES[0], prompt, 40)
    assert failures(server, stage) == before + 1
    server.wait_until_idle()
    assert complete(server, prompt, 8, extra_body={"press": VICTIM}).choices[0].text == alone(VICTIM, prompt, 8)
    records = [json.loads(message) for message in caplog.messages if '"failure"' in message]
    assert [(record["stage"], record["error"]) for record in records] == [(stage, type(error).__name__)]
    assert records[0]["frames"][-1].endswith(" faulty")
    assert QUOTED not in caplog.text
    assert "tiger" not in caplog.text


@pytest.mark.parametrize("press", PRESSES)
def test_an_error_inside_the_model_leaves_the_press_usable_and_frees_the_cache(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, press: str
) -> None:
    """Errors in the second layer: in the second part of a prompt, and in a decode step."""
    prompt, caches, step = text_of(2) + QUESTION, [], Batch.step
    monkeypatch.setattr(Batch, "step", lambda batch: (caches.append(weakref.ref(batch.cache)), step(batch))[1])
    layer = loaded()[0].model.layers[1].self_attn
    for passes in (2, 8):
        num_passes = 0

        def count(*_: Any, last: int = passes) -> None:
            nonlocal num_passes
            num_passes += 1
            if num_passes == last:
                raise RuntimeError("no kernel")

        hook = layer.register_forward_hook(count)
        try:
            with pytest.raises(openai.InternalServerError, match="RuntimeError: no kernel"):
                complete(server, prompt, 12, extra_body={"press": press})
        finally:
            hook.remove()
        server.wait_until_idle()
        answer = complete(server, prompt, 12, extra_body={"press": press}).choices[0].text
        assert answer == alone(press, prompt, 12)
    assert caches
    gc.collect()
    assert sum(cache() is not None for cache in caches) <= 1  # a session keeps the last cache


def test_a_fault_of_one_row_spares_the_others_of_its_batch(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text_of(1) + QUESTION
    with ThreadPoolExecutor(1) as pool:
        bystander = pool.submit(complete, server, prompt, 40)
        wait_for(lambda: server.engine.load["rows"] == 1)
        fail(
            monkeypatch, TextStream, "feed", lambda text, _: text.stop == (MARK,) and len(text._tokens) == 3,
            MemoryError(QUOTED),
        )  # fmt: skip
        chunks: list[str] = []
        with pytest.raises(openai.APIError, match=QUOTED):
            chunks.extend(chunk.choices[0].text for chunk in complete(server, prompt, 30, stop=MARK, stream=True))
        assert bystander.result().choices[0].text == alone(PRESSES[0], prompt, 40)
    server.wait_until_idle()


def test_a_fault_of_the_round_itself_ends_what_runs_and_nothing_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(EngineSettings(PRESSES, 2**30, chunk=64, rows=1)) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(complete, server, text_of(1), 3000)
        wait_for(lambda: server.engine.load["rows"] == 1)
        second = pool.submit(complete, server, text_of(2), 6)
        wait_for(lambda: server.engine.load["queued"] == 1)
        fail(monkeypatch, BatchEngine, "_resume", lambda _: True, RuntimeError("lost count"))
        assert second.result().choices[0].text == alone(PRESSES[0], text_of(2), 6)
        with pytest.raises(openai.InternalServerError, match="lost count"):
            first.result()
        assert failures(server, "round") == 1
        server.wait_until_idle()


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_answer_that_cannot_be_suspended_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvpress_eval.serve.suspension.kvpress.save", full_disk)
    settings = EngineSettings(("none",), 2**30, rows=1, preempt_seconds=0.0)
    with running(settings) as server, ThreadPoolExecutor(2) as pool:
        long = pool.submit(complete, server, text_of(1), 200)
        wait_for(lambda: server.engine.load["rows"] == 1)
        short = pool.submit(complete, server, text_of(2), 3)
        assert long.result().choices[0].text == alone("none", text_of(1), 200)
        assert short.result().choices[0].text == alone("none", text_of(2), 3)
        assert failures(server, "preemption") == 1  # tried once, not in each round
    assert "No space left on device" in caplog.text  # the message of the system quotes no text


def test_a_suspended_answer_whose_file_is_lost_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(("none",), 2**30, rows=1, preempt_seconds=0.0)
    with running(settings) as server, ThreadPoolExecutor(2) as pool:
        long = pool.submit(complete, server, text_of(1), 200)
        wait_for(lambda: server.engine.load["rows"] == 1)
        fail(monkeypatch, SuspendedRows, "load", lambda *_: True, ValueError("damaged"))
        short = pool.submit(complete, server, text_of(2), 3)
        assert short.result().choices[0].text == alone("none", text_of(2), 3)
        with pytest.raises(openai.InternalServerError, match="damaged"):
            long.result()
        assert (failures(server, "resume"), server.engine.load["suspended"]) == (1, 0)
        server.wait_until_idle()


@pytest.mark.parametrize("place", ["save", "PrefixStore._lock", "Path.mkdir"])
def test_a_full_disk_costs_the_files_and_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    with running(store=PrefixStore(tmp_path), prefix_bytes=600_000) as server:
        monkeypatch.setattr(f"kvpress.hf.cache.prefix_store.{place}", full_disk)
        for number in range(3):
            document = post(server, "/v1/documents", {"text": text_of(number), "chat": False}).json()
            answer = complete(server, QUESTION, 6, extra_body={"document": document["id"]}).choices[0].text
            assert answer == alone(PRESSES[0], QUESTION, 6, behind=text_of(number))
        assert failures(server, "store") >= 3
        server.wait_until_idle()


def test_a_response_that_breaks_in_a_stream_ends_with_an_error(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = failures(server, "response")
    fail(monkeypatch, AnswerFormat, "logprobs", lambda _, tokens: bool(tokens), ValueError(QUOTED))
    with pytest.raises(openai.APIError, match=QUOTED):
        list(complete(server, "A king", 4, stream=True))
    assert failures(server, "response") == before + 1
    assert QUOTED not in caplog.text
    server.wait_until_idle()


def broken(*_: Any) -> None:
    raise RuntimeError("no device")


def test_requests_that_always_fail_do_not_end_a_sound_engine(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PromptReader.read_part

    def read_part(prompt: PromptReader) -> bool:
        return broken() or False if prompt.job.press == "h2o:0.2" and prompt.job.name != "test" else original(prompt)

    monkeypatch.setattr(PromptReader, "read_part", read_part)
    for _ in range(8):
        with pytest.raises(openai.InternalServerError, match="no device"):
            complete(server, "A king", 4, extra_body={"press": "h2o:0.2"})
    assert server.get("/health").status_code == 200
    assert failures(server, "test") == 0


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Batch, "step"),
        (PromptReader, "read_part"),
        (TextStream, "feed"),
        (BatchEngine, "_admit"),
        (BatchEngine, "_wait"),
    ],
    ids=["decode", "prefill", "text", "round", "engine"],
)
def test_an_engine_that_cannot_go_on_ends_all_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: Any, name: str
) -> None:
    with running(EngineSettings(PRESSES, 2**30, chunk=64, rows=1)) as server, ThreadPoolExecutor(8) as pool:
        lost = threading.Event()
        server.engine.on_lost = lost.set
        first = pool.submit(complete, server, text_of(1), 3000)
        wait_for(lambda: server.engine.load["rows"] == 1)
        waiting = [pool.submit(complete, server, text_of(n), 6) for n in range(2, 8)]
        wait_for(lambda: server.engine.load["queued"] == 6)
        monkeypatch.setattr(owner, name, broken)
        if owner is PromptReader:  # which the running answer does not need
            server.engine.cancel(server.engine._batches[0].rows[0].job)
        assert lost.wait(30)
        errors = [each.exception() for each in waiting]
        assert {type(error) for error in errors} == {openai.InternalServerError}
        assert any("the engine of this server has failed" in str(error) for error in errors)
        wait_for(first.done)
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert not any(server.engine.load.values())
        assert server.engine.admission.reserved == 0
        response = post(server, "/v1/completions", {"model": "reference", "prompt": "A", "max_tokens": 2})
        assert (response.status_code, "has failed" in response.json()["error"]["message"]) == (503, True)
    assert '{"event": "lost"}' in caplog.messages


PROGRAM = """
import sys
from kvpress_eval.serve.answers import AnswerFormat
from kvpress_eval.serve.batch import Batch
from kvpress_eval.console import app
step, steps = Batch.step, []
def failing(batch):
    steps.append(1)
    if len(steps) > 40:
        raise RuntimeError("no device, and {text}")
    return step(batch)
Batch.step = failing
sys.argv[1:] = ["serve", "--model", "reference", "--port", "{port}", "--dtype", "float32", "--rows", "2"]
app()
"""


@pytest.mark.slow
def test_the_process_of_a_lost_engine_ends_with_an_exit_code(tmp_path: Path, free_port: int) -> None:
    url, log = f"http://127.0.0.1:{free_port}", tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-c", PROGRAM.format(text=QUOTED, port=free_port)], stdout=file, stderr=file
        )
    try:
        wait_until_up(url, process)
        body = {"model": "reference", "prompt": "A king", "max_tokens": 300, "temperature": 0}
        with ThreadPoolExecutor(8) as pool:
            statuses = [
                pool.submit(lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code)
                for _ in range(8)
            ]
            assert {each.result() for each in statuses} == {500, 503}
        assert process.wait(30) == 8
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    assert '{"event": "lost"}' in text
    assert "error: the engine failed again and again" in text.replace("\n", " ")
    assert QUOTED not in text


@pytest.mark.slow
def test_sigterm_finishes_running_answers(free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    program = "from kvpress_eval.console import app; app()"
    options = ["serve", "--model", "reference", "--dtype", "float32", "--port", str(free_port)]
    process = subprocess.Popen([sys.executable, "-c", program, *options])  # noqa: S603 - our own program
    try:
        wait_until_up(url, process)
        body = {"model": "reference", "prompt": [5, 6, 7], "max_tokens": 200, "seed": 1, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert process.wait(30) == 143
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_answers_that_outlast_the_drain_end_with_an_error(free_port: int) -> None:
    """Two answers run, one of them in a stream, and two wait."""
    url = f"http://127.0.0.1:{free_port}"
    program = "from kvpress_eval.console import app; app()"
    options = [
        "serve",
        "--model",
        "reference",
        "--dtype",
        "float32",
        "--port",
        str(free_port),
        "--drain",
        "1",
        "--rows",
        "2",
    ]
    process = subprocess.Popen([sys.executable, "-c", program, *options])  # noqa: S603 - our own program
    body = {"model": "reference", "prompt": [5, 6, 7], "max_tokens": 4000, "temperature": 0}

    def streamed() -> list[str]:
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
            return [line for line in response.iter_lines() if line]

    try:
        wait_until_up(url, process)
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(streamed) for _ in range(2)]
            others = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60) for _ in range(2)]
            wait_for(lambda: httpx.get(f"{url}/health").json()["queued"] == 2)
            process.send_signal(signal.SIGTERM)
            for each in streams:
                error = json.loads(each.result()[-1].removeprefix("data: "))["error"]
                assert (error["code"], "was shut down" in error["message"]) == (503, True)
            for other in others:
                assert (other.result().status_code, other.result().json()["error"]["type"]) == (503, "server_error")
        assert process.wait(30) == 143
    finally:
        process.kill()
        process.wait()


def wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300  # a cluster starts slowly
    while True:
        assert process.poll() is None
        assert time.monotonic() < end
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
