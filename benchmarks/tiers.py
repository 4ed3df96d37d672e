# SPDX-License-Identifier: Apache-2.0
"""Time per generated token by the storage of pairs: memory against memory-mapped files.

    python benchmarks/tiers.py [--context 8192] [--rounds 7] [--threads 1] [--folder /on/a/disk]
                               [--out benchmarks/results/tiers.json]

The random Llama of `benchmarks/decode.py` decodes with caches of random pairs, from which Quest and Double Sparsity choose;
runs of all caches are interleaved and medians are compared. `file` reads pages that the system still has in memory. `file,
cold` makes the system write out and drop all pages before each token (`MADV_PAGEOUT`, Linux), so that chosen ones are read from
the disk of `--folder`. A folder in memory (tmpfs) does not measure a disk. Bytes fetched are those of chosen pairs; the system
reads whole pages. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

import kvpress
from benchmarks.decode import build_model, ours, press_of
from benchmarks.machine import cpu_model
from kvpress.cache.tier import in_file
from kvpress.hf.models import with_cache

SPECS = {
    "quest 1024": "quest:budget=1024",
    "double sparsity 1/16": "double_sparsity:budget=0.0625",
}
MADV_PAGEOUT = 21
STEPS = 4


def forget(cache: Any) -> None:
    """Drop the pages of all files of a cache from memory."""
    os.sync()  # pages that are not written yet cannot be dropped
    libc = ctypes.CDLL(None, use_errno=True)
    for layer in cache.layers:
        for segment in layer.store.segments:
            for tensor in (t for tensors in segment.storage().values() for t in tensors):
                size = tensor.numel() * tensor.element_size()
                if in_file(tensor) and libc.madvise(
                    ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size), MADV_PAGEOUT
                ):
                    raise OSError(
                        ctypes.get_errno(), "this system does not support MADV_PAGEOUT, which drops pages from memory"
                    )


@torch.no_grad()
def time_token(model: Any, cache: Any, press: Any, cold: bool) -> float:
    """Return the milliseconds per token over a few steps, of which the first is not counted."""
    token, times = torch.tensor([[5]]), []
    with kvpress.reading(model, press):
        for _ in range(STEPS + 1):
            if cold:
                forget(cache)
            start = time.perf_counter()
            model(token, **with_cache(cache), use_cache=True)
            times.append((time.perf_counter() - start) * 1e3)
    return sum(times[1:]) / STEPS


def measure(context: int, rounds: int, folder: str | None) -> dict[str, dict[str, float]]:
    """Interleave all contenders; return milliseconds, the bytes in memory and in files, and the bytes that a token fetches."""
    model, table = build_model(), {}
    for name, spec in SPECS.items():
        press = press_of(spec)
        table[f"{name}, memory"] = press, False, ours(model, press, context)
        for kind, cold in (("file", False), ("file, cold", True)):
            moved = kvpress.OffloadPress(press, folder=folder)
            table[f"{name}, {kind}"] = moved, cold, ours(model, moved, context)
    times: dict[str, list[float]] = {name: [] for name in table}
    for _ in range(rounds):
        for name, (press, cold, cache) in table.items():
            times[name].append(time_token(model, cache, press, cold))
    rows = {}
    for name, (_, _, cache) in table.items():
        report = kvpress.memory_report(cache)
        rows[name] = {
            "median_ms": statistics.median(times[name]),
            "min_ms": min(times[name]),
            "memory_mib": report.device_bytes / 2**20,
            "file_mib": report.file_bytes / 2**20,
            "fetched_mib_per_token": report.fetched_bytes / (rounds * (STEPS + 1)) / 2**20,
        }
        print(f"{name:36s} " + "  ".join(f"{key} {value:8.2f}" for key, value in rows[name].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", help="folder of the files; that for temporary files by default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record = {
        "date": date.today().isoformat(),
        "machine": cpu_model(),
        "threads": options.threads,
        "torch": torch.__version__,
        "context": options.context,
        "rounds": options.rounds,
        "folder": options.folder or tempfile.gettempdir(),
        "rows": measure(options.context, options.rounds, options.folder),
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
