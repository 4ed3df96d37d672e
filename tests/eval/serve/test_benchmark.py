# SPDX-License-Identifier: Apache-2.0
"""Figures and verdicts of the server benchmark, on requests with known times and answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import serve, soak
from benchmarks.serve_load import Server, Timing, question_of, run_clients, stream, text_of
from tests.eval.serve.servers import PRESSES, running


def test_figures_count_tokens_within_the_measurement_and_waits_that_it_cuts_off() -> None:
    timings = [
        Timing(0.0, [1.0, 1.5, 3.0], is_complete=True),
        Timing(2.0, [9.0, 10.5]),  # the last token comes after the end
        Timing(4.0),  # still waits at the end
        Timing(5.0, error="429: the queue is full"),
    ]
    figures = serve.figures(0.0, 10.0, timings)
    assert (figures["tokens_a_second"], figures["complete"], figures["unanswered"]) == (0.4, 1, 1)
    assert figures["first_token"] == {"median": 6.0, "p99": 7.0}
    assert figures["gaps"] == {"median": 1.5, "p99": 1.5}
    assert figures["errors"] == ["429: the queue is full"]


def test_the_99th_percentile_is_a_measured_value() -> None:
    assert serve.quantiles([float(n) for n in range(200)]) == {"median": 99.5, "p99": 198.0}
    assert serve.quantiles([]) is None


def test_texts_differ_and_have_their_length() -> None:
    texts = [text_of(n, 100) for n in range(3)]
    assert [len(text.split()) for text in texts] == [100] * 3
    assert len(set(texts)) == 3
    assert text_of(1, 100) == texts[1]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("A king waits", "right"),
        ("A queen waits", "tie"),
        ("The king", "wrong"),
        ("A king", "wrong"),
        ("A kings", "wrong"),
    ],
)
def test_a_first_difference_at_equal_logits_is_a_tie(text: str, verdict: str) -> None:
    case = soak.Case({}, "A king waits", [("A", 2.0), (" king", 1e-5), (" waits", 1.0)])
    assert case.verdict(text) == verdict


def test_clients_of_a_real_server_are_timed_and_its_faults_are_expected(tmp_path: Path) -> None:
    with running() as current:
        port = int(current.url.rpartition(":")[2])
        process: Any = SimpleNamespace(pid="self", poll=lambda: None)
        server = Server(process, port, "reference", has_documents=True)
        cell = {"workload": "documents", "documents": 2, "document_tokens": 80, "answer_tokens": 4}
        begin, end, timings = run_clients(server, 2, 1.0, serve.chats(server, cell))
        figures = serve.figures(begin, end, timings)
        assert figures["complete"] > 0
        assert figures["errors"] == []
        assert server.peak_cache_bytes is not None
        assert server.peak_cache_bytes > current.engine.prefixes.held_bytes > 0
        assert server.memory() >= server.memory("VmRSS") > 2**20
        body = {"messages": [{"role": "user", "content": question_of(0)}], "max_tokens": 6, "press": PRESSES[1]}
        answer = stream(server, body, end + 60)
        case = soak._alone(server, body)
        assert (case.verdict(answer.text), len(case.tokens)) == ("right", 6)
        assert stream(server, {"messages": []}, end + 60).error.startswith("400: ")
        assert not soak.leftovers(server)
    record = {
        "commands": ["python -m benchmarks.serve"], "machine": "M", "level": "avx2", "torch": "2", "transformers": "5",
        "model": "SmolLM2",
        "cells": [
            {"contender": name, "clients": 2, "threads": 1, "seconds": 1.0, "date": "2026-11-27", "peak_bytes": 2**30}
            | cell | figures | {"cache_bytes": size, "tokens_a_second": 12.34}
            for name, size in (("none", 3 * 2**20), ("transformers", None))
        ],
    }  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- serve -->\n<!-- end of serve -->\nAfter\n")
    serve.put(page, "serve", serve.table(record))
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("Before", "After")
    rows = [line.split(" | ") for line in lines if line.startswith("| 2 shared documents, 80 tokens")]
    assert [(row[2], row[3], row[-2], row[-1]) for row in rows] == [
        ("`none`", "12.3", "3", "1024 |"),
        ("`transformers serve`", "12.3", "", "1024 |"),
    ]
