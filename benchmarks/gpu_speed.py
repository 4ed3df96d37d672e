# SPDX-License-Identifier: Apache-2.0
"""Time of the decode operators on a GPU: one layer of Llama-3.1-8B (32 query and 8 key-value heads, D 128), bfloat16.

    python -m benchmarks.gpu_speed [--shapes 32768x1,131072x8] [--skip int4] [--peers] [--device cuda] [--small]

A call reads another copy of its cache each time, more copies than the L2 cache holds. All calls of a round are queued behind
a pause, so that events time the device and not the host; `launch_us` is what the host takes to queue one. With `--peers`,
what else there is runs on the same shapes instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_parts import Budget, emit, part_arguments, reason
from benchmarks.gpu_peers import COMPILED, PEERS
from benchmarks.problems import Cache, Coupled, Dense, Selected, Streams, Uniform, generator

H, G, D = 8, 4, 128

READ_BYTES = 4 * 2**30
MOST_COPIES = 32
ROUNDS = 15
CACHES: dict[str, Callable[[Streams, int], Cache]] = {
    "dense": lambda s, seed: Dense(s, seed),
    "int4": lambda s, seed: Uniform(s, 4, seed=seed),
    "int2": lambda s, seed: Uniform(s, 2, seed=seed),
    "cq 8c8b": lambda s, seed: Coupled(s, seed=seed),
    "cq 8c8b before rotary": lambda s, seed: Coupled(s, rotary=True, seed=seed),
    "select 1/16": lambda s, seed: Selected(Dense(s, seed)),
}
Call = Callable[[], object]


@dataclass(frozen=True)
class Timer:
    """Times calls on a device, or on the clock where there is no GPU."""

    device: str
    rounds: int = ROUNDS

    def __call__(self, calls: list[Call]) -> dict[str, float]:
        """Median and minimum over the rounds of the mean time of a call; the first round is not counted."""
        for call in calls:
            call()
        launch = self._on_clock(calls)
        self._wait()
        times = [self._on_device(calls, launch) for _ in range(self.rounds)]
        return {"median_ms": statistics.median(times), "min_ms": min(times), "launch_us": launch / len(calls) * 1e6}

    def _on_clock(self, calls: list[Call]) -> float:
        begin = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - begin

    def _on_device(self, calls: list[Call], launch: float) -> float:
        if self.device == "cpu":
            return self._on_clock(calls) / len(calls) * 1e3
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2e9 * 2 * min(launch, 0.1)))  # in cycles, of which there are at most 2e9 a second
        start.record()
        for call in calls:
            call()
        stop.record()
        self._wait()
        return start.elapsed_time(stop) / len(calls)

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def read_bandwidth(timer: Timer, size: int) -> float:
    """Bytes per millisecond of the fastest plain reduction over `size` bytes."""
    buffer = torch.ones(size // 4, device=timer.device)
    best = min(timer([call])["min_ms"] for call in (buffer.sum, buffer.amax, lambda: torch.linalg.vector_norm(buffer)))
    return buffer.numel() * 4 / best


def copies_of(cache: Cache, device: str) -> int:
    """How many copies of a cache do not fit into the L2 cache together, four times over."""
    if device == "cpu":
        return 2
    fast = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MOST_COPIES, -(-4 * fast // cache.read_bytes())))


def time_caches(context: int, batch: int, skip: list[str], timer: Timer, bandwidth: float, budget: Budget) -> None:
    """Report every format at one shape, as far as time and memory go."""
    streams = Streams.random([context] * (H * batch), G, D, torch.bfloat16, timer.device)
    for name in CACHES:
        if name in skip or not budget.left:
            continue
        at = {"part": "speed", "context": context, "batch": batch, "name": name}
        try:
            time_cache(at, streams, timer, bandwidth)
        except Exception as problem:  # no memory, or a kernel that fails: the others still count
            emit(**at, failed=reason(problem))
        release(timer.device)


def time_cache(at: dict[str, Any], streams: Streams, timer: Timer, bandwidth: float) -> None:
    """Report one format."""
    build = CACHES[at["name"]]
    first = build(streams, 0)
    copies = [first, *(build(streams, seed) for seed in range(1, copies_of(first, timer.device)))]
    found, read = timer([copy.attend for copy in copies]), first.read_bytes()
    emit(**at, **found, read_bytes=read, copies=len(copies), bandwidth=read / found["min_ms"] / bandwidth)
    if isinstance(first, Selected):
        time_steps(at, copies, timer)


def time_steps(at: dict[str, Any], copies: list[Selected], timer: Timer) -> None:
    """Report what selection spends its time on."""
    scores = [copy.score() for copy in copies]
    rows = [copy.select(score) for copy, score in zip(copies, scores, strict=True)]
    steps: dict[str, list[Call]] = {
        "label scores": [copy.score for copy in copies],
        "top-k": [lambda c=copy, s=score: c.select(s) for copy, score in zip(copies, scores, strict=True)],
        "gather": [lambda c=copy, r=listed: c.gather(r) for copy, listed in zip(copies, rows, strict=True)],
    }
    for step, calls in steps.items():
        emit(**{**at, "name": f"{at['name']}: {step}"}, **timer(calls))


def time_peers(context: int, batch: int, timer: Timer, budget: Budget) -> None:
    """Report what else there is, each in the layout it wants; those that are not installed are named."""
    device = timer.device
    random = generator(device)
    q = torch.randn(batch, H * G, 1, D, generator=random, device=device).bfloat16()
    shape = (batch, H, context, D)
    pairs = [
        [torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2)
    ]
    for name, prepare in PEERS.items():
        if not budget.left:
            return
        if device == "cpu" and name in COMPILED:
            continue
        at = {"part": "speed", "context": context, "batch": batch, "name": name}
        try:
            emit(**at, **timer([prepare(q, keys, values) for keys, values in pairs]))
        except ImportError as missing:
            emit(**at, missing=reason(missing))
        except Exception as problem:  # a peer that does not run here is a finding
            emit(**at, failed=reason(problem))
        release(device)


def release(device: str) -> None:
    if device != "cpu":
        torch.cuda.empty_cache()


def shapes(text: str) -> list[tuple[int, ...]]:
    """Sizes joined by x, shapes by commas: `32768x1,131072x8`."""
    try:
        return [tuple(int(size) for size in shape.split("x")) for shape in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"shapes are like 32768x1,131072x8, got {text}") from error


def main() -> None:
    parser = part_arguments(__doc__)
    parser.add_argument("--shapes", type=shapes, default=shapes("32768x1,32768x8,32768x32,131072x1,131072x8,131072x32"))
    parser.add_argument("--peers", action="store_true")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    budget = Budget(args.seconds)
    timer = Timer(args.device, 2 if args.small else ROUNDS)
    with torch.no_grad():
        bandwidth = read_bandwidth(timer, 2**20 if args.small else READ_BYTES)
        emit(part="machine", read_gb_per_s=bandwidth / 1e6)
        for context, batch in args.shapes:
            if args.peers:
                time_peers(context, batch, timer, budget)
            else:
                time_caches(context, batch, args.skip, timer, bandwidth, budget)


if __name__ == "__main__":
    main()
