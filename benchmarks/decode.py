# SPDX-License-Identifier: Apache-2.0
"""Time per generated token and cache size, ours against the caches of transformers, side by side in one process.

A random Llama (8 layers, hidden 1024, 16 query and 4 kv heads, head dim 64, bfloat16) decodes with a cache that is filled with
random pairs; runs of all caches are interleaved, on one thread, and medians are compared.

    python benchmarks/decode.py [--contexts 8192,32768] [--methods "kivi:bits=2 + quest:budget=1024" ...] [--rounds 7]
                                [--levels avx2,avx512] [--out benchmarks/results/decode_cpu.json]

Ours run at each of the instruction-set levels that `--levels` names, `all` for every one that this processor has, in turn; by
default at the fastest, or the one of `KVPRESS_CPU_LEVEL`. A decode step that reads fewer bits should take no longer than one on
the dense cache: rows that miss their goal (`GOALS`) are printed and stored in the results. `--methods` adds rows, which are
specs of `kvpress.get_press`. Evicted pairs are drawn at random; as many are kept as the press would keep. quanto is compared
where `optimum-quanto` is installed (extra `bench`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache

import kvpress
from benchmarks.levels import levels_of, use
from benchmarks.machine import cpu_model
from kvpress.cache.codec import Sealing
from kvpress.cache.report import storage_bytes
from kvpress.cache.rotation import Angles, KeyRotation
from kvpress.cache.store import KVStore
from kvpress.core.calibration import Calibration
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import with_cache
from kvpress.quant.codebook import CodedSegment
from kvpress.quant.press import pair
from kvpress.sparse.channels import ChannelTable

STEPS = 4
OURS: dict[str, tuple[str, tuple[float, ...] | None]] = {
    "ours off": ("none", None),
    "ours 50% uniform": ("none", (0.5,) * 4),
    "ours 50% head-wise": ("none", (0.9, 0.6, 0.4, 0.1)),
    # Groups of the size of quanto's, so that both spend about as many bits on scales.
    "ours kivi 4 bit": ("kivi:bits=4,group_size=(128,64),residual_length=0", None),
    "ours kivi 4 bit, g 32": ("kivi:bits=4", None),
    "ours kivi 3 bit, g 32": ("kivi:bits=3", None),
    "ours kivi 2 bit": ("kivi:bits=2,group_size=(128,64),residual_length=0", None),
    "ours kivi 2 bit, g 32": ("kivi:bits=2", None),
    "ours adaquant 4/2 bit": ("adaquant", None),
    "ours rotated 3 bit": ("rotated:bits=3", None),
    "ours rotated 2 bit": ("rotated:bits=2", None),
    "ours gear_l 2 bit": ("gear_l", None),
    "ours gear 2 bit": ("gear", None),
    "ours zipcache 4/2 bit": ("zipcache", None),
    "ours cq 4c8b": ("cq:coupled=4", None),
    "ours cq 8c8b": ("cq:coupled=8", None),
    "ours quest 1024": ("quest:budget=1024", None),
    "ours double sparsity 1/16": ("double_sparsity", None),
    "ours tidal decode 1/16": ("tidal_decode:budget=0.0625", None),
}
"""Name -> spec, and the share of pairs that each head keeps, where pairs are evicted."""

GOALS = {
    "ours kivi 4 bit": 1.0,
    "ours kivi 4 bit, g 32": 1.0,
    "ours kivi 3 bit, g 32": 1.0,
    "ours kivi 2 bit": 1.0,
    "ours kivi 2 bit, g 32": 1.0,
    "ours adaquant 4/2 bit": 1.0,
    "ours zipcache 4/2 bit": 1.0,
    "ours cq 4c8b": 1.0,
    "ours cq 8c8b": 1.0,
    "ours rotated 3 bit": 1.0,
    "ours rotated 2 bit": 1.0,
    "ours gear_l 2 bit": 1.5,
    "ours gear 2 bit": 1.5,
}
"""Longest time of a token, as a multiple of that of `ours off` at the same level; for long contexts, such as 32768 tokens."""

for _entry in kvpress.list_presses():
    _listed = any(spec.partition(":")[0] == _entry.name for spec, _ in OURS.values())
    if _entry.role != "quantise" or not _entry.press.__module__.startswith("kvpress.") or _listed:
        continue
    # These need the queries of a prompt, or scales that were learned for the model.
    if _entry.name not in ("think", "leank"):
        OURS[f"ours {_entry.name}"] = _entry.example, None
        GOALS[f"ours {_entry.name}"] = 1.5 if _entry.name == "aquakv" else 1.0  # codes of keys are read twice


class RandomBooks(kvpress.CoupledQuantPress):
    """Coupled quantisation with random codebooks: the time of a read does not depend on their values."""

    def found(self) -> Calibration:
        channels = pair("coupled", self.coupled)[0]
        book = torch.randn(4, 64 // channels, 256, channels, generator=torch.Generator().manual_seed(0)).half()
        return Calibration({f"{layer}.{side}": book for layer in range(8) for side in ("keys", "values")}, {})

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        """Skip the check of a file, as there is none."""
        return super().recipe()


class RandomLevels(kvpress.KVQuantPress):
    """KVQuant with even levels and random ranges, which cost as much to read as calibrated ones."""

    def found(self) -> Calibration:
        reach = 1 + torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
        of_layer = {"low": -reach, "high": reach}
        of_layer |= {f"{side}.{b}": torch.linspace(-1, 1, 2**b) for side in ("keys", "values") for b in (2, 3, 4)}
        return Calibration({f"{n}.{name}": tensor for n in range(8) for name, tensor in of_layer.items()}, {})

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        """Skip the check of a file, as there is none."""
        return super().recipe()


class RandomEnergies(kvpress.BlockGTQPress):
    """Block-GTQ with random energies over some decades: the time does not depend on which channel gets which bits."""

    def found(self) -> Calibration:
        energy = (4 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0))).exp()
        of_layer = {"queries": torch.ones_like(energy), "keys": energy, "rotated": torch.tensor([64.0])}
        return Calibration({f"{n}.{name}": tensor for n in range(8) for name, tensor in of_layer.items()}, {})

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        """Skip the check of a file, as there is none."""
        return super().recipe()


class RandomPredictors(kvpress.AquaKVPress):
    """AQUA-KV with random levels and predictors, which cost as much to read as calibrated ones."""

    def found(self) -> Calibration:
        generator, of_layer = torch.Generator().manual_seed(0), {}
        for b in (2, 3, 4):
            of_layer[f"keys.{b}"] = torch.randn(4, 64, 2**b, 1, generator=generator)
            of_layer[f"weight.{b}"] = torch.randn(4, 64, 64, generator=generator)
            of_layer[f"offset.{b}"] = torch.randn(4, 64, generator=generator)
        return Calibration({f"{n}.{name}": tensor for n in range(8) for name, tensor in of_layer.items()}, {})

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        """Skip the check of a file, as there is none."""
        return super().recipe()


class RandomRotations(kvpress.OscarPress):
    """OSCAR with random rotations: the time does not depend on their entries."""

    def found(self) -> Calibration:
        generator = torch.Generator().manual_seed(0)
        of_layer = {side: torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q for side in ("keys", "values")}
        return Calibration({f"{n}.{name}": tensor for n in range(8) for name, tensor in of_layer.items()}, {})

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        """Skip the check of a file, as there is none."""
        return super().recipe()


class RandomChannels(kvpress.DoubleSparsityPress):
    """Double Sparsity with random channels, which cost as much to read as calibrated ones."""

    def known_channels(self, model: Any) -> ChannelTable:
        generator = torch.Generator().manual_seed(0)
        return ChannelTable({layer: torch.randn(4, 64, generator=generator).argsort() for layer in range(8)})


STAND_INS = {
    kvpress.CoupledQuantPress: RandomBooks,
    kvpress.KVQuantPress: RandomLevels,
    kvpress.BlockGTQPress: RandomEnergies,
    kvpress.AquaKVPress: RandomPredictors,
    kvpress.OscarPress: RandomRotations,
    kvpress.DoubleSparsityPress: RandomChannels,
}
"""Presses that need a calibration file, which this model does not have."""


def press_of(spec: str) -> Any:
    """Build a press that needs no calibration."""
    press = kvpress.get_press(spec)
    return STAND_INS[type(press)](**vars(press)) if type(press) in STAND_INS else press


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=131072,
    )
    torch.manual_seed(0)
    # Not `.to(torch.bfloat16)`, which would also round the angles of the rotary embedding; loading a model does not do that.
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def random_pairs(context: int, layer: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(layer)
    keys, values = torch.randn(2, 1, 4, context, 64, generator=generator).to(torch.bfloat16)
    return keys, values


def fill(cache: Any, context: int) -> Any:
    """Fill a transformers cache with random pairs."""
    for layer in range(8):
        cache.update(*random_pairs(context, layer), layer)
    return cache


def keep_half(store: KVStore, shares: tuple[float, ...]) -> None:
    """Evict random pairs so that head h keeps the fraction shares[h]."""
    masks = []
    for n, share in enumerate(shares):
        generator = torch.Generator().manual_seed(n)
        order = torch.randperm(store.seen, generator=generator)
        masks.append(torch.zeros(store.seen, dtype=torch.bool).index_fill_(0, order[: int(store.seen * share)], True))
    store.evict(masks, None)


def ours(model: Any, press: Any, context: int, shares: tuple[float, ...] | None = None) -> DynamicCache:
    """Fill a cache of ours with the same random pairs, evicted or encoded as a prefill would leave them."""
    layers, recipe = [], press.recipe()
    angles = Angles()
    for index in range(8):
        layer = PressLayer()
        layer.update(*random_pairs(context, index))
        if shares is not None:
            keep_half(layer.store, shares)
        codec = recipe.codec_at(index)
        if codec is not None:
            layer.store.settle(codec, Sealing(layer.store.heads))
        for segment in layer.store.segments:
            # Pairs in a basis are encoded after their rotary embedding.
            if isinstance(segment, CodedSegment) and segment.key_basis is None:
                angles.grow(context, partial(model.model.rotary_emb, torch.zeros(1)), torch.device("cpu"), "Llama")
                segment.rotation = KeyRotation(angles)
        layers.append(layer)
    cache = DynamicCache()
    cache.layers = layers
    cache.layer_class_to_replicate = None
    return cache


def held_bytes(cache: Any) -> int:
    """Return the bytes of every tensor that a cache of transformers refers to."""
    tensors: list[Tensor] = []
    stack, seen = [layer.__dict__ for layer in cache.layers], set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor) and hasattr(item, "__tensor_flatten__"):
            stack += [getattr(item, name) for name in item.__tensor_flatten__()[0]]
        elif isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
    return storage_bytes(tensors)


def contenders(
    model: Any, context: int, methods: list[str]
) -> dict[str, tuple[Any, Any, Callable[[Any], dict[str, Any]]]]:
    """Name -> (cache, press or None, extra arguments of the forward pass)."""
    plain: Callable[[Any], dict[str, Any]] = lambda cache: {}  # noqa: E731 - a table entry

    def packed(cache: Any) -> dict[str, Any]:
        return {"attention_mask": torch.ones(1, 1, 1, cache.get_seq_length() + 1, dtype=torch.bool)}

    caches: dict[str, Any] = {
        "dynamic (sdpa, gqa)": (fill(DynamicCache(), context), None, plain),
        "dynamic (sdpa, packed)": (fill(DynamicCache(), context), None, packed),
        "static": (fill(StaticCache(config=model.config, max_cache_len=context + 256), context), None, plain),
    }
    try:
        quanto = QuantizedCache(backend="quanto", config=model.config, nbits=4)
        caches["quanto 4 bit"] = (fill(quanto, context), None, packed)
    except ImportError as missing:
        print(f"quanto is left out: {missing}")
    for name, (spec, shares) in (OURS | {spec: (spec, None) for spec in methods}).items():
        press = press_of(spec)
        kept = press.recipe().kept(context)
        if shares is None and kept < context:
            shares = (kept / context,) * 4
        caches[name] = (ours(model, press, context, shares), press, plain)
    return caches


@torch.no_grad()
def time_token(model: Any, cache: Any, press: Any, extra: Callable[[Any], dict[str, Any]]) -> float:
    """Return the milliseconds per token over a few steps."""
    token = torch.tensor([[5]])

    def run() -> float:
        # The first step is not counted: it grows a full window or compiles a kernel.
        model(token, **with_cache(cache), use_cache=True, **extra(cache))
        start = time.perf_counter()
        for _ in range(STEPS):
            model(token, **with_cache(cache), use_cache=True, **extra(cache))
        return (time.perf_counter() - start) / STEPS * 1e3

    if press is None:
        return run()
    with kvpress.reading(model, press):
        return run()


def measure(
    model: Any, context: int, rounds: int, methods: list[str], levels: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Interleave all contenders, ours at each level; return medians, minima and bytes by level and name."""
    table = contenders(model, context, methods)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, (cache, press, extra) in table.items():
            for level in levels:
                if press is None and level != levels[0]:
                    continue  # no kernel of ours runs there
                use(level)
                times.setdefault((name, level), []).append(time_token(model, cache, press, extra))
    uncompressed = 8 * 2 * 4 * 64 * 2 * context
    rows: dict[str, dict[str, Any]] = {level: {} for level in levels}
    for level in levels:
        for name, (cache, press, _) in table.items():
            size = held_bytes(cache) if press is None else kvpress.memory_report(cache).total_bytes
            samples = times[name, levels[0] if press is None else level]
            row = {"median_ms": statistics.median(samples), "min_ms": min(samples), "mib": size / 2**20}
            rows[level][name] = row | {"bytes": size / uncompressed}
            print(
                f"{context:7d}  {level:12s} {name:40s} {row['median_ms']:8.1f} ms (min {row['min_ms']:8.1f})"
                f" {row['mib']:8.1f} MiB"
            )
        for name, ratio in missed(rows[level]).items():
            print(
                f"{context:7d}  {level:12s} {name} takes {ratio:.2f} of ours off: the goal of {GOALS[name]} is missed"
            )
    del table
    gc.collect()
    return rows


