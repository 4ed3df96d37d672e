# SPDX-License-Identifier: Apache-2.0
"""Reading one prompt with several processes: seconds until the cache is compressed, compared with one process.

python benchmarks/parallel.py --length 16384 --processes 2 --out benchmarks/results/parallel.json

Every process has one thread. A random Llama in bfloat16 reads a random prompt; rounds of one and of all processes take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kvpress
from benchmarks.handover import build, write_rows
from kvpress.hf.generation.parallel_prefill import balanced


def reading(rank: int, folder: str, args: argparse.Namespace, queue: Any) -> None:
    """Read the prompt alone and together in turns; the last process sends the seconds of both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=args.processes)
    model, last = build(args.layers, args.hidden), rank == args.processes - 1
    ids = torch.randint(3, 512, (1, args.length), generator=torch.Generator().manual_seed(1))
    even = [args.length // args.processes] * args.processes
    even[-1] += args.length - sum(even)
    for spec in args.press:
        press = kvpress.get_press(spec)
        took: dict[str, list[float]] = {"alone": [], "balanced": [], "even": []}
        for _ in range(args.rounds):
            for way, seconds in took.items():
                dist.barrier()
                started = time.perf_counter()
                if way != "alone":
                    kvpress.parallel_prefill(model, press, ids, parts=even if way == "even" else None)
                elif last:
                    with torch.no_grad(), press(model):
                        model(ids, logits_to_keep=1)
                dist.barrier()
                seconds.append(time.perf_counter() - started)
        if last:
            middle = {f"{way}_seconds": sorted(seconds)[len(seconds) // 2] for way, seconds in took.items()}
            queue.put({"press": spec, "length": args.length, "processes": args.processes,
                       "cuts": balanced(model, args.length, args.processes), **middle})  # fmt: skip


def main() -> None:
    """Print a line for each press, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--press", action="append", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.press = args.press or ["none", "snapkv:0.75 + kivi:bits=4"]
    spawn, rows = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        queue = spawn.Queue()
        running = [spawn.Process(target=reading, args=(rank, folder, args, queue)) for rank in range(args.processes)]
        for process in running:
            process.start()
        for _ in args.press:
            rows.append(row := queue.get())
            alone = row["alone_seconds"]
            print(
                f"{row['press']:28} one process {alone:.2f} s, {args.processes}: {row['balanced_seconds']:.2f} s in parts of "
                f"equal arithmetic ({alone / row['balanced_seconds']:.2f} times as fast), {row['even_seconds']:.2f} s in equal "
                f"parts ({alone / row['even_seconds']:.2f})",
                flush=True,
            )
        for process in running:
            process.join()
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
