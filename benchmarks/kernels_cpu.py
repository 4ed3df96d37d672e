"""Speed of the CPU decode kernels next to plain torch and to the memory bandwidth of the same run.

    python benchmarks/kernels_cpu.py [--long] [--repeats 9] [--out results.json]

One layer, batch 1, 32 query and 8 key-value heads, D = 128, bfloat16, on one thread and then on two. Every call meets
cold caches (192 MiB are streamed between calls), the contenders take turns, and medians and minima are printed with the
error of each result against float32 attention over the same cache. The last line of each length is one JSON object of
ratios of minima: ``x_vs_y`` is how many times as fast as y x is on one thread, ``x_two_threads`` how many times as fast
as on one, and ``dense_bandwidth`` the fraction of the bandwidth of reading alone, on as many threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpress.kernels import counters, dense_decode, dense_select, reset_counters, uniform_decode
from kvpress.kernels.cpu import launch

H, G, D = 8, 4, 128
SCALE = D**-0.5
GROUP = 32
FLUSH = torch.ones(192 << 18)
READ = "read 192 MiB"


class Coded:
    """Codes drawn at random with scales of a realistic size, and the float32 rows that they stand for."""

    def __init__(self, tokens: int, bits: int) -> None:
        rows = H * tokens
        self.bits = bits
        # Rows uniform in about +-1.7, the spread of a unit normal.
        step = 3.4 / (2**bits - 1)
        self.codes = [torch.randint(0, 256, (rows, D * bits // 8), dtype=torch.uint8) for _ in range(2)]
        shapes = [(rows // GROUP, D), (rows, D // GROUP)]
        self.scales = [(step * (0.75 + 0.5 * torch.rand(shape))).half() for shape in shapes]
        self.zeros = [(-1.7 + 0.2 * torch.randn(shape)).half() for shape in shapes]

    def attend(self, q: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        """Attention on the codes."""
        key, value = zip(self.codes, self.scales, self.zeros, strict=True)
        options = {"key_bits": self.bits, "value_bits": self.bits, "key_group": (GROUP, 1), "value_group": (1, GROUP)}
        return uniform_decode(q, *key, *value, starts, lengths, SCALE, **options)[0]

    def exact(self, head: slice) -> list[Tensor]:
        """Keys and values of one head's rows, float32."""
        group = slice(head.start // GROUP, head.stop // GROUP)
        out = []
        for side, codes in enumerate(self.codes):
            parts = [(codes[head] >> shift) & ((1 << self.bits) - 1) for shift in range(0, 8, self.bits)]
            at, dim = (group, 0) if side == 0 else (head, 1)
            scale, zero = (x[side][at].float().repeat_interleave(GROUP, dim) for x in (self.scales, self.zeros))
            out.append(torch.cat(parts, dim=-1).float() * scale + zero)
        return out


def exact_attention(q: Tensor, rows: Callable[[int], list[Tensor]]) -> Tensor:
    """Float32 attention, head by head."""
    out = []
    for h in range(H):
        keys, values = rows(h)
        out.append(torch.softmax(q[h].float() @ keys.T * SCALE, dim=-1) @ values)
    return torch.stack(out)


def take_turns(calls: dict[tuple[str, int], Callable[[], object]], repeats: int) -> dict[tuple[str, int], list[float]]:
    """Seconds of each call, named with its number of threads, with cold caches and interleaved."""
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in calls}
    for warm in range(repeats + 1):
        for (name, threads), call in calls.items():
            torch.set_num_threads(threads)
            FLUSH.sum()
            begin = time.perf_counter()
            call()
            if warm:
                seconds[name, threads].append(time.perf_counter() - begin)
    torch.set_num_threads(1)
    return seconds


def cpu_model() -> str:
    """Name of the processor, from /proc/cpuinfo where there is one."""
    info = Path("/proc/cpuinfo")
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line) if info.exists() else {}
    known = {key.strip(): value.strip() for key, value in fields.items()}
    if "model name" not in known:
        return platform.processor() or platform.machine()
    return f"{known['model name']} (family {known.get('cpu family')}, model {known.get('model')})"


