# SPDX-License-Identifier: Apache-2.0
"""What a cache holds: bytes by component, pairs kept, bits per value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvpress.cache.guard import between_passes
from kvpress.cache.storage import tensors_in
from kvpress.cache.store import KVStore


@dataclass(frozen=True)
class LayerReport:
    """Bytes of one layer. `kept` pairs and `seen` tokens are sums over batch rows and kv heads.

    `fetched_bytes` are those of pairs that selectors read from host memory or a file since the cache began, each time.
    """

    layer: int
    components: dict[str, int]
    uncompressed_bytes: int
    kept: int
    seen: int
    compressible: bool
    fetched_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All bytes that this layer holds."""
        return sum(self.components.values())


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache against the uncompressed one; prints as a table.

    `kept` and `seen` count pairs over all layers, batch rows and kv heads. Layers that are not compressed, such as
    sliding windows, are listed with what they hold, and count on both sides.
    """

    layers: list[LayerReport] = field(default_factory=list)
    value_bytes: int = 2

    @property
    def total_bytes(self) -> int:
        """All bytes that the cache holds, scales, indexes, windows and scores included."""
        return sum(layer.total_bytes for layer in self.layers)

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes that the same tokens take in the uncompressed cache of transformers."""
        return sum(layer.uncompressed_bytes for layer in self.layers)

    @property
    def kept(self) -> int:
        """Pairs still stored, over all layers, rows and heads."""
        return sum(layer.kept for layer in self.layers)

    @property
    def seen(self) -> int:
        """Pairs that the uncompressed cache would hold."""
        return sum(layer.seen for layer in self.layers)

    @property
    def file_bytes(self) -> int:
        """Bytes that lie in files (`offload(x):to=file`); the others lie in memory."""
        return self.components.get("file", 0)

    @property
    def host_bytes(self) -> int:
        """Bytes of pairs that lie in host memory on purpose (`offload(x):to=host`)."""
        return self.components.get("host", 0)

    @property
    def device_bytes(self) -> int:
        """Bytes in the memory of the device that the model runs on, without those of the two others."""
        return self.total_bytes - self.file_bytes - self.host_bytes

    @property
    def fetched_bytes(self) -> int:
        """Bytes of pairs that selectors read from host memory or files since the cache began, each time that they did."""
        return sum(layer.fetched_bytes for layer in self.layers)

    @property
    def compression_factor(self) -> float:
        """How many times smaller than uncompressed."""
        return self.uncompressed_bytes / self.total_bytes if self.total_bytes else 1.0

    @property
    def shrinking(self) -> MemoryReport:
        """The layers that can shrink alone; windows of sliding layers and states of other kinds are left out."""
        return MemoryReport([layer for layer in self.layers if layer.compressible], self.value_bytes)

    @property
    def bits_per_value(self) -> float:
        """All bytes held, times 8, over the number of values of the uncompressed cache."""
        values = self.uncompressed_bytes / self.value_bytes
        return 8 * self.total_bytes / values if values else 0.0

    @property
    def components(self) -> dict[str, int]:
        """Bytes by component, over all layers."""
        total: dict[str, int] = {}
        for layer in self.layers:
            for name, size in layer.components.items():
                total[name] = total.get(name, 0) + size
        return total

    def __str__(self) -> str:
        names = [name for name, size in self.components.items() if size]
        table = Table(title="KV cache", title_justify="left")
        table.add_column("layer")
        for name in [*names, "total", "uncompressed", "kept of seen"]:
            table.add_column(name, justify="right")
        for layer in self.layers:
            cells = [format_bytes(layer.components.get(name, 0)) for name in names]
            share = f"{layer.kept / layer.seen:.1%}" if layer.seen else "-"
            label = str(layer.layer) if layer.compressible else f"{layer.layer} (as is)"
            table.add_row(label, *cells, format_bytes(layer.total_bytes), format_bytes(layer.uncompressed_bytes), share)
        share = f"{self.kept / self.seen:.1%}" if self.seen else "-"
        table.add_section()
        sums = [format_bytes(self.components[name]) for name in names]
        table.add_row("all", *sums, format_bytes(self.total_bytes), format_bytes(self.uncompressed_bytes), share)
        console = Console(width=120, force_jupyter=False)
        with console.capture() as captured:
            console.print(table)
        factor = f"{self.compression_factor:.2f} times smaller, {self.bits_per_value:.2f} bits per value"
        part = self.shrinking
        if part.layers and len(part.layers) < len(self.layers):
            factor += (
                f"\n{len(part.layers)} of {len(self.layers)} layers can shrink, "
                f"{part.uncompressed_bytes / self.uncompressed_bytes:.0%} of the uncompressed bytes: "
                f"these are {part.compression_factor:.2f} times smaller"
            )
        fetched = f"\n{format_bytes(self.fetched_bytes)} of pairs fetched so far" if self.fetched_bytes else ""
        return captured.get() + factor + fetched


