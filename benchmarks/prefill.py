"""What compressing a prompt costs: seconds and peak memory of a prefill, each press in a process of its own.

    python benchmarks/prefill.py [--tokens 16384] [--out benchmarks/results/prefill_cpu.json]

A random Llama (4 layers, hidden 512, 8 query and 2 kv heads, head dim 64, float32). Peak is the largest resident memory while
the prompt is read, above what the process held before.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpress

PRESSES = (
    "none", "knorm:0.5", "streaming_llm:0.5", "snapkv:0.5", "tova:0.5", "expected_attention:0.5", "observed_attention:0.5",
    "h2o:0.5", "pyramidkv:0.5", "adakv(snapkv:0.5)", "kivi:bits=4", "quest:budget=1024", "snapkv:0.5 + kivi:bits=4",
)  # fmt: skip


class PeakMemory(threading.Thread):
    """Samples the resident memory of this process until stopped."""

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


@torch.no_grad()
def measure(spec: str, tokens: int) -> dict[str, float]:
    """Read one random prompt under a press."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2 * tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 1024, (1, tokens))
    press = kvpress.get_press(spec)
    with press(model):
        model.model(ids[:, :256], use_cache=True)  # compiles kernels, fills allocator caches
        cache = DynamicCache(config=config)
        memory = PeakMemory()
        memory.start()
        start = time.perf_counter()
        model.model(ids, past_key_values=cache)
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "peak_mib": memory.stop(),
        "cache_mib": kvpress.memory_report(cache).total_bytes / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--press", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.press:
        print(json.dumps(measure(options.press, options.tokens)))
        return
    rows = {}
    for spec in PRESSES:
        command = [sys.executable, __file__, "--press", spec, "--tokens", str(options.tokens)]
        found = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own script
        rows[spec] = json.loads(found.stdout.splitlines()[-1])
        print(
            f"{spec:28s} {rows[spec]['seconds']:7.2f} s   peak +{rows[spec]['peak_mib']:6.0f} MiB   "
            f"cache {rows[spec]['cache_mib']:6.1f} MiB",
            flush=True,
        )
    if options.out:
        record = {"date": date.today().isoformat(), "machine": platform.machine(), "threads": torch.get_num_threads()}
        options.out.write_text(json.dumps({**record, "tokens": options.tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
