# SPDX-License-Identifier: Apache-2.0
"""Speed of the CPU decode kernels, compared with plain torch and with the memory bandwidth in the same run.

    python benchmarks/kernels_cpu.py [--tokens 32768,131072] [--levels avx2,avx512] [--repeats 9] [--out results.json]

One layer, batch 1, 32 query and 8 key-value heads, D = 128, bfloat16, on one thread and then on two. Every call starts with
cold caches (192 MiB, or the size of the largest cache if that is more, are read between calls), the contenders take turns, and
medians and minima are printed with the error of each result against float32 attention over the same stored cache. Selection
chooses one row in 16 by 16 channels of the keys, stored in 4 bits; its steps are also timed alone, and label scores and top-k
together, as a press runs them. ZipCache reads rows with one scale each. Contenders named float32 are for models of that dtype:
dense rows of it, and codes with scales of it.

The last line of each length is one JSON object of ratios of minima: ``x_vs_y`` is how many times as fast as y x is on one
thread, ``x_two_threads`` how many times as fast as on one, and ``dense_bandwidth`` the fraction of the bandwidth of reading the
same bytes alone, on as many threads (the speed of another array depends on its location in memory).

Instruction-set levels are measured one after the other, each in a process of its own, `all` for every one that this processor
has; torch is limited to the level too, as on a processor without the higher ones (the last level is that of the processor
itself). Forms without a torch kernel at a level, which take ten times as long as the others, are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.levels import levels_of, torch_held_to, use
from benchmarks.machine import cpu_model, streamed_bytes
from benchmarks.problems import Cache, Corrected, Coupled, Dense, Selected, Streams, Uniform
from kvpress.kernels import counters, reset_counters
from kvpress.kernels.cpu import launch

H, G, D = 8, 4, 128
READ = "read"
RATIOS = {
    "int4": "int4",
    "int2": "int2",
    "cq": "cq 8c8b",
    "cq_rotary": "cq 8c8b before rotary",
    "row": "int4 by row",
    "gear": "gear int2 rank 4",
    "gear_l": "gear_l int2 rank 4",
    "select": "select 1/16",
    "float32_int4": "int4 float32",
    "float32_int3": "int3 float32",
}
"""Contenders that are compared with dense decode of their dtype, by their name in the ratios."""

Calls = dict[tuple[str, int], Callable[[], object]]


def encoded(streams: Streams) -> dict[str, Cache]:
    """Return one layer in every format with fewer bits."""
    return {
        "int4": Uniform(streams, 4),
        "int2": Uniform(streams, 2),
        "cq 8c8b": Coupled(streams),
        "cq 8c8b before rotary": Coupled(streams, rotary=True),
        "int4 by row": Uniform(streams, 4, key_group=(1, D), value_group=(1, D)),
        "gear int2 rank 4": Corrected(streams, 2, key_group=(64, 1), value_group=(1, 64)),
        "gear_l int2 rank 4": Corrected(streams, 2, outliers=False, key_group=(64, 1), value_group=(1, 64)),
        "int4 float32": Uniform(streams, 4, scales=torch.float32),
        "int3 float32": Uniform(streams, 3, scales=torch.float32),
    }


def dense_of(name: str) -> str:
    """Return the contender that reads as many pairs uncompressed."""
    return "dense float32" if name.endswith("float32") else "dense"


def reading(dense: Dense) -> Callable[[], object]:
    """Return a sum over the whole cache as float32 numbers: a lower bound of the time of a kernel that reads it."""
    words = [side.view(torch.float32) for side in dense.tensors()]
    return lambda: [side.sum() for side in words]


def torch_forms(dense: Dense) -> dict[str, Callable[[], Tensor]]:
    """Return the fastest forms in plain torch for one query row per head."""
    q = dense.streams.q
    k, v = (side.view(H, -1, D) for side in dense.tensors())

    def grouped_matmul() -> Tensor:
        weights = torch.softmax((q @ k.transpose(1, 2)).float() * D**-0.5, dim=-1)
        return weights.bfloat16() @ v

    return {
        "torch grouped matmul": grouped_matmul,
        "torch sdpa rows": lambda: scaled_dot_product_attention(q[None], k[None], v[None])[0],
    }


def usable(forms: dict[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """Return the forms without those that take ten times as long as the fastest."""
    seconds = {}
    for name, call in forms.items():
        call()  # torch sets up its caches
        begin = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - begin
    return {name: call for name, call in forms.items() if seconds[name] < 10 * min(seconds.values())}


def steps(selected: Selected) -> dict[str, Callable[[], object]]:
    """Return the steps of selection."""
    scores = selected.score()
    rows = selected.select(scores)
    return {
        "  label scores": selected.score,
        "  top-k": lambda: selected.select(scores),
        "  both, no scores held": selected.choose,
        "  gather": lambda: selected.gather(rows),
    }


def take_turns(calls: Calls, repeats: int, flush: Tensor) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of each call, keyed by name and number of threads, with cold caches and interleaved."""
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in calls}
    for warm in range(repeats + 1):
        for (name, threads), call in calls.items():
            torch.set_num_threads(threads)
            flush.sum()
            begin = time.perf_counter()
            call()
            if warm:
                seconds[name, threads].append(time.perf_counter() - begin)
    torch.set_num_threads(1)
    return seconds


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected).abs().max() / expected.abs().max())