def memory_report(cache: Any, *others: Any) -> MemoryReport:
    """Measure a cache: the bytes of every tensor that it holds, per layer and component.

    Of several caches, such as branches of a conversation, sums are reported, and what they share is counted once.
    """
    counted: set[int] = set()
    found = MemoryReport()
    for each in (cache, *others):
        if each is None or not hasattr(each, "layers"):
            raise TypeError(
                f"memory_report needs a cache, such as `outputs.past_key_values`, got {type(each).__name__}"
            )
    for each in (cache, *others):
        with between_passes(each):
            found = _added(found, _measured(each, counted))
    return found


def _added(one: MemoryReport, two: MemoryReport) -> MemoryReport:
    """Return a report of two sets of caches, layer by layer."""
    layers = []
    for ours, theirs in zip_longest(one.layers, two.layers):
        if ours is None or theirs is None:
            layers.append(ours or theirs)
            continue
        names = dict.fromkeys([*ours.components, *theirs.components])
        layers.append(
            LayerReport(
                ours.layer,
                {name: ours.components.get(name, 0) + theirs.components.get(name, 0) for name in names},
                ours.uncompressed_bytes + theirs.uncompressed_bytes,
                ours.kept + theirs.kept,
                ours.seen + theirs.seen,
                ours.compressible or theirs.compressible,
                ours.fetched_bytes + theirs.fetched_bytes,
            )
        )
    return MemoryReport(layers, two.value_bytes)


def _measured(cache: Any, counted: set[int]) -> MemoryReport:
    reports, value_bytes = [], 2
    for index, layer in enumerate(cache.layers):
        store: KVStore | None = getattr(layer, "store", None)
        if store is not None:
            value_bytes = store.window.keys.element_size()
            reports.append(_measure(index, store, counted))
        elif isinstance(getattr(layer, "keys", None), Tensor):
            value_bytes = layer.keys.element_size()
            held = storage_bytes([layer.keys, layer.values], counted)
            pairs = layer.keys.shape[0] * layer.keys.shape[1] * layer.keys.shape[2]
            full = storage_bytes([layer.keys, layer.values])
            reports.append(LayerReport(index, {"dense": held}, full, pairs, pairs, compressible=False))
        else:
            states = tensors_in(vars(layer))
            held = storage_bytes(states, counted)
            reports.append(LayerReport(index, {"states": held}, storage_bytes(states), 0, 0, compressible=False))
    # What layers have in common counts in the first of ours, as far as it is not in the components of one.
    common = storage_bytes(tensors_in(getattr(cache, "_kvpress_shared", None)), counted)
    first = next((report for report in reports if report.compressible), None)
    if common and first is not None:
        first.components["shared"] = common
    return MemoryReport(reports, value_bytes)


def _measure(index: int, store: KVStore, counted: set[int]) -> LayerReport:
    components = {name: storage_bytes(tensors, counted) for name, tensors in store.tensors().items()}
    streams = store.batch * store.heads
    window = store.window
    pair_bytes = (window.keys.shape[-1] + window.values.shape[-1]) * window.keys.element_size()
    seen = streams * store.seen
    kept = sum(store.stored())
    return LayerReport(index, components, seen * pair_bytes, kept, seen, True, store.fetched)


def storage_bytes(tensors: list[Tensor], counted: set[int] | None = None) -> int:
    """Bytes of the storages behind tensors, each once; those already `counted` not again, such as tables of all layers."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    fresh = sum(size for at, size in storages.items() if counted is None or at not in counted)
    if counted is not None:
        counted.update(at for at, size in storages.items() if size)
    return fresh


def kept_positions(cache: Any) -> list[list[list[Tensor]]]:
    """Return the original positions still stored, ascending: `[layer][batch row][kv head]` int64 tensors.

    A position is the index of the token in the sequence as it was passed, left padding counted. Layers that are not
    compressed, such as sliding windows, list what they hold; layers without pairs have an empty list.
    """
    with between_passes(cache):
        return _positions(cache)


def _positions(cache: Any) -> list[list[list[Tensor]]]:
    found = []
    for layer in cache.layers:
        store: KVStore | None = getattr(layer, "store", None)
        if store is not None:
            found.append(_store_positions(store))
        elif isinstance(getattr(layer, "keys", None), Tensor):
            batch, heads, length = layer.keys.shape[:3]
            seen = layer.get_seq_length()
            at = torch.arange(seen - length, seen)
            found.append([[at for _ in range(heads)] for _ in range(batch)])
        else:
            found.append([])
    return found


def _store_positions(store: KVStore) -> list[list[Tensor]]:
    window = store.window
    fresh = torch.arange(window.first, window.first + window.length)
    sealed = [(segment.layout, segment.slots().cpu().long()) for segment in store.sealed]
    rows = []
    for row in range(store.batch):
        heads = []
        for head in range(store.heads):
            n = row * store.heads + head
            heads.append(torch.cat([*(at[layout.rows(n)] for layout, at in sealed), fresh]))
        rows.append(heads)
    return rows


def parse_bytes(text: str, name: str = "limit") -> int:
    """Read a size such as 4GB, 512MiB or 1000000, which messages call `name`.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)B|([KMGT])iB)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{name} must be a size such as 4GB, 512MiB or 300000, got {text!r}")
    unit = (match[2] or match[3] or "").upper()
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(unit or " "))


def format_bytes(size: float) -> str:
    """Write a size with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
