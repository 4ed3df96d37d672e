# SPDX-License-Identifier: Apache-2.0
"""Time of linear layers in bfloat16 on a processor without bfloat16 instructions: torch's, and those of `kvpress.hf.linear`.

    python -m benchmarks.linear [--rounds 7] [--threads 1] [--out benchmarks/results/linear_zen3.json]

Both are timed in turn, and the fastest of all rounds counts. Layers are those of SmolLM2 (MLP and output) and of an 8B model.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.machine import cpu_model
from kvpress.cache.matmul import has_bfloat16
from kvpress.hf.linear import speed_up

SHAPES = (576, 1536), (576, 49152), (4096, 14336)
ROWS = 1, 3, 4, 8, 64, 512


def seconds(layer: Callable[[Tensor], Tensor], inputs: Tensor) -> float:
    """Return the time of one call."""
    start = time.perf_counter()
    layer(inputs)
    return time.perf_counter() - start


@torch.no_grad()
def measure(shape: tuple[int, int], rows: int, rounds: int) -> dict[str, float]:
    """Return milliseconds of both layers."""
    layers = {"torch": nn.Linear(*shape, bias=False).bfloat16()}
    layers["float32"] = copy.deepcopy(layers["torch"])
    speed_up(layers["float32"])
    inputs = torch.randn(rows, shape[0]).bfloat16()
    best = dict.fromkeys(layers, float("inf"))
    for _ in range(rounds):
        for name, layer in layers.items():
            best[name] = min(best[name], seconds(layer, inputs))
    return {name: round(1000 * time, 3) for name, time in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if has_bfloat16():
        raise SystemExit("this processor multiplies bfloat16 numbers in hardware, where layers stay as they are")
    torch.set_num_threads(options.threads)
    figures = []
    for shape in SHAPES:
        for rows in ROWS:
            row = {"inputs": shape[0], "outputs": shape[1], "rows": rows, **measure(shape, rows, options.rounds)}
            print(
                f"{shape[0]:6d} to {shape[1]:6d}, {rows:4d} rows: {row['torch']:9.2f} {row['float32']:9.2f} ms",
                flush=True,
            )
            figures.append(row)
    record = {
        "date": date.today().isoformat(),
        "machine": cpu_model(),
        "command": shlex.join(["python", "-m", "benchmarks.linear", *sys.argv[1:]]),
        "torch": torch.__version__,
        "threads": options.threads,
        "milliseconds": figures,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
