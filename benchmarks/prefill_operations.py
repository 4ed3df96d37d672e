# SPDX-License-Identifier: Apache-2.0
"""Operations that a press adds to a prefill on a GPU, counted without one: launches, waits of the host, and products.

    python -m benchmarks.prefill_operations [--tokens 2048,4096] [--layers 2] [--dtype bfloat16] [--press SPEC ...]
                                            [--out benchmarks/results/prefill_operations.json]

A random Llama with the heads of Llama-3.1-8B (32 query and 8 KV heads of 128 channels), but few layers and a small hidden
size, reads a prompt on a device that counts (`benchmarks.counting_device`). Counts depend on shapes and on how many pairs of
each head stay, not on the machine. Each row is per layer; `growth` is the number of launches for 1000 more tokens, by the two
longest prompts. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import kvpress
from benchmarks.counting_device import DEVICE, CountingDevice, Counts
from kvpress.cache.store import KVStore
from kvpress.core import evict, refit
from kvpress.presses.kvzip import KVzipPress
from kvpress.presses.repetition import RepetitionScores
from kvpress.quant import budgeted
from kvpress.quant.rotated import SteppedRows
from kvpress.quant.rounding import QueryMetric

PRESSES = (
    "none",
    "frontier:smaller=10",
    "frontier:smaller=20",
    "frontier:smaller=10,reads=chunk",
    "frontier:smaller=10,passes=1",
)
PHASES: dict[str, list[tuple[Any, str]]] = {
    "second reading": [(KVzipPress, "_repeat")],
    "scores": [(RepetitionScores, "take_in"), (RepetitionScores, "_gather")],
    "layer errors": [(budgeted, "error")],
    "targets": [(evict, "targets")],
    "refit": [(evict, "refit")],
    "encoding": [(KVStore, "settle"), (refit, "kept_keys"), (SteppedRows, "encode")],
    "rounding": [(QueryMetric, "__init__"), (QueryMetric, "fit")],
}
"""Parts of a prefill and their functions; a part does not include those inside it."""


def build_model(layers: int, dtype: torch.dtype, hidden: int = 256) -> LlamaForCausalLM:
    """Return a random model with the heads of Llama-3.1-8B."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2**17,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def count(spec: str, tokens: int, layers: int, dtype: torch.dtype) -> dict[str, Counts]:
    """Return the counts of each phase while a model reads `tokens` tokens under a press."""
    model = build_model(layers, dtype)
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1))
    press = kvpress.get_press(spec)
    with ExitStack() as stack:
        device = stack.enter_context(CountingDevice())
        device.move(model)
        ids = ids.to(DEVICE)
        for name, functions in PHASES.items():
            for owner, function in functions:
                counted = device.phased(name, getattr(owner, function))
                stack.enter_context(mock.patch.object(owner, function, counted))
        device.counts.clear()
        with press(model):
            model(ids, use_cache=True, logits_to_keep=1)
    return device.counts


def measure(spec: str, tokens: int, layers: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return one row per phase, and their sum; launches, waits and uploads per layer."""
    counts = count(spec, tokens, layers, dtype)
    total = Counts()
    for of_phase in counts.values():
        total.add(of_phase)
        total.flops += of_phase.flops
        total.operations += of_phase.operations
    rows = []
    for name in ("other", *PHASES, "all"):
        of_phase = total if name == "all" else counts.get(name)
        if of_phase is None:
            continue
        rows.append(
            {
                "press": spec,
                "tokens": tokens,
                "phase": name,
                "launches": round(of_phase.launches / layers, 1),
                "waits": round(of_phase.waits / layers, 1),
                "uploads": round(of_phase.uploads / layers, 1),
                "gflops": {dtype: round(n / layers / 1e9, 2) for dtype, n in sorted(of_phase.flops.items())},
                "operations": {n: round(c / layers, 1) for n, c in of_phase.operations.most_common(8)},
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows of one press and length."""
    print(f"\n{rows[0]['press']}, {rows[0]['tokens']} tokens, per layer")
    print(f"{'phase':16s}{'launches':>10s}{'waits':>8s}{'uploads':>9s}  GFLOP")
    for row in rows:
        gflops = ", ".join(f"{dtype} {n:g}" for dtype, n in row["gflops"].items())
        print(
            f"{row['phase']:16s}{row['launches']:10.1f}{row['waits']:8.1f}{row['uploads']:9.1f}  {gflops}", flush=True
        )


def growth(rows: list[dict[str, Any]], specs: list[str], lengths: list[int]) -> dict[str, float]:
    """Return the launches per layer for 1000 more tokens, by press, between the two longest prompts."""
    if len(lengths) < 2:
        return {}
    short, long = sorted(lengths)[-2:]
    sums = {(row["press"], row["tokens"]): row["launches"] for row in rows if row["phase"] == "all"}
    return {spec: round((sums[spec, long] - sums[spec, short]) / (long - short) * 1000, 1) for spec in specs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="2048,4096")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--press", action="append")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    specs, lengths = options.press or list(PRESSES), [int(tokens) for tokens in options.tokens.split(",")]
    rows = []
    for spec in specs:
        for tokens in lengths:
            of_press = measure(spec, tokens, options.layers, getattr(torch, options.dtype))
            show(of_press)
            rows += of_press
    record = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.prefill_operations", *sys.argv[1:]]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "layers": options.layers,
        "dtype": options.dtype,
        "rows": rows,
        "growth": growth(rows, specs, lengths),
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