def run(tokens: int, repeats: int, streamed: int | None = None) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the ratios, and one row per contender and number of threads; `streamed` bytes are read between calls."""
    flush = torch.ones((streamed or streamed_bytes()) // 4)
    streams = Streams.random([tokens] * H, G, D, torch.bfloat16)
    dense = Dense(streams)
    selected = Selected(dense, label_bits=4)
    wide = Dense(replace(streams, q=streams.q.float()))
    caches: dict[str, Cache] = {"dense": dense, "dense float32": wide, **encoded(streams), "select 1/16": selected}

    expected = {name: cache.reference()[0] for name, cache in caches.items()}
    errors = {name: relative_error(cache.attend()[0], expected[name]) for name, cache in caches.items()}
    plain = usable(torch_forms(dense))
    errors |= {name: relative_error(call(), expected["dense"]) for name, call in plain.items()}

    ours: dict[str, Callable[[], object]] = {READ: reading(dense)}
    ours |= {name: cache.attend for name, cache in caches.items()} | steps(selected)
    calls: Calls = {(name, 1): call for name, call in (plain | ours).items()}
    calls |= {(name, 2): call for name, call in ours.items()}
    seconds = take_turns(calls, repeats, flush)

    best = {key: min(times) for key, times in seconds.items()}
    rows = [row(name, threads, times, errors.get(name)) for (name, threads), times in seconds.items()]
    print(f"T = {tokens}, level {launch.level()}, read bandwidth of 1 and 2 threads at best", end=" ")
    print(*(f"{dense.read_bytes() / best[READ, threads] / 1e9:.1f} GB/s" for threads in (1, 2)))
    for line in rows:
        error = f"  error {line['error']:.1e}" if "error" in line else ""
        times = f"median {line['median_ms']:8.2f} ms  min {line['min_ms']:8.2f} ms"
        print(f"  {line['name']:24s} {line['threads']} threads  {times}{error}")

    def bandwidth(threads: int) -> float:
        return best[READ, threads] / best["dense", threads]

    ratios = {
        "tokens": tokens,
        "dense_bandwidth": bandwidth(1),
        "dense_vs_torch": min(best[name, 1] for name in plain) / best["dense", 1],
        **{f"{key}_vs_dense": best[dense_of(name), 1] / best[name, 1] for key, name in RATIOS.items()},
        "dense_bandwidth_two_threads": bandwidth(2),
        **{f"{key}_two_threads": best[name, 1] / best[name, 2] for key, name in RATIOS.items()},
        "max_error": max(errors[name] for name in caches),
    }
    return {name: round(value, 6) for name, value in ratios.items()}, rows


def row(name: str, threads: int, times: list[float], error: float | None) -> dict[str, Any]:
    figures = {
        "name": name,
        "threads": threads,
        "median_ms": statistics.median(times) * 1e3,
        "min_ms": min(times) * 1e3,
    }
    return figures if error is None else figures | {"error": error}


def measure(level: str, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """Return the figures of one level at each length."""
    torch.set_num_threads(1)
    use(level)
    results = []
    for tokens in lengths:
        reset_counters()
        ratios, rows = run(tokens, repeats)
        assert counters().get("dense_decode"), "the compiled kernels did not run"  # noqa: S101
        results.append({"level": level, "ratios": ratios, "rows": rows})
        print(json.dumps({"level": level, **ratios}), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="32768,131072")
    parser.add_argument("--levels", help="such as avx2,avx512; the fastest one by default, or `all`")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        levels = levels_of(args.levels)
    except ValueError as error:
        parser.error(f"--levels: {error}")
    lengths, results = [int(length) for length in args.tokens.split(",")], []
    for level in levels:
        with torch_held_to(level), multiprocessing.get_context("spawn").Pool(1) as alone:
            results += alone.apply(measure, (level, lengths, args.repeats))
    if args.out:
        record = {
            "date": date.today().isoformat(),
            "machine": cpu_model(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "repeats": args.repeats,
            "results": results,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
