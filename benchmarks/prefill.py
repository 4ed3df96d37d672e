# SPDX-License-Identifier: Apache-2.0
"""Cost of compressing a prompt: seconds and peak memory of a prefill, each press in a process of its own.

    python benchmarks/prefill.py [--tokens 32768] [--layers 2] [--out benchmarks/results/prefill_cpu.json]

A random Llama (hidden 512, 8 query and 2 kv heads, head dim 64, float32). Besides the presses listed here, every press of the
registry is measured with its example; calibration runs first, on a few tokens, as only time and memory of the prefill matter
here. Peak is the largest resident memory while the prompt is read, above that before. Seconds and peak are also printed as
ratios to those without a press, which is measured before and after the others. Then tokens are decoded after the prompt, one at
a time: `token_ms` is the median, on the compressed cache. The last row reads the prompt once for all presses listed here that
can share it (`kvpress.prefill`). Patterns, which read a part of a prompt, are measured by `benchmarks/patterns.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpress
from benchmarks.pages import put
from kvpress.calibrate import METHODS
from kvpress.calibrate.run import calibrate
from kvpress.core.registry import entries
from kvpress.hf.models import with_cache

PRESSES = (
    "none", "random:0.5", "knorm:0.5", "streaming_llm:0.5", "snapkv:0.5", "tova:0.5", "expected_attention:0.5", "keydiff:0.5",
    "leverage_score:0.5", "non_causal_attn:0.5", "compactor:0.5", "observed_attention:0.5", "h2o:0.5",
    "h2o:0.5,normalize=decay,decay=0.999", "kvzip:0.5,repeat_prompt=", "pyramidkv:0.5", "adakv(snapkv:0.5)",
    "adakv(expected_attention:0.5)", "criticalkv(snapkv:0.5)", "critical_adakv(snapkv:0.5)", "chunk(keydiff:0.5)",
    "chunkkv(snapkv:0.5)", "block(keydiff:0.5)", "key_rerotation(knorm:0.5)",
    "per_layer_compression(knorm):compression_ratios=(0.4,0.6)", "duo_attention:0.5,on_the_fly_scoring=true",
    "sample(leverage_score:0.5)", "mix(keydiff:0.5; knorm)", "frontier:smaller=10", "rotated:bits=3",
    "kivi:bits=4", "quest:budget=1024", "tidal_decode:budget=1024,skip_layers=0", "snapkv:0.5 + kivi:bits=4",
)  # fmt: skip
NONE = PRESSES[0]
INSTEAD = {
    "agentkv": "agentkv:0.5,think='',act='',tool='',roles=false",
    "cq": "cq:bits=4,coupled=4", "headkv": "headkv:0.5", "restorekv": "restorekv:0.5,repeat_prompt=", "rlkv": "rlkv:0.5",
}  # fmt: skip
"""Specs that replace examples which keep all pairs, need a tokenizer or take long to calibrate."""
LEARNED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "aquakv": ("calibration", "aquakv", {}), "block_gtq": ("calibration", "block_gtq", {}),
    "cq": ("calibration", "cq", {"bits": (4, 4), "coupled": (4, 4), "iterations": 3}),
    "double_sparsity": ("calibration", "double_sparsity", {}),
    "expected_attention_stats": ("stats_folder", "expected_attention", {}),
    "fastkvzip": ("gates", "fastkvzip", {"steps": 3}), "headkv": ("table", "kvzip_heads", {}),
    "kvquant": ("calibration", "kvquant", {}), "kvzap": ("weights", "kvzap", {"steps": 3}),
    "leank": ("calibration", "leank", {"steps": 2}), "lukv": ("curve", "lukv", {}), "qfilter": ("filters", "qfilter", {}),
    "oscar": ("calibration", "oscar", {}), "vector": ("calibration", "aquakv", {}),
    "restorekv": ("adapter", "restorekv", {"steps": 2}), "rlkv": ("table", "kvzip_heads", {}),
}  # fmt: skip
"""For each press with a calibration file: its argument for the file, the method of `kvpress calibrate`, its settings."""
LONGEST = 600
"""Time limit of a press in seconds."""
WARM, DECODED = 4, 32
"""Number of decoded tokens before timing starts, and number of timed tokens."""
SHARED = "shared"
"""Name of the row for all presses that share a prefill."""


class PeakMemory(threading.Thread):
    """Samples the resident memory of this process until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak_bytes = resident_bytes()
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, resident_bytes())

    def stop(self) -> float:
        """Return the MiB above the start."""
        self.stopped.set()
        self.join()
        return (self.peak_bytes - self.start_bytes) / 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def random_model(tokens: int, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2 * tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def measure(spec: str, tokens: int, layers: int) -> dict[str, float]:
    """Read one random prompt under a press."""
    model = random_model(tokens, layers)
    ids = torch.randint(0, 1024, (1, tokens))
    presses = [kvpress.get_press(name) for name in (PRESSES if spec == SHARED else [spec])]
    sharing = [press for press in presses if press.recipe().shares_prefill]
    read = partial(kvpress.prefill, model, sharing) if spec == SHARED else partial(read_alone, model, presses[0])
    read(ids[:, :1024])  # compiles kernels, fills allocator caches
    memory = PeakMemory()
    memory.start()
    start = time.perf_counter()
    output = read(ids)
    seconds = time.perf_counter() - start
    caches = output.caches if spec == SHARED else [output]
    row = {
        "seconds": seconds,
        "peak_mib": memory.stop(),
        "cache_mib": sum(kvpress.memory_report(cache).total_bytes for cache in caches) / 2**20,
        "presses": len(caches),
    }
    return row if spec == SHARED else row | {"token_ms": token_ms(model, presses[0], output)}


def token_ms(model: LlamaForCausalLM, press: kvpress.BasePress, cache: DynamicCache) -> float:
    """Decode tokens with the cache of a press, and return the median milliseconds per token."""
    token, times = torch.tensor([[5]]), []
    with kvpress.reading(model, press):
        for _ in range(WARM + DECODED):
            start = time.perf_counter()
            model(token, **with_cache(cache))
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARM:])


