# SPDX-License-Identifier: Apache-2.0
"""Servers in processes of their own, the texts that clients send, and clients that time each token of a stream.

Imports no torch: the clients must not take the processor from the server.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOREIGN = ("transformers", "llama.cpp")
"""Servers of other projects."""
START_SECONDS = 600
"""Longest time for a server to load its model."""
WORDS = (
    *(
        "river",
        "hill",
        "king",
        "queen",
        "wind",
        "tree",
        "stone",
        "bridge",
        "market",
        "garden",
        "ship",
        "harbour",
        "letter",
    ),
    *(
        "road",
        "castle",
        "winter",
        "summer",
        "baker",
        "painter",
        "doctor",
        "child",
        "song",
        "lamp",
        "window",
        "door",
        "field",
    ),
    *("horse", "cloud", "rain", "morning", "evening", "island", "forest", "tower", "coin", "book"),
)
QUESTIONS = ("What is the code for {}?", "Which code belongs to {}?", "Repeat the code for {}.", "Sum up the text.")


def text_of(number: int, words: int) -> str:
    """Return a text with facts, another one for each number: `words` words, about 1.3 tokens of SmolLM2 each."""
    generator = random.Random(number)  # noqa: S311 - no secret
    parts: list[str] = []
    while sum(map(len, (part.split() for part in parts))) < words:
        chosen = generator.sample(WORDS, 6)
        parts.append(
            f"The {chosen[0]} near the {chosen[1]} has a {chosen[2]}, and no {chosen[3]} sees the {chosen[4]}."
        )
        if generator.random() < 0.1:
            parts.append(f"The code for {chosen[5]} is {generator.randint(1000, 9999)}.")
    return " ".join(" ".join(parts).split()[:words])


def question_of(number: int) -> str:
    """Return a question about a text."""
    return QUESTIONS[number % len(QUESTIONS)].format(WORDS[number % len(WORDS)])


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    """Process of the server."""
    port: int
    """Port on loopback."""
    model: str
    """Name of the model in requests."""
    has_documents: bool
    """Whether texts are uploaded, or sent with each question."""
    peak_cache_bytes: int | None = None
    """Largest sum of shared texts and planned bytes of running requests; None if the server does not report it."""

    def request(self, method: str, path: str, body: Any = None, timeout: float = 600) -> tuple[int, bytes]:
        """Return status and body of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def memory(self, name: str = "VmHWM") -> int:
        """Return the peak (`VmHWM`) or the present (`VmRSS`) resident bytes of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", status)
        return 1024 * int(found[1]) if found else 0

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        _, body = self.request("GET", "/metrics")
        lines = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", body.decode(), flags=re.MULTILINE)
        return sum(map(float, lines))

    def sample(self) -> None:
        """Record the bytes of caches, if the server reports them."""
        if self.has_documents:
            held_bytes = int(self.metric("kvpress_prefix_bytes") + self.metric("kvpress_reserved_bytes"))
            self.peak_cache_bytes = max(held_bytes, self.peak_cache_bytes or 0)

    def forget_peaks(self) -> None:
        """Begin the peaks of memory and of caches again, from what is held now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        self.peak_cache_bytes = None


@contextmanager
def serving(contender: str, source: Path, threads: int, log: Path, options: list[str]) -> Iterator[Server]:
    """Run a server until the block ends: `transformers`, `llama.cpp` (of a GGUF file), or `kvpress serve` under a press.

    The first of `options` for llama.cpp is its program, `llama-server`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    is_ours = contender not in FOREIGN
    if contender == "llama.cpp":
        program, *options = options
        command = [program, "--model", str(source), "--threads", str(threads), "--no-webui"]
    elif contender == "transformers":
        command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(source)]
        command += ["--continuous-batching", "--device", "cpu", "--dtype", "float32"]
    else:
        command = [sys.executable, "-c", "from kvpress_eval.console import app; app()", "serve", "--model", str(source)]
        command += ["--press", contender, "--threads", str(threads), "--name", "model", "--dtype", "float32"]
    command += ["--port", str(port), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    server = Server(process, port, "model" if is_ours else str(source), is_ours)
    try:
        end = time.monotonic() + START_SECONDS
        while not is_up(server):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{contender} did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_up(server: Server) -> bool:
    """Return whether a server answers."""
    with suppress(OSError, http.client.HTTPException):
        return server.request("GET", "/health", timeout=5)[0] == 200
    return False


@dataclass
class Timing:
    """Times of one request, in seconds of the monotonic clock."""

    started: float
    """Time of sending."""
    tokens: list[float] = field(default_factory=list)
    """Arrival of each piece of text; servers send one for each token that completes a text."""
    text: str = ""
    """Answer so far."""
    is_complete: bool = False
    """Whether the stream ended by itself."""
    error: str = ""
    """Error of the request."""


def stream(server: Server, body: dict[str, Any], end: float, pause: float = 0.0) -> Timing:
    """Send a chat and read its stream until `end`; `pause` seconds pass before each line is read."""
    timing = Timing(time.monotonic())
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=max(1.0, end - timing.started))
    try:
        content = json.dumps({"model": server.model, "stream": True, "temperature": 0, **body}).encode()
        connection.request("POST", "/v1/chat/completions", content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            timing.error = f"{response.status}: {response.read()[:300].decode(errors='replace')}"
            return timing
        while time.monotonic() < end and (line := response.readline()):
            _read_line(line, timing)
            time.sleep(pause)
    except TimeoutError:
        return timing  # the end of the measurement
    except (OSError, http.client.HTTPException) as error:
        timing.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return timing


def _read_line(line: bytes, timing: Timing) -> None:
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return
    data = json.loads(line.removeprefix(b"data: "))
    if "error" in data:
        timing.error = str(data["error"]["message"])
    for choice in data.get("choices", []):
        if text := choice.get("delta", {}).get("content"):
            timing.text += text
            timing.tokens.append(time.monotonic())
        timing.is_complete |= choice.get("finish_reason") is not None


def run_clients(
    server: Server, clients: int, seconds: float, body: Callable[[int, int], dict[str, Any]]
) -> tuple[float, float, list[Timing]]:
    """Let clients send one chat after another; return begin and end of the measurement, and all requests.

    `body(client, number)` is the chat of a client's request.
    """
    begin = time.monotonic()
    end = begin + seconds
    timings: list[Timing] = []

    def run(client: int) -> None:
        number = 0
        while time.monotonic() < end:
            timings.append(stream(server, body(client, number), end))
            number += 1
            if timings[-1].error:
                time.sleep(0.2)

    threads = [threading.Thread(target=run, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        server.sample()
        time.sleep(0.5)
    return begin, end, timings
