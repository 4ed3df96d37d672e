# SPDX-License-Identifier: Apache-2.0
"""Measured bits per value of each codec, and the closed form of its paper's storage; windows and metadata are included.

    python benchmarks/bits.py [--out benchmarks/results/bits.json]

One layer of 8 kv heads, D = 128, bfloat16, right after a prompt of T tokens. `held` counts every byte of every tensor of the
layer; `formula` is derived below from the description of the method, not from our code. Codebooks are counted in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

import kvpress
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.store import KVStore
from kvpress.quant.aquakv import PredictingCodec
from kvpress.quant.coupled import CoupledCodec
from kvpress.quant.kvquant import LevelCodec

HEADS, DIM = 8, 128
LENGTHS = (2048, 8192, 32768)
Formula = Callable[[int], float]


def tiles(tokens: int, tile: int, window: int) -> int:
    """Return the number of encoded tokens: whole tiles outside the window."""
    return max(0, (tokens - window) // tile * tile)


def mixed(tokens: int, encoded: int, bits: float) -> float:
    """Average over encoded tokens and the tokens that stay in 16 bits."""
    return (encoded * bits + (tokens - encoded) * 16) / tokens


def kivi(key_bits: int, value_bits: int, group: int, window: int) -> Formula:
    """B + 32 / g: a 16-bit scale and zero for every g codes."""
    return lambda t: mixed(t, tiles(t, group, window), (key_bits + value_bits) / 2 + 32 / group)


def gear(bits: int, group: int, rank: int, outliers: float, buffer: int) -> Formula:
    """B + 32 / g + 16 r (1 / D + 1 / n), and for outliers 16 + 8 bits each and 8 bits per token and side to count them."""

    def formula(t: int) -> float:
        n = tiles(t, buffer, 0)
        low_rank = 16 * rank * (1 / DIM + 1 / n)
        values = 2 * max(1, round(outliers / 2 * DIM)) / DIM if outliers else 0.0
        keys = 2 * round(outliers / 2 * n) / n
        sparse = (16 + 8) * (keys + values) / 2 + (8 / DIM if outliers else 0.0)
        runs = 32 / (n * DIM)
        return mixed(t, n, bits + 32 / group + low_rank + sparse + runs)

    return formula


def zipcache(high: int, low: int, salient: float, interval: int) -> Formula:
    """4 r + 2 (1 - r), a scale and zero per token of the values, one bit per token and head, and constants per stream.

    The constants are, for each class, scale and zero of every key channel and the number of tokens; and the scales of value
    channels.
    """

    def formula(t: int) -> float:
        n = tiles(t, interval, 0)
        once = (2 * (2 * 16 * DIM + 32) + 32 * DIM) / (2 * DIM * n)
        return mixed(t, n, high * salient + low * (1 - salient) + 32 / (2 * DIM) + 1 / (2 * DIM) + once)

    return formula


def coupled(channels: int, bits: int, window: int, sinks: int) -> Formula:
    """B / c, and books of 2**b entries in 16 bits for every channel of keys and values."""

    def formula(t: int) -> float:
        return mixed(t, tiles(t, 32, window + sinks), bits / channels) + 16 * 2**bits / t

    return formula


def books(channels: int, bits: int, window: int, sinks: int) -> CoupledCodec:
    """A codec with random books."""
    shape = (HEADS, DIM // channels, 2**bits, channels)
    return CoupledCodec(
        torch.randn(shape).half(), torch.randn(shape).half(), (bits, bits), (channels, channels), window, sinks
    )


def kvquant(bits: int, outliers: float, sinks: int) -> Formula:
    """B, a 16-bit scale per token of values, outliers of 16 + 8 bits and their count per token, and levels of key channels.

    Values have one list of levels a head.
    """

    def formula(t: int) -> float:
        sparse = (16 + 8) * round(outliers * 32 * DIM) / (32 * DIM) + 8 / DIM if outliers else 0.0
        once = 16 * 2**bits * (DIM + 1) / (2 * DIM * t)
        return mixed(t, tiles(t, 32, sinks), bits + 16 / (2 * DIM) + sparse) + once

    return formula


def aquakv(keys: int, values: int, sinks: int) -> Formula:
    """B, a 16-bit scale per token of values, and stored once: levels, and D + 1 weights per channel of values."""

    def formula(t: int) -> float:
        once = 16 * (2**keys * DIM + 2**values + DIM * (DIM + 1)) / (2 * DIM * t)
        return mixed(t, tiles(t, 32, sinks), (keys + values) / 2 + 16 / (2 * DIM)) + once

    return formula


def levels(bits: int, outliers: float, sinks: int) -> LevelCodec:
    """A codec with even levels."""
    even = torch.linspace(-1, 1, 2**bits)
    reach = torch.ones(HEADS, DIM)
    return LevelCodec(0 * reach, 3 * reach, even, even, (bits, bits), outliers, 0, sinks)


def predictors(keys: int, values: int, sinks: int) -> PredictingCodec:
    """A codec with even levels that predicts nothing."""
    even = torch.linspace(-3, 3, 2**keys).half().expand(HEADS, DIM, -1)[..., None].contiguous()
    weight, offset = torch.zeros(HEADS, DIM, DIM).half(), torch.zeros(HEADS, DIM).half()
    return PredictingCodec(even, weight, offset, (keys, values), 0, sinks)


def methods() -> dict[str, tuple[Codec | None, Formula]]:
    """Every codec and its formula."""
    formulas: dict[str, tuple[Codec | None, Formula]] = {}

    def add(spec: str, formula: Formula) -> None:
        formulas[spec] = kvpress.get_press(spec).recipe().codec_at(0), formula

    for bits in (8, 4, 3, 2, 1):
        add(f"kivi:bits={bits}", kivi(bits, bits, 32, 128))
    add("kivi:bits=2,group_size=128,residual_length=0", kivi(2, 2, 128, 0))
    add("adaquant", kivi(4, 2, 64, 64))
    for bits in (4, 2):
        add(f"gear_l:bits={bits}", gear(bits, 64, 4, 0.0, 64))
        add(f"gear:bits={bits}", gear(bits, 64, 4, 0.02, 64))
    for ratio in (0.6, 0.2):
        add(f"zipcache:salient_ratio={ratio}", zipcache(4, 2, ratio, 100))
    for channels, bits in ((2, 8), (4, 8), (8, 8), (8, 10)):
        name = f"cq:coupled={channels},bits={bits}"
        formulas[name] = books(channels, bits, 128, 4), coupled(channels, bits, 128, 4)
    for bits, outliers in ((3, 0.01), (2, 0.01), (3, 0.0)):
        name = f"kvquant:bits={bits},outliers={outliers}"
        formulas[name] = levels(bits, outliers, 4), kvquant(bits, outliers, 4)
    for keys, values in ((3, 3), (3, 2)):
        formulas[f"aquakv:bits=({keys},{values})"] = predictors(keys, values, 4), aquakv(keys, values, 4)
    return formulas


def held_bits(codec: Codec | None, tokens: int) -> float:
    """Return the bits per value of a layer that stores a prompt of random pairs."""
    assert codec is not None  # noqa: S101
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, HEADS, tokens, DIM, generator=generator).bfloat16() for _ in range(2))
    store = KVStore(keys, values)
    store.append(keys, values)
    for name in codec.reads_side:
        store.window.side[name] = torch.rand(1, HEADS, tokens, generator=generator)
    store.settle(codec, Sealing(store.heads))
    tensors = [tensor for part in store.tensors().values() for tensor in part]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    window_bytes = 0 if store.dense is None else sum(array.nbytes for array in store.dense.side.values())
    return 8 * (sum(storages.values()) - window_bytes) / (2 * keys.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    print("| codec | " + " | ".join(f"{t} held | formula" for t in LENGTHS) + " |")
    print("|---|" + "---:|---:|" * len(LENGTHS))
    for name, (codec, formula) in methods().items():
        pairs = [(held_bits(codec, t), formula(t)) for t in LENGTHS]
        rows.append({"codec": name, "tokens": LENGTHS, "held": [h for h, _ in pairs], "formula": [f for _, f in pairs]})
        print(
            f"| `{name}` | " + " | ".join(f"{measured:.3f} | {expected:.3f}" for measured, expected in pairs) + " |",
            flush=True,
        )
    if args.out:
        record = {"date": date.today().isoformat(), "heads": HEADS, "head_dim": DIM, "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
