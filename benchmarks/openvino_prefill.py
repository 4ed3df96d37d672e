# SPDX-License-Identifier: Apache-2.0
"""XAttention of OpenVINO and ours on the same layer: time and error of attention over a prompt, in turns in one process.

    PYTHONPATH=.:eval python -m benchmarks.openvino_prefill [--lengths 8192 32768] [--threads 2] [--rounds 3]
                                  [--prompts diffuse local] [--out benchmarks/results/openvino_prefill.json]

The layer is that of `benchmarks/patterns.py`: 8 query and 2 kv heads of dim 64, float32. `diffuse` is its random prompt; in
`local` neighbours resemble each other, so that thresholds skip most of a long prompt. Both read tiles of 64 by 64 tokens,
estimated with stride 8. OpenVINO's operator is paged attention, which also copies keys and values into pages of 32 tokens; ours
reads them in place. Error is the norm of the difference to full attention, relative to its norm. OpenVINO does not report the
tiles that it read. Times are the best of all rounds, in which contenders take turns; shorter prompts have more rounds. On a
busy machine, run it again: rows of an earlier run of the same versions, with the same threads, stay where they were faster.
Without OpenVINO (extra `bench`) its rows give the reason. The table is written into `docs/prefill.md`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvpress
from benchmarks.machine import cpu_model
from benchmarks.pages import DOCS, put
from benchmarks.patterns import density, random_prompt
from kvpress.core.pattern import Pattern, PromptTensors

THRESHOLDS = (0.8, 0.5, 0.2)
BLOCK, STRIDE, PAGE = 64, 8, 32

Run = Callable[[], Tensor]


def local_prompt(length: int, width: int = 256) -> PromptTensors:
    """Return a layer whose queries attend to about `width` neighbours, with noise added."""
    prompt = random_prompt(length)
    turns = torch.arange(length)[:, None] * torch.randn(64) / width + 2 * torch.pi * torch.rand(64)
    place = 8 * 32**-0.5 * turns.cos()
    return replace(prompt, queries=prompt.queries + place, keys=prompt.keys + place)


PROMPTS = {"diffuse": random_prompt, "local": local_prompt}


def dense(prompt: PromptTensors) -> Tensor:
    """Return full attention by torch."""
    return torch.nn.functional.scaled_dot_product_attention(
        prompt.queries, prompt.keys, prompt.values, is_causal=True, enable_gqa=True
    )


def ours(threshold: float) -> Pattern:
    press: Any = kvpress.get_press(f"xattention:threshold={threshold},block={BLOCK},stride={STRIDE}")
    pattern: Pattern = press.pattern_at(0)
    return pattern


def openvino(prompt: PromptTensors, threads: int) -> Callable[[float | None], Run]:
    """Return a function that attends with a threshold, or fully, by OpenVINO's operator of paged attention.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    import openvino as ov
    import openvino.opset15 as op

    heads, groups, dim = prompt.keys.shape[1], prompt.group, prompt.keys.shape[3]
    inputs: list[Any] = []

    def given(name: str, shape: list[int], kind: Any = np.int32) -> Any:
        inputs.append(op.parameter(shape, kind, name))
        inputs[-1].output(0).get_tensor().set_names({name})
        return inputs[-1].output(0)

    def none(kind: Any = np.int32) -> Any:
        return op.constant(np.zeros(0, kind)).output(0)

    def number(value: float, kind: Any = np.int32) -> Any:
        return op.constant(np.array(value, kind)).output(0)

    f32 = np.float32
    node = ov.op._PagedAttentionExtension(
        [
            given("queries", [-1, heads * groups * dim], f32), given("keys", [-1, heads * dim], f32),
            given("values", [-1, heads * dim], f32), given("key_cache.0", [-1, heads, PAGE, dim], f32),
            given("value_cache.0", [-1, heads, PAGE, dim], f32), given("past_lens", [-1]), given("subsequence_begins", [-1]),
            given("block_indices", [-1]), given("block_indices_begins", [-1]), number(prompt.logits.scale, f32), number(0),
            none(f32), given("max_context_len", []),
            # Scores, and rotations of cached keys.
            none(), none(), none(), none(f32),
            given("threshold", [-1], f32), number(BLOCK), number(STRIDE),
            # Sinks, eviction by diversity, kinds of tokens, trees of candidates.
            none(f32), number(0), none(), none(), none(), none(), none(np.uint8), none(),
        ]
    )  # fmt: skip
    for side in "kv":
        node.get_rt_info()[f"num_{side}_heads"], node.get_rt_info()[f"{side}_head_size"] = heads, dim
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    compiled = ov.Core().compile_model(ov.Model([node.output(0)], inputs, "attention"), "CPU", settings)
    request, length = compiled.create_infer_request(), prompt.total
    pages = -(-length // PAGE)
    tensors = {
        **{name: np.zeros((pages, heads, PAGE, dim), f32) for name in ("key_cache.0", "value_cache.0")},
        **{
            name: np.ascontiguousarray(tensor[0].transpose(0, 1).flatten(1).numpy())
            for name, tensor in (("queries", prompt.queries), ("keys", prompt.keys), ("values", prompt.values))
        },
        "past_lens": np.zeros(1, np.int32),
        "subsequence_begins": np.array([0, length], np.int32),
        "block_indices": np.arange(pages, dtype=np.int32),
        "block_indices_begins": np.array([0, pages], np.int32),
        "max_context_len": np.array(length, np.int32),
    }
    for name, array in tensors.items():
        request.set_tensor(name, ov.Tensor(array))

    def at(threshold: float | None) -> Run:
        shares = np.array([] if threshold is None else [threshold], f32)

        def run() -> Tensor:
            request.set_tensor("threshold", ov.Tensor(shares))
            request.infer()
            out = torch.from_numpy(request.get_output_tensor(0).data.copy())
            return out.view(length, heads * groups, dim).transpose(0, 1)[None]

        return run

    return at


@torch.no_grad()
def measured(kind: str, length: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Return rows of a prompt: time and error of each contender."""
    prompt = PROMPTS[kind](length)
    full = dense(prompt)
    runs: dict[tuple[str, float | None], Run] = {("torch", None): lambda: dense(prompt)}
    patterns = {threshold: ours(threshold) for threshold in THRESHOLDS}
    for threshold, pattern in patterns.items():
        runs["ours", threshold] = lambda pattern=pattern: pattern.read(prompt)[0]
    failed = None
    try:
        theirs = openvino(prompt, threads)
        runs |= {("OpenVINO", threshold): theirs(threshold) for threshold in (None, *THRESHOLDS)}
    except (ModuleNotFoundError, RuntimeError) as error:
        failed = str(error).strip().splitlines()[-1]
    errors = {name: float((run() - full).norm() / full.norm()) for name, run in runs.items()}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds * max(1, 32768 // length)):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    rows: list[dict[str, Any]] = []
    for (name, threshold), spent in best.items():
        row = {"prompt": kind, "length": length, "name": name, "threshold": threshold, "seconds": spent}
        row |= {"times": best["torch", None] / spent, "error": errors[name, threshold]}
        if name == "ours" and threshold is not None:
            row["density"] = density(patterns[threshold], patterns[threshold].tiles(prompt), prompt)
        rows.append(row)
    if failed is not None:
        rows.append({"prompt": kind, "length": length, "name": "OpenVINO", "failed": failed})
    return rows


def joined(record: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the best times of it and of an earlier one, where that one has the same versions."""
    alike = ("machine", "threads", "openvino")
    if any(record[name] != earlier[name] for name in alike):
        return record
    earlier_rows = {
        tuple(row[name] for name in ("prompt", "length", "name", "threshold")): row for row in earlier["rows"]
    }
    for row in record["rows"]:
        earlier_row = earlier_rows.get(tuple(row.get(name) for name in ("prompt", "length", "name", "threshold")))
        if earlier_row is None or row.get("seconds", 0) < earlier_row["seconds"]:
            earlier_rows[row["prompt"], row["length"], row["name"], row.get("threshold")] = row
    base = {(row["prompt"], row["length"]): row["seconds"] for row in earlier_rows.values() if row["name"] == "torch"}
    rows = [
        row | {"times": base[row["prompt"], row["length"]] / row["seconds"]}
        for row in earlier_rows.values()
        if "seconds" in row
    ]
    return record | {"rows": rows, "runs": earlier.get("runs", 1) + 1}


def markdown(record: dict[str, Any]) -> str:
    """Return the table of docs/prefill.md."""
    lines = [
        f"`{record['command']}`, {record['machine']}, {record['threads']} threads, OpenVINO {record['openvino']}, "
        f"{record['date']}, runs: {record['runs']}.",
        "", "| prompt | tokens | attention | threshold | density % | seconds | times as fast as torch | error |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in record["rows"]:
        start = f"| {row['prompt']} | {row['length']} | {row['name']} |"
        if "failed" in row:
            lines.append(f"{start} | | {row['failed']} | | |")
            continue
        threshold = "full" if row["threshold"] is None else row["threshold"]
        share = f"{100 * row['density']:.0f}" if "density" in row else "" if row["threshold"] else "100"
        lines.append(
            f"{start} {threshold} | {share} | {row['seconds']:.2f} | {row['times']:.2f} | {row['error']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write figures here, and the table into docs/prefill.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        openvino_version = version("openvino")
    except PackageNotFoundError:
        openvino_version = "is not installed"
    rows: list[dict[str, Any]] = []
    for kind in options.prompts:
        for length in options.lengths:
            rows += measured(kind, length, options.threads, options.rounds)
            print(json.dumps(rows[-1]), flush=True)
    record = {
        "date": date.today().isoformat(),
        "machine": cpu_model(),
        "threads": options.threads,
        "openvino": openvino_version,
        "command": shlex.join(["python", "-m", "benchmarks.openvino_prefill", *sys.argv[1:]]),
        "runs": 1,
        "rows": rows,
    }
    if options.out and options.out.exists():
        record = joined(record, json.loads(options.out.read_text()))
    print(markdown(record))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        put(DOCS / "prefill.md", "openvino", markdown(record))


if __name__ == "__main__":
    main()
