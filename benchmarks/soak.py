# SPDX-License-Identifier: Apache-2.0
"""A server under load and faults: answers are compared with those of single requests, and memory must stay flat.

    python -m benchmarks.soak --minutes 30 --clients 16 --out benchmarks/results/soak.json
    python -m benchmarks.soak --table docs/serving.md                        write the record into a page

Clients ask about texts of their own and a shared document under two presses, continue conversations, and ask for JSON.
Meanwhile others disconnect, send broken, huge and half-sent bodies, read slowly, or send more requests at once than the queue
of `QUEUE` takes, and leave after `PATIENCE` seconds. In the end SIGTERM comes while answers run: they must be finished, and
the exit code must be 143.

A batch rounds differently from a single row, so tokens whose logits are equal up to `TIE` may swap: an answer that first
differs there counts as a tie. Memory is flat if the largest resident size of the last third of the run exceeds that of the
middle third by less than `GROWTH`. The clients run in the process of this script, on the same cores as the server.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_model
from benchmarks.pages import put
from benchmarks.serve_load import Server, question_of, serving, stream, text_of

PRESSES = ("snapkv:0.5,window_size=32 + kivi:bits=4,residual_length=32", "none")
TERMINATED = 128 + signal.SIGTERM
QUEUE = 1000
"""Requests that may wait."""
OPTIONS = [
    "--press", PRESSES[1], "--memory", "512MB", "--prefix-memory", "64MB", "--queue", str(QUEUE), "--max-body", "1MB",
    "--preempt", "2",
]  # fmt: skip
TIE = 1e-3
"""Difference of log-probabilities below which two tokens may swap."""
GROWTH = 0.05
"""Share by which resident memory may still grow in the last third."""
BURST, BURST_SECONDS = 1100, 240.0
"""Requests that arrive at once, more than the queue takes, and seconds between two such bursts."""
SCHEMA = {
    "type": "object",
    "properties": {"code": {"type": "integer", "minimum": 0, "maximum": 9999}, "is_known": {"type": "boolean"}},
    "required": ["code", "is_known"],
    "additionalProperties": False,
}
"""JSON schema of some answers."""
PATIENCE = 45.0
"""Seconds after which the clients of a burst leave; those that still wait are dropped from the queue."""
LONGEST = 300.0
"""Seconds after which a request counts as lost."""


@dataclass
class Case:
    """One request with the answer that it gets alone."""

    body: dict[str, Any]
    """Body of the chat."""
    text: str
    """Answer."""
    tokens: list[tuple[str, float]]
    """Each token of the answer, and how much more likely it is than the next one (difference of log-probabilities)."""

    def verdict(self, text: str) -> str:
        """Return `right`, `tie` or `wrong` for an answer under load."""
        if text == self.text:
            return "right"
        begin = 0
        for token, margin in self.tokens:
            if not text.startswith(token, begin):
                return "tie" if margin < TIE else "wrong"
            begin += len(token)
        return "wrong"


@dataclass
class Outcome:
    """Counts of a run, added by all threads."""

    answers: Counter[str] = field(default_factory=Counter)
    """Answers by verdict."""
    faults: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""
    surprises: list[str] = field(default_factory=list)
    """Wrong answers, and responses to faults other than the expected ones."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards all counts."""

    def count(self, counter: Counter[str], name: str, surprise: str = "") -> None:
        """Add one to a counter, and note a surprise."""
        with self.lock:
            counter[name] += 1
            if surprise:
                self.surprises.append(surprise[:500])


def cases_of(server: Server) -> list[Case]:
    """Return requests with the answers that an idle server gives to each alone."""
    cases = []
    status, body = server.request("POST", "/v1/documents", {"text": text_of(99, 500)})
    document = json.loads(body)["id"] if status == 200 else None
    for number in range(8):
        text = "" if number % 4 == 3 else f"{text_of(number, 60 + 40 * number)}\n"
        chat: dict[str, Any] = {"max_tokens": 8 + 4 * number}
        chat["messages"] = [{"role": "user", "content": f"{text}{question_of(number)}"}]
        chat |= {"document": document} if number % 4 == 3 else {"press": PRESSES[number % 2]}
        cases.append(_alone(server, chat))
        if number in (1, 2):  # one under each press
            schema = {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA}}
            cases.append(_alone(server, {**chat, "max_tokens": 40, "response_format": schema}))
            json.loads(cases[-1].text)
        if number % 3 == 0:
            cases.append(_alone(server, _next_turn(server, cases[-1])))
    return cases


def _alone(server: Server, chat: dict[str, Any]) -> Case:
    answer = _complete(server, {**chat, "logprobs": True, "top_logprobs": 2})
    tokens = []
    for entry in answer["choices"][0]["logprobs"]["content"]:
        best, other = (top["logprob"] for top in entry["top_logprobs"])
        tokens.append((entry["token"], best - other))
    return Case(chat, answer["choices"][0]["message"]["content"], tokens)


