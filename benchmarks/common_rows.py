# SPDX-License-Identifier: Apache-2.0
"""Many rows that share one prompt: bytes held and time per token, with the prompt's pairs stored once and with a copy per row.

python benchmarks/common_rows.py --length 8192 --rows 1 8 32 --out benchmarks/results/common_rows.json

A random Llama in bfloat16 reads a random prompt under every press; then all rows continue it, each with its own tokens. Both
ways take turns, token by token.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch

import kvpress
from benchmarks.handover import build, write_rows
from kvpress.cache import common
from kvpress.hf.models import with_cache


def repeated(cache: Any, rows: int, min_pairs: int) -> Any:
    """Return a copy of a cache for `rows` rows; pairs of a stream are stored once where it has at least `min_pairs` of them."""
    before, common.LEAST = common.LEAST, min_pairs
    try:
        copied = copy.deepcopy(cache)
        copied.batch_repeat_interleave(rows)
    finally:
        common.LEAST = before
    return copied


def main() -> None:
    """Print a line for each press and number of rows, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--press", action="append", default=None)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, generator = build(args.layers, args.hidden), torch.Generator().manual_seed(1)
    ids, results = torch.randint(3, 512, (1, args.length), generator=generator), []
    for spec in args.press or ["none", "snapkv:0.75", "kivi:bits=4", "snapkv:0.75 + kivi:bits=4"]:
        press = kvpress.get_press(spec)
        with torch.no_grad(), press(model):
            cache = model(ids, logits_to_keep=1).past_key_values
        for rows in args.rows:
            ways = {"once": repeated(cache, rows, 1), "copies": repeated(cache, rows, 2**60)}
            held_bytes = {way: kvpress.memory_report(row_cache).total_bytes for way, row_cache in ways.items()}
            took: dict[str, list[float]] = {way: [] for way in ways}
            for token in torch.randint(3, 512, (args.tokens, rows, 1), generator=generator):
                for way, row_cache in ways.items():
                    started = time.perf_counter()
                    with torch.no_grad(), kvpress.reading(model, press):
                        model(token, **with_cache(row_cache))
                    took[way].append(time.perf_counter() - started)
            seconds = {way: sorted(times)[len(times) // 2] for way, times in took.items()}
            results.append({
                "press": spec, "rows": rows, "length": args.length,
                **{f"{way}_bytes": held_bytes[way] for way in ways}, **{f"{way}_seconds": seconds[way] for way in ways},
            })  # fmt: skip
            print(
                f"{spec:28} {rows:>3} rows: {held_bytes['once'] / 2**20:8.1f} MiB and {1e3 * seconds['once']:7.1f} ms a token, "
                f"copies {held_bytes['copies'] / 2**20:8.1f} MiB and {1e3 * seconds['copies']:7.1f} ms: "
                f"{held_bytes['copies'] / held_bytes['once']:.1f} and {seconds['copies'] / seconds['once']:.1f} times as much",
                flush=True,
            )
    if args.out:
        write_rows(args.out, results)


if __name__ == "__main__":
    main()