def missed(rows: dict[str, Any]) -> dict[str, float]:
    """Return the rows of one level that take longer than their goal, as multiples of `ours off`."""
    shares = {name: rows[name]["median_ms"] / rows["ours off"]["median_ms"] for name in GOALS}
    return {name: share for name, share in shares.items() if share > GOALS[name]}


def ratios(rows: dict[str, Any]) -> dict[str, Any]:
    """Return times as ours over theirs, bytes as a fraction of the uncompressed cache."""

    def ms(name: str) -> float:
        return float(rows[name]["median_ms"])

    best = min(ms(name) for name in ("dynamic (sdpa, gqa)", "dynamic (sdpa, packed)", "static"))
    return {
        "off_vs_best": ms("ours off") / best,
        "uniform50_vs_off": ms("ours 50% uniform") / ms("ours off"),
        "headwise50_bytes": rows["ours 50% head-wise"]["bytes"],
        "headwise50_vs_uniform50": ms("ours 50% head-wise") / ms("ours 50% uniform"),
        "kivi4_vs_quanto4": ms("ours kivi 4 bit") / ms("quanto 4 bit") if "quanto 4 bit" in rows else None,
        "kivi4_bytes": rows["ours kivi 4 bit"]["bytes"],
        "kivi4_vs_best": ms("ours kivi 4 bit") / best,
        "kivi2_vs_best": ms("ours kivi 2 bit") / best,
        "quest_vs_off": ms("ours quest 1024") / ms("ours off"),
        "double_sparsity_vs_off": ms("ours double sparsity 1/16") / ms("ours off"),
        "tidal_decode_vs_off": ms("ours tidal decode 1/16") / ms("ours off"),
        "goals_missed": missed(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="8192,32768")
    parser.add_argument("--methods", nargs="+", default=[], metavar="SPEC")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--levels", help="such as avx2,avx512; the fastest one by default, or `all`")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        levels = levels_of(options.levels)
    except ValueError as error:
        parser.error(f"--levels: {error}")
    torch.set_num_threads(options.threads)
    model = build_model()
    contexts = [int(context) for context in options.contexts.split(",")]
    rows = {context: measure(model, context, options.rounds, options.methods, levels) for context in contexts}
    summary = {
        str(context): {level: ratios(level_rows) for level, level_rows in rows[context].items()} for context in contexts
    }
    if options.out:
        record = {
            "date": date.today().isoformat(),
            "machine": cpu_model(),
            "levels": levels,
            "threads": options.threads,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rounds": options.rounds,
            "rows": rows,
            "summary": summary,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
