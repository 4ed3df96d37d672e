# SPDX-License-Identifier: Apache-2.0
"""Time of the decode operators on a GPU: one layer of Llama-3.1-8B (32 query and 8 key-value heads, D 128), bfloat16.

    python -m benchmarks.gpu_speed [--shapes 131072x8,32768x1] [--skip int4] [--device cuda] [--small]

Each call reads another copy of its cache; the copies together exceed the L2 cache. All calls of a round are queued behind a
pause, so that events time the device and not the host; `launch_us` is the time of the host to queue one. Other implementations
run in the same process on the same shapes. `bandwidth` is a share of the read bandwidth, which is measured first.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_parts import Row, Task, part_arguments, serve
from benchmarks.gpu_peers import COMPILED, PEERS
from benchmarks.problems import Cache, Coupled, Dense, Rotated, Selected, Streams, Uniform, generator

H, G, D = 8, 4, 128

READ_BYTES = 4 * 2**30
MOST_COPIES = 32
ROUNDS = 15
PART = "kernels"
CACHES: dict[str, Callable[[Streams, int], Cache]] = {
    "dense": lambda s, seed: Dense(s, seed),
    "int4": lambda s, seed: Uniform(s, 4, seed=seed),
    "int2": lambda s, seed: Uniform(s, 2, seed=seed),
    "rotated 2 bit": lambda s, seed: Rotated(s, 2, seed=seed),
    "cq 8c8b": lambda s, seed: Coupled(s, seed=seed),
    "cq 8c8b before rotary": lambda s, seed: Coupled(s, rotary=True, seed=seed),
}
SELECT = "select 1/16"
STEPS: dict[str, Callable[[Selected], Callable[[], object]]] = {
    "": lambda copy: copy.attend,
    ": label scores": lambda copy: copy.score,
    ": top-k": lambda copy: functools.partial(copy.select, copy.score()),
    ": gather": lambda copy: functools.partial(copy.gather, copy.select(copy.score())),
}
"""Selection as a whole, and its three steps."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Timer:
    """Times calls on a device, or on the clock where there is no GPU."""

    device: str
    rounds: int = ROUNDS

    def __call__(self, calls: list[Call]) -> dict[str, float]:
        """Return median and minimum over the rounds of the mean time of a call; the first round is not counted."""
        for call in calls:
            call()
        launch = self._on_clock(calls)
        self._wait()
        times = [self._on_device(calls, launch) for _ in range(self.rounds)]
        return {"median_ms": statistics.median(times), "min_ms": min(times), "launch_us": launch / len(calls) * 1e6}

    def _on_clock(self, calls: list[Call]) -> float:
        self._wait()
        begin = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - begin

    def _on_device(self, calls: list[Call], launch: float) -> float:
        if self.device == "cpu":
            return self._on_clock(calls) / len(calls) * 1e3
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2e9 * 2 * min(launch, 0.1)))  # in cycles; a GPU has at most 2e9 a second
        start.record()
        for call in calls:
            call()
        stop.record()
        self._wait()
        return start.elapsed_time(stop) / len(calls)

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


