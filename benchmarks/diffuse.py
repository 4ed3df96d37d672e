# SPDX-License-Identifier: Apache-2.0
"""Masked diffusion: tokens per pass, time per token and held bytes, without a cache, with both caches and with Sparse-dLLM.

python benchmarks/diffuse.py --length 2048 --new 128 --threads 8
python benchmarks/diffuse.py --length 2048 --new 128 --steps 8 --rounds 1 --threads 2
python benchmarks/diffuse.py --check

A random Llama, or the model of `--model`, continues a random prompt. Weights do not change the time of a step on a fixed
schedule; the number of tokens that reach a threshold is meaningful for a trained model only. Without a cache every step reads
the full sequence, which takes most of the time: 3 * 128 passes in the first command, 32 in the second, which has 56 full passes
in all. Passes and tokens read are compared with the formula of docs/diffusion.md; `--check` does so for a small case in
seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import kvpress
from benchmarks.handover import build

WAYS: dict[str, dict[str, Any]] = {
    "none": {"cache": "none"},
    "prefix": {"cache": "prefix"},
    "dual": {"cache": "dual"},
    "dual, sparse_dllm:0.5": {"cache": "dual", "press": "sparse_dllm:0.5,block_length={block}", "full_steps": 2},
    "dual, sparse_dllm:0.5 + kivi 4 bit": {
        "cache": "dual", "press": "sparse_dllm:0.5,block_length={block} + kivi:bits=4,residual_length=0", "full_steps": 2,
    },
}  # fmt: skip


def measure(model: Any, ids: torch.Tensor, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one way of reading a few times; return its figures, with the median time."""
    settings = {"new_tokens": args.new, "block_length": args.block, "mask_token": 3, **WAYS[way]}
    settings |= {"steps": args.steps} if args.threshold is None else {"threshold": args.threshold}
    if "press" in settings:
        settings["press"] = kvpress.get_press(settings["press"].format(block=args.block))
    times = []
    for _ in range(args.rounds):
        started = time.perf_counter()
        result = kvpress.diffuse(model, ids, **settings)
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    seconds = sorted(times)[len(times) // 2]
    return {
        "way": way,
        "forwards": result.forwards,
        "full_forwards": result.full_forwards,
        "fed_tokens": result.fed_tokens,
        "steps": result.steps,
        "tokens_per_forward": result.tokens_per_forward,
        "ms_per_token": 1000 * seconds / args.new,
        "held_bytes": 0 if result.cache is None else kvpress.memory_report(result.cache).total_bytes,
    }


def check(row: dict[str, Any], args: argparse.Namespace) -> None:
    """Compare the passes and tokens of a way with the formula.

    Raises:
        ValueError: they differ.
    """
    settings, passes, full_passes, fed = WAYS[row["way"]], 0, 0, 0
    total = args.length + args.new
    for first, steps in zip(range(args.length, total, args.block), row["steps"], strict=True):
        full = steps if settings["cache"] == "none" else min(steps, settings.get("full_steps", 1))
        block = min(args.block, total - first)
        short = total - first if settings["cache"] == "prefix" else block
        passes, full_passes, fed = passes + steps, full_passes + full, fed + full * total + (steps - full) * short
    counts = (row["forwards"], row["full_forwards"], row["fed_tokens"])
    if counts != (passes, full_passes, fed * args.batch):
        raise ValueError(
            f"{row['way']}: took {counts} passes, full passes and tokens instead of {(passes, full_passes, fed * args.batch)}"
        )


def main() -> None:
    """Print a line for each way of reading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model, such as reference; a random Llama by default")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--steps", type=int, help="steps of a block; one token per step by default")
    parser.add_argument("--threshold", type=float)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.check:
        args.length, args.new, args.block, args.layers, args.hidden, args.rounds = 80, 20, 8, 2, 256, 1
    torch.set_num_threads(args.threads)
    model = build(args.layers, args.hidden) if args.model is None else kvpress.load_model(args.model)[0]
    model = model.to(args.device)
    ids = torch.randint(4, 512, (args.batch, args.length), generator=torch.Generator().manual_seed(1)).to(args.device)
    rows = []
    for way in WAYS:
        row = measure(model, ids, way, args)
        check(row, args)
        rows.append(row)
        print(
            f"{way:36} {row['forwards']:4} passes, {row['full_forwards']:4} whole, {row['fed_tokens']:>8,} tokens read, "
            f"{row['tokens_per_forward']:.2f} tokens a pass, {row['ms_per_token']:8.1f} ms a token, "
            f"{row['held_bytes']:>12,} bytes"
        )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