def _next_turn(server: Server, case: Case) -> dict[str, Any]:
    """Return the chat that continues the cache of a case, which is kept for it."""
    first = _complete(server, {**case.body, "keep_cache": True})
    messages = [*case.body["messages"], first["choices"][0]["message"], {"role": "user", "content": question_of(3)}]
    return {"messages": messages, "cache": first["id"], "max_tokens": 12}


def _complete(server: Server, chat: dict[str, Any]) -> dict[str, Any]:
    status, body = server.request("POST", "/v1/chat/completions", {"model": server.model, "temperature": 0, **chat})
    if status != 200:
        raise RuntimeError(f"a request failed on an idle server: {body.decode()}")
    answer: dict[str, Any] = json.loads(body)
    return answer


def send_case(server: Server, case: Case, outcome: Outcome, pause: float = 0.0) -> None:
    """Stream one case and compare its answer."""
    timing = stream(server, case.body, time.monotonic() + LONGEST, pause)
    if timing.error.startswith("429"):
        outcome.count(outcome.answers, "queue was full")
        time.sleep(0.5)
    elif timing.error.startswith("404") and "cache" in case.body:
        outcome.count(outcome.answers, "conversation was dropped")
    elif timing.error or not timing.is_complete:
        outcome.count(outcome.answers, "failed", f"no answer: {timing.error or 'the stream ended early'}")
    else:
        verdict = case.verdict(timing.text)
        surprise = f"{timing.text!r}, not {case.text!r}, to {case.body}" if verdict == "wrong" else ""
        outcome.count(outcome.answers, verdict, surprise)