def run(tokens: int, repeats: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The ratios, and one row per contender and number of threads."""
    torch.manual_seed(0)
    keys, values = (torch.randn(H * tokens, D).bfloat16() for _ in range(2))
    q = torch.randn(H, G, D).bfloat16()
    starts, lengths = torch.arange(H) * tokens, torch.full((H,), tokens)
    picked = torch.stack([torch.randperm(tokens)[: tokens // 16].sort().values + h * tokens for h in range(H)]).int()
    counts = torch.full((H,), tokens // 16)
    k, v = keys.view(H, tokens, D), values.view(H, tokens, D)
    coded = {bits: Coded(tokens, bits) for bits in (4, 2)}

    def grouped_matmul() -> Tensor:
        weights = torch.softmax((q @ k.transpose(1, 2)).float() * SCALE, dim=-1)
        return weights.bfloat16() @ v

    torch_forms: dict[str, Callable[[], Tensor]] = {
        "torch grouped matmul": grouped_matmul,
        "torch sdpa rows": lambda: scaled_dot_product_attention(q[None], k[None], v[None])[0],
    }
    ours: dict[str, Callable[[], Tensor]] = {
        "dense": lambda: dense_decode(q, keys, values, starts, lengths, SCALE)[0],
        "select 1/16": lambda: dense_select(q, keys, values, picked, counts, SCALE)[0],
        "int4": lambda: coded[4].attend(q, starts, lengths),
        "int2": lambda: coded[2].attend(q, starts, lengths),
    }
    heads = [slice(h * tokens, (h + 1) * tokens) for h in range(H)]
    dense_exact = exact_attention(q, lambda h: [keys[heads[h]].float(), values[heads[h]].float()])
    expected = {
        "select 1/16": exact_attention(q, lambda h: [keys[picked[h]].float(), values[picked[h]].float()]),
        "int4": exact_attention(q, lambda h: coded[4].exact(heads[h])),
        "int2": exact_attention(q, lambda h: coded[2].exact(heads[h])),
    }
    calls = {**torch_forms, **ours}
    errors = {}
    for name, call in calls.items():
        want = expected.get(name, dense_exact)
        errors[name] = float((call().float() - want).abs().max() / want.abs().max())

    second_buffer = torch.ones_like(FLUSH)
    turns: dict[tuple[str, int], Callable[[], object]] = {}
    turns.update({(name, 1): call for name, call in ({READ: second_buffer.sum} | calls).items()})
    turns.update({(name, 2): call for name, call in ({READ: second_buffer.sum} | ours).items()})
    seconds = take_turns(turns, repeats)
    best = {key: min(times) for key, times in seconds.items()}
    print(f"T = {tokens}, level {launch.level()}, read bandwidth of 1 and 2 threads at best", end=" ")
    print(*(f"{second_buffer.nbytes / best[READ, threads] / 1e9:.1f} GB/s" for threads in (1, 2)))
    rows = []
    for (name, threads), times in seconds.items():
        row = {
            "name": name,
            "threads": threads,
            "median_ms": statistics.median(times) * 1e3,
            "min_ms": min(times) * 1e3,
        }
        rows.append(row | ({"error": errors[name]} if name in errors else {}))
        error = f"  error {errors[name]:.1e}" if name in errors else ""
        print(f"  {name:22s} {threads} threads  median {row['median_ms']:8.2f} ms  min {row['min_ms']:8.2f} ms{error}")

    def bandwidth(threads: int) -> float:
        return keys.nbytes * 2 / best["dense", threads] * best[READ, threads] / second_buffer.nbytes

    ratios = {
        "tokens": tokens,
        "dense_bandwidth": bandwidth(1),
        "dense_vs_torch": min(best[name, 1] for name in torch_forms) / best["dense", 1],
        "int4_vs_dense": best["dense", 1] / best["int4", 1],
        "int2_vs_dense": best["dense", 1] / best["int2", 1],
        "select_vs_dense": best["dense", 1] / best["select 1/16", 1],
        "dense_bandwidth_two_threads": bandwidth(2),
        "int4_two_threads": best["int4", 1] / best["int4", 2],
        "int2_two_threads": best["int2", 1] / best["int2", 2],
        "select_two_threads": best["select 1/16", 1] / best["select 1/16", 2],
        "max_error": max(errors[name] for name in ours),
    }
    return {name: round(value, 6) for name, value in ratios.items()}, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="also measure 131072 tokens")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for tokens in (32768, 131072) if args.long else (32768,):
        reset_counters()
        ratios, rows = run(tokens, args.repeats)
        assert counters().get("dense_decode"), "the compiled kernels did not run"  # noqa: S101
        results.append({"ratios": ratios, "rows": rows})
        print(json.dumps(ratios))
    if args.out:
        record = {
            "date": date.today().isoformat(),
            "machine": cpu_model(),
            "cores": os.cpu_count(),
            "level": launch.level(),
            "torch": torch.__version__,
            "repeats": args.repeats,
            "results": results,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
