"""Checks and timings on a GPU: parity of every operator first, then speed against the bandwidth measured in the same run.

    make gpu            (or: python benchmarks/gpu.py --out benchmarks/results/gpu.json)

No timing is reported unless parity holds. Buffers rotate past the L2 cache. Written as JSON; the last line is its summary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import kvpress
from kvpress import kernels
from kvpress.kernels import dense
from kvpress.quant.uniform import Packed

GROUPS = 4
DIM = 128


def problem(lengths: list[int], dtype: torch.dtype, device: str, dim: int = DIM, seed: int = 0) -> dict[str, Tensor]:
    """Random ragged streams of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    shapes = {"q": (len(lengths), GROUPS, dim), "keys": (total, dim), "values": (total, dim)}
    made = {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}
    return {**made, "starts": offsets[:-1].to(device), "lengths": torch.tensor(lengths, device=device)}


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected entry."""
    return float(
        (found.float().cpu() - expected.float().cpu()).abs().max() / expected.float().abs().max().clamp_min(1e-12)
    )


def check_parity() -> dict[str, float]:
    """Compare every operator on the GPU with its float32 reference on the same codes; return the relative errors."""
    worst: dict[str, float] = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for dim in (64, 96, 128, 256):
            data = problem([0, 1, 17, 129, 1000, 4096], dtype, "cuda", dim)
            scale = dim**-0.5
            found = kernels.dense_decode(**data, scale=scale)
            rows = [
                torch.arange(s, s + n) for s, n in zip(data["starts"].tolist(), data["lengths"].tolist(), strict=True)
            ]
            plain = [data[name].float().cpu() for name in ("q", "keys", "values")]
            exact = dense.reference(*plain, rows, scale)
            name = f"dense {dtype}".replace("torch.", "")
            worst[name] = max(worst.get(name, 0.0), error(found[0], exact[0]))
            if dtype == torch.float32:
                continue
            for bits in (1, 2, 3, 4, 8):
                even = problem([32, 128, 1024, 4096], dtype, "cuda", dim)
                keys = Packed.encode(even["keys"], bits, (32, 1))
                values = Packed.encode(even["values"], bits, (1, 32))
                found = decode_packed(even, keys, values, scale)
                rows = [
                    torch.arange(s, s + n)
                    for s, n in zip(even["starts"].tolist(), even["lengths"].tolist(), strict=True)
                ]
                decoded = [keys.read(slice(None)).float().cpu(), values.read(slice(None)).float().cpu()]
                exact = dense.reference(even["q"].float().cpu(), *decoded, rows, scale)
                name = f"uniform {bits} bit {dtype}".replace("torch.", "")
                worst[name] = max(worst.get(name, 0.0), error(found[0], exact[0]))
    return worst


def decode_packed(data: dict[str, Tensor], keys: Packed, values: Packed, scale: float) -> tuple[Tensor, Tensor]:
    return kernels.uniform_decode(
        data["q"], keys.codes, keys.scale, keys.zero, values.codes, values.scale, values.zero,
        data["starts"], data["lengths"], scale,
        key_bits=keys.bits, value_bits=values.bits, key_group=keys.group, value_group=values.group,
    )  # fmt: skip


def check_generation() -> dict[str, bool]:
    """Tokens of a random Llama on the GPU, inside and outside a press that changes nothing."""
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).cuda().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    ids = torch.randint(3, 128, (3, 200), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :60], mask[2, :150] = 0, 0
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    plain = model.generate(ids, **settings)
    same = {}
    for spec in ("none", "snapkv:0", "kivi:bits=2,residual_length=512", "quest:budget=4096"):
        with kvpress.get_press(spec)(model):
            same[spec] = torch.equal(model.generate(ids, **settings), plain)
    return same


def milliseconds(run: Callable[[int], Any], rounds: int = 20) -> float:
    """Median time of `run(i)` by CUDA events."""
    for i in range(3):
        run(i)
    times = []
    for i in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(i)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def time_kernels(context: int, batch: int) -> dict[str, Any]:
    """One layer of 8 kv heads, 4 query heads each, D 128, bfloat16: time and share of the bandwidth."""
    streams = 8 * batch
    copies = [problem([context] * streams, torch.bfloat16, "cuda", seed=i) for i in range(2)]
    pair_bytes = 2 * DIM * 2
    size = streams * context * pair_bytes
    probe = [data["keys"].view(torch.int32) for data in copies]
    read = milliseconds(lambda i: probe[i % 2].sum())
    bandwidth = probe[0].numel() * 4 / read / 1e6
    scale = DIM**-0.5
    rows: dict[str, Any] = {"read_gb_per_s": bandwidth}

    def record(name: str, ms: float, held: float) -> None:
        rows[name] = {"ms": ms, "bandwidth": held / ms / 1e6 / bandwidth, "bytes": held / size}

    record("dense", milliseconds(lambda i: kernels.dense_decode(**copies[i % 2], scale=scale)), size)
    shaped = [
        [data["q"].view(batch, 8, GROUPS, DIM), *(data[n].view(batch, 8, context, DIM) for n in ("keys", "values"))]
        for data in copies
    ]
    record(
        "torch sdpa, query heads as rows",
        milliseconds(lambda i, s=shaped: torch.nn.functional.scaled_dot_product_attention(*s[i % 2])),
        size,
    )
    del shaped
    for bits in (8, 4, 2):
        packed = [
            (Packed.encode(data["keys"], bits, (32, 1)), Packed.encode(data["values"], bits, (1, 32)))
            for data in copies
        ]
        held = sum(t.numel() * t.element_size() for part in packed[0] for t in (part.codes, part.scale, part.zero))
        record(f"int{bits}", milliseconds(lambda i, p=packed: decode_packed(copies[i % 2], *p[i % 2], scale)), held)
        del packed
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: parity and speed on one are still to be measured")
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "errors": check_parity(),
        "token_identical": check_generation(),
    }
    sound = all(value < 0.02 for value in record["errors"].values()) and all(record["token_identical"].values())
    if sound:
        record["kernels"] = {f"{t} x {b}": time_kernels(t, b) for t, b in ((32768, 1), (32768, 8), (131072, 8))}
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    sys.exit(0 if sound else "parity failed: no timing is reported")


if __name__ == "__main__":
    main()