def faults_of(server: Server, cases: list[Case]) -> dict[str, Callable[[random.Random], str]]:
    """Return each kind of fault: a function that commits it and returns a surprising response, or nothing."""

    def disconnect(generator: random.Random) -> str:
        stream(server, generator.choice(cases).body, time.monotonic() + generator.uniform(0.05, 2.0))
        return ""

    def bad_json(generator: random.Random) -> str:
        body = generator.choice([b"{", b"\xff\xfe", b"[]", b'{"model": 5}', b'{"model": "model", "messages": []}'])
        return expected(server.request("POST", "/v1/chat/completions", body), 400)

    def huge_body(generator: random.Random) -> str:
        try:
            return expected(server.request("POST", "/v1/completions", b"A" * generator.randint(2**21, 2**23)), 413)
        except OSError:  # refused while it was still being sent
            return ""

    def half_a_body(generator: random.Random) -> str:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
            time.sleep(generator.uniform(0, 1))
        return ""

    def unknown_cache(generator: random.Random) -> str:
        handle = generator.choice(["chatcmpl-0", f"chatcmpl-{generator.getrandbits(96):024x}", "../records/a"])
        messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
        body = {"model": server.model, "messages": messages, "cache": handle}
        return expected(server.request("POST", "/v1/chat/completions", body), 404)

    def too_large(generator: random.Random) -> str:
        body = {"model": server.model, "prompt": [generator.randint(5, 500)] * 9000, "max_tokens": 4}
        return expected(server.request("POST", "/v1/completions", body), 400)

    def burst(generator: random.Random) -> str:
        body = {"model": server.model, "prompt": [generator.randint(5, 500)] * 8, "max_tokens": 1}
        statuses: Counter[int] = Counter()

        def send() -> None:
            with suppress(OSError):  # the client has left
                statuses[server.request("POST", "/v1/completions", body, PATIENCE)[0]] += 1

        threads = [threading.Thread(target=send) for _ in range(BURST)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return "" if set(statuses) == {200, 429} else f"a burst was answered with {dict(statuses)}"

    return {
        function.__name__: function
        for function in (disconnect, bad_json, huge_body, half_a_body, unknown_cache, too_large, burst)
    }


def expected(response: tuple[int, bytes], status: int) -> str:
    """Return a response if it has another status; else nothing."""
    return "" if response[0] == status else f"{response[0]} instead of {status}: {response[1].decode(errors='replace')}"


def run(server: Server, cases: list[Case], minutes: float, clients: int) -> dict[str, Any]:
    """Return the record of a run."""
    outcome = Outcome()
    faults = faults_of(server, cases)
    begin = time.monotonic()
    end = begin + 60 * minutes

    def honest(number: int) -> None:
        generator = random.Random(number)  # noqa: S311 - no secret
        while time.monotonic() < end:
            send_case(server, generator.choice(cases), outcome)

    def slow(number: int) -> None:
        generator = random.Random(number)  # noqa: S311 - no secret
        while time.monotonic() < end:
            send_case(server, generator.choice(cases), outcome, pause=0.2)

    def faulty(number: int) -> None:
        generator = random.Random(number)  # noqa: S311 - no secret
        kinds = [kind for kind in faults if kind != "burst"]
        while time.monotonic() < end:
            kind = generator.choice(kinds)
            outcome.count(outcome.faults, kind, faults[kind](generator))

    def bursting(number: int) -> None:
        while time.monotonic() < end:
            outcome.count(outcome.faults, "burst", faults["burst"](random.Random(number)))  # noqa: S311 - no secret
            time.sleep(max(0.0, min(BURST_SECONDS, end - time.monotonic())))

    roles = [*[honest] * clients, slow, faulty, bursting]
    threads = [threading.Thread(target=role, args=(number,), daemon=True) for number, role in enumerate(roles)]
    for thread in threads:
        thread.start()
    resident, most_queued = [], 0.0
    while any(thread.is_alive() for thread in threads):
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.process.returncode}")
        resident.append(server.memory("VmRSS"))
        most_queued = max(most_queued, server.metric("kvpress_queued"))
        time.sleep(1)
    third = len(resident) // 3
    middle, last = max(resident[third : 2 * third] or resident), max(resident[2 * third :])
    return {
        "minutes": minutes, "clients": clients, "answers": dict(outcome.answers), "faults": dict(outcome.faults),
        "surprises": outcome.surprises, "is_flat": last <= (1 + GROWTH) * middle, "middle_bytes": middle, "last_bytes": last,
        "left_over": leftovers(server), "suspensions": server.metric("kvpress_suspensions_total"),
        "failures": server.metric("kvpress_failures_total"), "most_queued": most_queued,
        "resident_mib": [round(size / 2**20) for size in resident[:: max(1, len(resident) // 60)]],
    }  # fmt: skip


def leftovers(server: Server) -> dict[str, float]:
    """Return requests and reserved bytes that an idle server still counts."""
    names = ("kvpress_queued", "kvpress_prompts", "kvpress_rows", "kvpress_suspended", "kvpress_reserved_bytes")
    end = time.monotonic() + 60
    while any(counts := {name: server.metric(name) for name in names}.values()) and time.monotonic() < end:
        time.sleep(0.5)
    return {name: value for name, value in zip(names, counts, strict=True) if value}


def drain(server: Server, cases: Sequence[Case]) -> dict[str, Any]:
    """Send SIGTERM while answers run; return the verdicts of the answers and the exit code of the server."""
    outcome = Outcome()
    threads = [threading.Thread(target=send_case, args=(server, case, outcome)) for case in cases]
    for thread in threads:
        thread.start()
    while server.metric("kvpress_rows") < 1:
        time.sleep(0.1)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    exit_code = server.process.wait(120)
    return {"answers": dict(outcome.answers), "surprises": outcome.surprises, "exit_code": exit_code}


def is_good(record: dict[str, Any]) -> bool:
    """Return whether a run has no surprise, flat memory, nothing left over, and a clean end."""
    end = record["end"]
    has_no_fault = not (record["surprises"] or record["left_over"] or record["failures"] or end["surprises"])
    return bool(
        has_no_fault and record["is_flat"] and record["answers"].get("right") and end["exit_code"] == TERMINATED
    )


def table(record: dict[str, Any]) -> str:
    """Return a record as Markdown."""
    middle, last = (record[name] / 2**20 for name in ("middle_bytes", "last_bytes"))
    faults = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(record["faults"].items()))
    ends = ", ".join(f"{count} {name}" for name, count in sorted(record["end"]["answers"].items()))
    lines = [
        "| | |",
        "|---|---|",
        *(f"| answers: {name} | {count} |" for name, count in sorted(record["answers"].items())),
        f"| faults | {faults} |",
        f"| unexpected responses to faults | {len(record['surprises'])} |",
        f"| unexpected errors of the engine | {record['failures']:.0f} |",
        f"| suspended answers | {record['suspensions']:.0f} |",
        f"| most waiting requests | {record['most_queued']:.0f} |",
        f"| resident memory, largest in the middle and the last third | {middle:.0f} MiB, {last:.0f} MiB |",
        f"| requests or bytes left over | {len(record['left_over'])} |",
        f"| SIGTERM while answers run | {ends}, exit code {record['end']['exit_code']} |",
        "",
        f"`{record['command']}`: {record['model']}, float32, {record['clients']} clients besides three that are slow or "
        f"faulty, {record['threads']} threads, {record['machine']}, {record['date']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run a soak and write its record, or write the record into a page; exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16, help="clients without faults")
    parser.add_argument("--threads", type=int, default=2, help="threads of the server")
    parser.add_argument("--model", default="smollm2", help="a model with a chat template")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak.json"))
    parser.add_argument("--table", type=Path, help="write the record of --out into this page, and run nothing")
    options = parser.parse_args()
    if options.table is not None:
        put(options.table, "soak", table(json.loads(options.out.read_text())))
        return

    from kvpress.hf.model_files import folder_of

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # stops the server too
    folder = Path(folder_of(options.model))
    with serving(PRESSES[0], folder, options.threads, options.out.with_suffix(".log"), OPTIONS) as server:
        cases = cases_of(server)
        record = run(server, cases, options.minutes, options.clients)
        record["end"] = drain(server, cases[:4])
    record |= {
        "command": " ".join(["python -m benchmarks.soak", *sys.argv[1:]]), "machine": cpu_model(), "model": folder.name,
        "threads": options.threads, "presses": PRESSES, "options": OPTIONS, "date": date.today().isoformat(),
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: value for name, value in record.items() if name != "resident_mib"}, indent=1))
    sys.exit(0 if is_good(record) else 1)


if __name__ == "__main__":
    main()
