# SPDX-License-Identifier: Apache-2.0
"""Decode attention over heads of unequal lengths: time relative to that over as many pairs in heads of equal lengths.

python benchmarks/ragged.py --threads 2 --out benchmarks/results/ragged.json

Heads are cut into pieces that threads take one after another, so threads should be no longer idle where one head holds most
pairs. Both ways take turns; the median of the ratios of neighbouring turns is printed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.handover import write_rows
from kvpress import kernels
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.core.spec import get_press

SKEWS = {
    "one head of 8 holds half": [1 / 2, *[1 / 14] * 7],
    "lengths fall by half": [2.0**-n for n in range(1, 8)] + [2.0**-7],
}
DIM, GROUPS = 128, 4


def segment(lengths: list[int], spec: str) -> Segment:
    """Return random pairs of heads of some lengths: dense for `none`, else in the format of a press."""
    layout = Layout(lengths)
    keys, values = (torch.randn(layout.total, DIM, dtype=torch.bfloat16) for _ in range(2))
    dense = DenseSegment(keys, values, layout)
    codec = None if spec == "none" else get_press(spec).recipe().codec
    return dense if codec is None else codec(0).encode(dense, Sealing(heads=len(lengths)))


def seconds(queries: Tensor, part: Segment) -> float:
    """Return the time of one decode."""
    rows = part.operand()
    started = time.perf_counter()
    kernels.decode(queries, rows, kernels.Ranges(*part.layout.on(queries.device)), kernels.Options(DIM**-0.5))
    return time.perf_counter() - started


def main() -> None:
    """Print a line for each storage and skew, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2**18, help="pairs of all heads together")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results = []
    for spec in ("none", "kivi:bits=4,group_size=32"):
        for name, shares in SKEWS.items():
            lengths = [int(args.pairs * share) // 32 * 32 for share in shares]
            even = [sum(lengths) // 8 // 32 * 32] * 8
            queries = torch.randn(8, GROUPS, DIM, dtype=torch.bfloat16)
            ways = [segment(even, spec), segment(lengths, spec)]
            turns = [[seconds(queries, part) for part in ways] for _ in range(args.rounds)]
            ratio = sorted(skewed / plain for plain, skewed in turns)[args.rounds // 2]
            middle = [sorted(times)[args.rounds // 2] for times in zip(*turns, strict=True)]
            results.append({
                "press": spec, "lengths": lengths, "threads": args.threads, "even_seconds": middle[0],
                "skewed_seconds": middle[1], "ratio": ratio,
            })  # fmt: skip
            print(
                f"{spec:26} {name:26} {1e3 * middle[0]:6.2f} ms even, {1e3 * middle[1]:6.2f} ms skewed: {ratio:.2f}",
                flush=True,
            )
    if args.out:
        write_rows(args.out, results)


if __name__ == "__main__":
    main()
