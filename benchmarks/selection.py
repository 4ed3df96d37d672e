# SPDX-License-Identifier: Apache-2.0
"""Attention of one generated token to a long cache: bytes that selectors read, and their time.

    python benchmarks/selection.py [--context 32768] [--layers 32] [--rounds 9] [--threads 1]
                                   [--out benchmarks/results/selection_cpu.json]

Attention runs in all layers of a model, one after another, as in a decode step (4 kv heads of dim 64, 16 query heads, bfloat16,
random pairs); nothing else of the model runs. The time includes the choice: labels, page bounds, and in TidalDecode the layers
that read everything and then all keys once more. Contenders are interleaved, medians are compared. Bytes are counted for the
timed step: pairs and their scales, indexes, and keys that are read to choose; pairs that are not sealed yet are left out, as
all contenders read them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvpress
from benchmarks.machine import cpu_model
from kvpress.cache.attention import Logits
from kvpress.cache.codec import Sealing
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.cache.window import Window
from kvpress.core.press import BasePress
from kvpress.core.selector import Selector
from kvpress.observe.call import AttentionLayer, LayerCall, NewTokens
from kvpress.sparse.channels import ChannelTable
from kvpress.sparse.double_sparsity import DoubleSparsitySelector

HEADS, GROUPS, DIM = 4, 4, 64
SPECS = {
    "dense": "none",
    "quest 1/16": "quest:budget=0.0625",
    "double sparsity 1/16": "double_sparsity:budget=0.0625",
    "double sparsity 1/16, 16-bit labels": "double_sparsity:budget=0.0625,label_bits=16",
    "tidal decode 1/16": "tidal_decode:budget=0.0625",
    "tidal decode 1/16, a set per query head": "tidal_decode:budget=0.0625,heads=query",
    "kivi 4 bit": "kivi:bits=4",
    "kivi 4 bit, double sparsity 1/16": "kivi:bits=4 + double_sparsity:budget=0.0625",
}
NO_MODULE = torch.nn.Identity()


class Contender:
    """Caches of all layers under one press, with their selectors."""

    def __init__(self, spec: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
        press = kvpress.get_press(spec)
        recipe = press.recipe()
        self.stores: list[KVStore] = []
        self.selectors: list[Selector | None] = []
        self.shared: dict[str, Any] = {}
        for layer, (keys, values) in enumerate(pairs):
            store = KVStore(keys[:, :, :0], values[:, :, :0])
            store.append(keys, values)
            self.selectors.append(selector_of(press, layer))
            codec = recipe.codec_at(layer)
            if codec is not None:
                store.settle(codec, Sealing(store.heads))
            self.stores.append(store)
            selector = self.selectors[-1]
            if selector is not None:
                selector.prepare(store)

    def call(self, layer: int, queries: Tensor) -> LayerCall:
        """Return the call of one layer's step that a selector receives."""
        store = self.stores[layer]
        return LayerCall(
            AttentionLayer(NO_MODULE, layer, len(self.stores), layer, len(self.stores)),
            NewTokens(store.seen, shared=self.shared),
            store=store,
            kwargs={},
            hidden_states=queries,
            phase="decode",
            queries=queries,
            logits=Logits(DIM**-0.5),
        )

    def token(self, queries: list[Tensor]) -> None:
        """Attend in all layers, as one decode step does."""
        for layer, (store, selector) in enumerate(zip(self.stores, self.selectors, strict=True)):
            call = self.call(layer, queries[layer])
            reader = None if selector is None else partial(selector.attend, call)
            _, call.lse = store.attend(queries[layer], call.logits, reader=reader)
            if selector is not None:
                selector.after(call)

    def bytes_read(self, queries: list[Tensor]) -> int:
        """Return the bytes of sealed pairs and of their indexes that a token reads."""
        total = 0
        for layer, (store, selector) in enumerate(zip(self.stores, self.selectors, strict=True)):
            segments: list[Any] = store.segments if selector is not None else store.sealed or [store.window]
            pair_bytes = sum(t.nbytes for segment in segments for t in stored(segment))
            if selector is None:
                total += pair_bytes
                continue
            call = self.call(layer, queries[layer])
            sets = selector.choose(call, queries[layer].view(HEADS, GROUPS, DIM))
            owners = [store, *segments]
            total += sum(t.nbytes for owner in owners for entry in owner.index.values() for t in entry.tensors())
            if sets is None:
                # A layer that chooses for others reads its pairs, and then all keys once more.
                total += pair_bytes + pair_bytes // 2
                call.lse = store.attend(queries[layer], call.logits)[1]
                selector.after(call)
            else:
                chosen = sum(int(part.counts.sum()) for parts in sets for part in parts)
                total += chosen * pair_bytes // sum(segment.layout.total for segment in segments)
        return total


def stored(part: Segment | Window) -> list[Tensor]:
    """Return the tensors that store pairs."""
    if isinstance(part, Window):
        return [part.filled_keys, part.filled_values]
    return [tensor for tensors in part.storage().values() for tensor in tensors]


def selector_of(press: BasePress, layer: int) -> Selector | None:
    """Return a selector; channels are random, which cost as much to read as calibrated ones."""
    selector = press.recipe().selector_at(layer)
    if isinstance(selector, DoubleSparsitySelector):
        channels = torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(layer)).argsort()
        selector.load(ChannelTable({layer: channels}), layer)
    return selector


def random_pairs(context: int, layer: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(layer)
    shape = (1, HEADS, context, DIM)
    return torch.randn(shape, generator=generator).bfloat16(), torch.randn(shape, generator=generator).bfloat16()


@torch.no_grad()
def measure(context: int, layers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Interleave all contenders; return medians and minima in milliseconds and the bytes that a token reads."""
    pairs = [random_pairs(context, layer) for layer in range(layers)]
    contenders = {name: Contender(spec, pairs) for name, spec in SPECS.items()}
    generator = torch.Generator().manual_seed(1)
    queries = [torch.randn(1, HEADS * GROUPS, 1, DIM, generator=generator).bfloat16() for _ in range(layers)]
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for counted in range(rounds + 1):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender.token(queries)
            if counted:  # the first round compiles kernels
                times[name].append((time.perf_counter() - start) * 1e3)
    rows = {}
    for name, contender in contenders.items():
        rows[name] = {
            "median_ms": statistics.median(times[name]),
            "min_ms": min(times[name]),
            "read_mib": contender.bytes_read(queries) / 2**20,
        }
        faster = rows["dense"]["median_ms"] / rows[name]["median_ms"]
        less = rows["dense"]["read_mib"] / rows[name]["read_mib"]
        print(
            f"{name:42s} {rows[name]['median_ms']:8.1f} ms (min {rows[name]['min_ms']:8.1f})  {faster:5.2f} times faster"
            f"   reads {rows[name]['read_mib']:8.1f} MiB, {less:5.2f} times less",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = measure(options.context, options.layers, options.rounds)
    record = {
        "date": date.today().isoformat(),
        "machine": cpu_model(),
        "threads": options.threads,
        "torch": torch.__version__,
        "context": options.context,
        "layers": options.layers,
        "rounds": options.rounds,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