def read_alone(model: LlamaForCausalLM, press: kvpress.BasePress, ids: torch.Tensor) -> DynamicCache:
    """Read a prompt under one press, as its users do."""
    cache = DynamicCache(config=model.config)
    with press(model):
        model.model(ids, **with_cache(cache))
    return cache


def others() -> list[str]:
    """Return a spec of every registered press that `PRESSES` does not name."""
    named = set(re.findall(r"\w+", " ".join(PRESSES)))
    unlisted = [entry for entry in entries() if entry.name not in named and entry.role != "prefill"]
    return [INSTEAD.get(entry.name, entry.example) for entry in unlisted]


def learned(spec: str, tokens: int, layers: int, folder: Path) -> str:
    """Return a spec with the file that its press needs, which is calibrated in another process."""
    name = re.match(r"\w+", spec)[0]
    if name not in LEARNED:
        return spec
    argument = LEARNED[name][0]
    path = folder / f"{name}.{'tsv' if argument == 'table' else 'safetensors'}"
    settings = ["--learn", name, "--out", str(path), "--tokens", str(tokens), "--layers", str(layers)]
    subprocess.run([sys.executable, __file__, *settings], check=True, capture_output=True, text=True, timeout=LONGEST)  # noqa: S603
    return f"{spec}{',' if ':' in spec.rpartition(')')[2] else ':'}{argument}={path}"


def learn(name: str, tokens: int, layers: int, path: Path) -> None:
    """Calibrate a press on random tokens and write its file."""
    _, method, settings = LEARNED[name]
    ids = torch.randint(0, 1024, (2, min(1280, 2 * tokens)), generator=torch.Generator().manual_seed(1))
    calibrate(random_model(tokens, layers), ids, METHODS[method](**settings), path, "random tokens")


def compare(rows: dict[str, dict[str, float]]) -> None:
    """Add each row's ratios to that without a press."""
    for row in rows.values():
        row |= {"times": row["seconds"] / rows[NONE]["seconds"], "peak": row["peak_mib"] / rows[NONE]["peak_mib"]}


def write(out: Path, rows: dict[str, dict[str, float]], keep: bool, sizes: dict[str, int]) -> None:
    """Write the rows measured so far; with `keep`, the other rows of the file stay."""
    earlier = json.loads(out.read_text())["rows"] if keep and out.exists() else {}
    record = {"date": date.today().isoformat(), "machine": platform.machine(), "threads": torch.get_num_threads()}
    merged = {**earlier, **{spec: row for spec, row in rows.items() if spec != NONE or not earlier}}
    out.write_text(json.dumps({**record, **sizes, "rows": merged}, indent=1) + "\n")


def markdown(rows: dict[str, dict[str, float]]) -> str:
    """Return the table of docs/lab/prefill-cost.md, with the time of a decoded token where all rows have one."""
    rows = {spec: row for spec, row in rows.items() if spec != SHARED}
    decoded = all("token_ms" in row for row in rows.values())
    lines = [
        "| press | seconds | times no press | peak MiB | of no press | cache MiB |" + decoded * " ms a token |",
        "|---|---:|---:|---:|---:|---:|" + decoded * "---:|",
    ]
    lines += [
        f"| `{spec}` | {row['seconds']:.1f} | {row['times']:.2f} | {row['peak_mib']:.0f} | {row['peak']:.2f} | "
        f"{row['cache_mib']:.0f} |" + (f" {row['token_ms']:.1f} |" if decoded else "")
        for spec, row in rows.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="page of docs whose table is rewritten from --out")
    parser.add_argument(
        "--only", nargs="+", metavar="SPEC", help="measure only these presses; --out keeps the rows of the others"
    )
    parser.add_argument("--press", help=argparse.SUPPRESS)
    parser.add_argument("--learn", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learn:
        learn(options.learn, options.tokens, options.layers, options.out)
        return
    if options.press:
        print(json.dumps(measure(options.press, options.tokens, options.layers)))
        return
    rows: dict[str, dict[str, float]] = {}
    folder = tempfile.TemporaryDirectory()
    for spec in [NONE, *(options.only or (*PRESSES[1:], *others(), SHARED)), NONE]:
        settings = ["--tokens", str(options.tokens), "--layers", str(options.layers)]
        try:
            learned_spec = learned(spec, options.tokens, options.layers, Path(folder.name))
            command = [sys.executable, __file__, "--press", learned_spec, *settings]
            process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONGEST)  # noqa: S603 - our own
        except subprocess.CalledProcessError as error:
            print(f"{spec:60s} failed: {error.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        except subprocess.TimeoutExpired:
            print(f"{spec:60s} took more than {LONGEST} s", flush=True)
            continue
        row = json.loads(process.stdout.splitlines()[-1])
        # The faster of two runs without a press is nearer to the true time.
        rows[spec] = min(row, rows.get(spec, row), key=lambda candidate: candidate["seconds"])
        print(
            f"{spec:60s} {row['seconds']:7.2f} s   peak +{row['peak_mib']:6.0f} MiB   cache {row['cache_mib']:6.1f} MiB",
            flush=True,
        )
        compare(rows)
        if options.out:
            write(options.out, rows, bool(options.only), {"tokens": options.tokens, "layers": options.layers})
    print("\n" + markdown(rows))
    if options.table and options.out:
        put(options.table, "prefill", markdown(json.loads(options.out.read_text())["rows"]))


if __name__ == "__main__":
    main()
