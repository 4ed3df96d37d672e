"""Speed of the CPU decode kernels next to plain torch and to the memory bandwidth of the same run.

    python benchmarks/kernels_cpu.py [--long]

One layer, batch 1, 32 query and 8 key-value heads, D = 128, bfloat16, one thread. Every call meets cold caches (192 MiB
are streamed between calls), the contenders take turns, and medians and minima are printed with the error of each result
against float32 attention over the same cache. The last line of each length is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpress.kernels import counters, dense_decode, dense_select, reset_counters, uniform_decode
from kvpress.kernels.cpu import launch

H, G, D = 8, 4, 128
SCALE = D**-0.5
GROUP = 32
FLUSH = torch.ones(192 << 18)


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


def take_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call with cold caches, interleaved."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            FLUSH.sum()
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def run(tokens: int, repeats: int) -> dict[str, float]:
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
    seconds = take_turns({"read 192 MiB": second_buffer.sum, **calls}, repeats)
    bandwidth = second_buffer.nbytes / statistics.median(seconds["read 192 MiB"])
    best = {name: min(times) for name, times in seconds.items()}
    print(f"T = {tokens}, level {launch.level()}, read bandwidth {bandwidth / 1e9:.1f} GB/s (median)")
    for name, times in seconds.items():
        error = f"  error {errors[name]:.1e}" if name in errors else ""
        print(f"  {name:22s} median {statistics.median(times) * 1e3:8.2f} ms  min {min(times) * 1e3:8.2f} ms{error}")
    return {
        "tokens": tokens,
        "dense_bandwidth": keys.nbytes * 2 / best["dense"] * best["read 192 MiB"] / second_buffer.nbytes,
        "dense_vs_torch": min(best[name] for name in torch_forms) / best["dense"],
        "int4_vs_dense": best["dense"] / best["int4"],
        "int2_vs_dense": best["dense"] / best["int2"],
        "select_vs_dense": best["dense"] / best["select 1/16"],
        "max_error": max(errors[name] for name in ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="also measure 131072 tokens")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for tokens in (32768, 131072) if args.long else (32768,):
        reset_counters()
        result = run(tokens, args.repeats)
        assert counters().get("dense_decode"), "the compiled kernels did not run"  # noqa: S101
        print(json.dumps({name: round(value, 6) for name, value in result.items()}))


if __name__ == "__main__":
    main()