@dataclass
class Bandwidth:
    """Bytes per millisecond that the device reads, and copies (a copy counts a byte twice); measured once."""

    timer: Timer
    size: int

    @functools.cached_property
    def read(self) -> float:
        """Rate of the fastest plain reduction."""
        buffer = torch.ones(self.size // 4, device=self.timer.device)
        reductions = (buffer.sum, buffer.amax, lambda: torch.linalg.vector_norm(buffer))
        return buffer.numel() * 4 / min(self.timer([call])["min_ms"] for call in reductions)

    @functools.cached_property
    def copy(self) -> float:
        """Rate of a copy from one half of the memory to the other."""
        source = torch.ones(self.size // 8, device=self.timer.device)
        target = torch.empty_like(source)
        return 2 * source.numel() * 4 / self.timer([lambda: target.copy_(source)])["min_ms"]

    def row(self) -> Row:
        """Return both in GB per second."""
        return {"read_gb_per_s": self.read / 1e6, "copy_gb_per_s": self.copy / 1e6}


def copies_of(cache: Cache, device: str) -> int:
    """Return the number of copies of a cache that together exceed the L2 cache four times."""
    if device == "cpu":
        return 2
    fast = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MOST_COPIES, -(-4 * fast // cache.read_bytes())))


@dataclass(frozen=True)
class Shape:
    """Size of a problem; every row has 8 streams."""

    context: int
    """Tokens of a row."""
    batch: int
    """Rows of the batch."""

    def where(self, name: str) -> Row:
        """Return the keys that name a row at this shape."""
        return {"part": PART, "context": self.context, "batch": self.batch, "name": name}

    def streams(self, device: str) -> Streams:
        """Return random queries of the streams."""
        return Streams.random([self.context] * (H * self.batch), G, D, torch.bfloat16, device)


def copies(build: Callable[[Streams, int], Any], streams: Streams) -> list[Any]:
    """Return copies of a cache that together exceed the L2 cache."""
    first = build(streams, 0)
    return [first, *(build(streams, seed) for seed in range(1, copies_of(first, streams.q.device.type)))]


def time_cache(shape: Shape, build: Callable[[Streams, int], Cache], timer: Timer, bandwidth: Bandwidth) -> Row:
    """Return the time of one format."""
    caches = copies(build, shape.streams(timer.device))
    times, read = timer([cache.attend for cache in caches]), caches[0].read_bytes()
    share = read / times["min_ms"] / bandwidth.read
    return {**times, "read_bytes": read, "copies": len(caches), "bandwidth": share}


def time_step(shape: Shape, step: Callable[[Selected], Call], timer: Timer) -> Row:
    """Return the time of selection, or of one of its steps."""
    caches = copies(lambda streams, seed: Selected(Dense(streams, seed)), shape.streams(timer.device))
    return timer([step(cache) for cache in caches])


def time_peer(shape: Shape, prepare: Callable[..., Call], timer: Timer, bandwidth: Bandwidth) -> Row:
    """Return the time of another implementation in its own layout; the share of bandwidth is that of dense pairs."""
    random, device = generator(timer.device), timer.device
    q = torch.randn(shape.batch, H * G, 1, D, generator=random, device=device).bfloat16()
    sizes = (shape.batch, H, shape.context, D)
    pairs = [
        [torch.randn(sizes, generator=random, device=device, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2)
    ]
    calls = [prepare(q, keys, values) for keys, values in pairs]
    read = sum(side.numel() * side.element_size() for side in pairs[0])
    del pairs
    times = timer(calls)
    return {**times, "bandwidth_dense": read / times["min_ms"] / bandwidth.read}


def peer(shape: Shape, name: str, timer: Timer, bandwidth: Bandwidth) -> Task:
    """Return the row of another implementation."""
    return Task(shape.where(name), lambda: time_peer(shape, PEERS[name], timer, bandwidth))


def tasks(shapes: list[Shape], skip: list[str], timer: Timer, size: int) -> list[Task]:
    """Return all rows: the bandwidth, then at every shape our formats, selection, and other implementations.

    Implementations that are compiled first, for some 10 seconds each, come last.
    """
    bandwidth = Bandwidth(timer, size)
    rows = [Task({"part": PART, "bandwidth": "read and copy"}, bandwidth.row)]
    for shape in shapes:
        for name, build in CACHES.items():
            rows.append(Task(shape.where(name), lambda s=shape, b=build: time_cache(s, b, timer, bandwidth)))
        for step, call in STEPS.items():
            rows.append(Task(shape.where(SELECT + step), lambda s=shape, c=call: time_step(s, c, timer)))
        rows += [peer(shape, name, timer, bandwidth) for name in PEERS if name not in COMPILED]
    if timer.device != "cpu":
        rows += [peer(shape, name, timer, bandwidth) for shape in shapes for name in COMPILED]
    return [task for task in rows if not any(str(task.where.get("name")).split(":")[0] == name for name in skip)]


def shapes_of(text: str) -> list[Shape]:
    """Parse shapes joined by commas, each context and batch joined by x: `32768x1,131072x8`."""
    try:
        return [Shape(*(int(size) for size in shape.split("x"))) for shape in text.split(",") if text]
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"shapes are like 32768x1,131072x8, got {text}") from error


def main() -> None:
    parser = part_arguments(__doc__)
    parser.add_argument("--shapes", type=shapes_of, default=shapes_of("131072x8,32768x1,131072x1,32768x8"))
    parser.add_argument("--skip", type=lambda names: names.split(","), default=[], help="formats that are not timed")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    timer = Timer(options.device, 2 if options.small else ROUNDS)
    with torch.no_grad():
        serve(tasks(options.shapes, options.skip, timer, 2**20 if options.small else READ_BYTES), options)


if __name__ == "__main__":
    main()
