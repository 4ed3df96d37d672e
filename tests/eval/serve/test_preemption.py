# SPDX-License-Identifier: Apache-2.0
"""A short request that has waited suspends long answers, which then go on as if nothing had happened."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kvpress_eval.serve.settings import EngineSettings

from tests.eval.serve.servers import NOISE, PRESSES, RunningServer, alone, running, text_of
from tests.eval.serve.test_serve import QUESTION, complete, wait_for


def suspensions(server: RunningServer) -> float | None:
    return server.engine.metrics.registry.get_sample_value("kvpress_suspensions_total")


def press_of(press: str) -> dict[str, Any]:
    return {"extra_body": {"press": press}}


@pytest.mark.parametrize("press", PRESSES)
def test_a_long_answer_gives_way_and_goes_on_bit_by_bit(press: str) -> None:
    """Two long answers of one batch, the first of which is suspended and joins the other one again."""
    prompts, tokens = [text_of(n) + QUESTION for n in range(3)], (110, 90, 3)
    settings = EngineSettings(PRESSES, 2**30, chunk=64, rows=2, preempt_seconds=0.0)
    with running(settings) as server, ThreadPoolExecutor(3) as pool:
        long = []
        for n in range(2):
            long.append(pool.submit(complete, server, prompts[n], tokens[n], **press_of(press)))
            wait_for(lambda n=n: server.engine.load["rows"] == n + 1)
        short = pool.submit(complete, server, prompts[2], tokens[2], **press_of(press))
        assert short.result().choices[0].text == alone(press, prompts[2], tokens[2])
        assert not any(each.done() for each in long)
        for n in range(2):
            assert long[n].result().choices[0].text == alone(press, prompts[n], tokens[n])
        assert suspensions(server) == 1
        server.wait_until_idle()


def test_memory_of_suspended_answers_is_lent() -> None:
    """The long answers reserve almost all memory; requests that are not short, or have not waited, do not suspend them."""
    prompt = NOISE * 14
    with running(EngineSettings(("none",), 2**30)) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(complete, server, prompt, 100)
        wait_for(lambda: server.engine.load["rows"] == 1)
        reserved = server.engine.admission.reserved
    for preempt_seconds, tokens, expected in ((0.0, 6, 2), (0.0, 90, 0), (60.0, 6, 0)):
        settings = EngineSettings(("none",), 2 * reserved, preempt_seconds=preempt_seconds)
        with running(settings, prefix_bytes=1) as server, ThreadPoolExecutor(3) as pool:
            long = [pool.submit(complete, server, prompt, 100) for _ in range(2)]
            wait_for(lambda server=server: server.engine.load["rows"] == 2)
            answer = complete(server, NOISE * 35 if expected else prompt, tokens)
            assert answer.usage.completion_tokens == tokens
            assert suspensions(server) == expected
            assert long[0].result().choices[0].text == long[1].result().choices[0].text == alone("none", prompt, 100)
            server.wait_until_idle()


def test_a_client_that_leaves_ends_its_suspended_answer() -> None:
    settings = EngineSettings(("none",), 2**30, rows=1, preempt_seconds=0.0)
    with running(settings) as server, ThreadPoolExecutor(1) as pool:
        stream = complete(server, text_of(1), 3000, stream=True)
        next(stream)
        short = pool.submit(complete, server, text_of(2), 100)
        wait_for(lambda: server.engine.load["suspended"] == 1)
        stream.close()
        wait_for(lambda: server.engine.load["suspended"] == 0)
        assert short.result().usage.completion_tokens == 100
        server.wait_until_idle()
