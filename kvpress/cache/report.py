# SPDX-License-Identifier: Apache-2.0
"""Memory report of a cache: bytes by component, kept pairs, bits per value."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvpress.cache.guard import between_passes
from kvpress.cache.storage import tensors_in
from kvpress.cache.store import KVStore
from kvpress.counts import format_bytes as format_bytes
from kvpress.counts import parse_bytes as parse_bytes


@dataclass(frozen=True)
class LayerReport:
    """Bytes of one layer."""

    layer: int
    """Index of the layer."""
    components: dict[str, int]
    """Bytes by component."""
    uncompressed_bytes: int
    """Bytes of the same tokens in the uncompressed cache."""
    kept: int
    """Stored pairs, over batch rows and KV heads."""
    seen: int
    """Pairs of the uncompressed cache, over batch rows and KV heads."""
    compressible: bool
    """Whether this library stores the layer; otherwise the layer counts as it is on both sides."""
    fetched_bytes: int = 0
    """Bytes of pairs that selectors have read from host memory or a file, counted at each read."""

    @property
    def total_bytes(self) -> int:
        """Held bytes of the layer."""
        return sum(self.components.values())


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache against the uncompressed one; prints as a table.

    Layers that are not compressed, such as sliding windows, are listed with their bytes, and count on both sides.
    """

    layers: list[LayerReport] = field(default_factory=list)
    """Reports of all layers."""
    value_bytes: int = 2
    """Bytes of a number of the uncompressed cache."""

    @property
    def total_bytes(self) -> int:
        """Held bytes of the cache: codes, scales, indexes, windows and scores."""
        return sum(layer.total_bytes for layer in self.layers)

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes that the same tokens take in the uncompressed cache of transformers."""
        return sum(layer.uncompressed_bytes for layer in self.layers)

    @property
    def kept(self) -> int:
        """Stored pairs, over all layers, rows and KV heads."""
        return sum(layer.kept for layer in self.layers)

    @property
    def seen(self) -> int:
        """Pairs of the uncompressed cache, over all layers, rows and KV heads."""
        return sum(layer.seen for layer in self.layers)

    @property
    def file_bytes(self) -> int:
        """Bytes in files (`offload(x):to=file`)."""
        return self.components.get("file", 0)

    @property
    def host_bytes(self) -> int:
        """Bytes of pairs that were offloaded to host memory (`offload(x):to=host`)."""
        return self.components.get("host", 0)

    @property
    def device_bytes(self) -> int:
        """Bytes in the memory of the model's device: all bytes except offloaded ones."""
        return self.total_bytes - self.file_bytes - self.host_bytes

    @property
    def fetched_bytes(self) -> int:
        """Bytes of pairs that selectors have read from host memory or files, counted at each read."""
        return sum(layer.fetched_bytes for layer in self.layers)

    @property
    def compression_factor(self) -> float:
        """Uncompressed bytes over held bytes."""
        return self.uncompressed_bytes / self.total_bytes if self.total_bytes else 1.0

    @property
    def shrinking(self) -> MemoryReport:
        """Report of compressible layers only, without sliding windows and states of other kinds."""
        return MemoryReport([layer for layer in self.layers if layer.compressible], self.value_bytes)

    @property
    def bits_per_value(self) -> float:
        """Held bytes x 8, over the number of key and value numbers of the uncompressed cache."""
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

    def over_ranks(self, group: Any = None) -> MemoryReport:
        """Return the sum of the reports of all ranks of a process group, which all call this; the default group if None.

        Under tensor parallel, a rank's cache has the heads of this rank only.
        """
        reports: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, self, group=group)
        total: MemoryReport = functools.reduce(_added, reports)
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
    """Measure the bytes of all tensors of a cache, by layer and component.

    For several caches, such as branches of a conversation, report sums, with shared tensors counted once.

    Raises:
        TypeError: an argument is not a cache.
    """
    counted: set[int] = set()
    report = MemoryReport()
    for item in (cache, *others):
        if item is None or not hasattr(item, "layers"):
            raise TypeError(
                f"memory_report needs a cache, such as `outputs.past_key_values`, got {type(item).__name__}"
            )
    for item in (cache, *others):
        with between_passes(item):
            report = _added(report, _measured(item, counted))
    return report


def _added(first: MemoryReport, second: MemoryReport) -> MemoryReport:
    """Return the sum of two reports, layer by layer."""
    layers = []
    for ours, theirs in zip_longest(first.layers, second.layers):
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
    return MemoryReport(layers, second.value_bytes)


def _measured(cache: Any, counted: set[int]) -> MemoryReport:
    reports, value_bytes = [], 2
    for index, layer in enumerate(cache.layers):
        store: KVStore | None = getattr(layer, "store", None)
        if store is not None:
            value_bytes = store.window.keys.element_size()
            reports.append(_measure(index, store, counted))
        elif isinstance(getattr(layer, "keys", None), Tensor):
            value_bytes = layer.keys.element_size()
            num_bytes = storage_bytes([layer.keys, layer.values], counted)
            pairs = layer.keys.shape[0] * layer.keys.shape[1] * layer.keys.shape[2]
            full = storage_bytes([layer.keys, layer.values])
            reports.append(LayerReport(index, {"dense": num_bytes}, full, pairs, pairs, compressible=False))
        else:
            states = tensors_in(vars(layer))
            num_bytes = storage_bytes(states, counted)
            reports.append(LayerReport(index, {"states": num_bytes}, storage_bytes(states), 0, 0, compressible=False))
    # State shared by all layers counts in the first compressible layer, unless a component includes it.
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
    """Return the bytes of the storages of tensors, each once; skip storages in `counted`, such as shared tables."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    num_bytes = sum(size for address, size in storages.items() if counted is None or address not in counted)
    if counted is not None:
        counted.update(address for address, size in storages.items() if size)
    return num_bytes


def kept_positions(cache: Any) -> list[list[list[Tensor]]]:
    """Return the original positions of stored pairs, ascending: `[layer][batch row][KV head]` int64 tensors.

    A position is the index of the token in the sequence as it was passed, left padding counted. Layers that are not
    compressed, such as sliding windows, list their pairs; layers without pairs have an empty list.
    """
    with between_passes(cache):
        return _positions(cache)


def _positions(cache: Any) -> list[list[list[Tensor]]]:
    layers = []
    for layer in cache.layers:
        store: KVStore | None = getattr(layer, "store", None)
        if store is not None:
            layers.append(_store_positions(store))
        elif isinstance(getattr(layer, "keys", None), Tensor):
            batch, heads, length = layer.keys.shape[:3]
            seen = layer.get_seq_length()
            positions = torch.arange(seen - length, seen)
            layers.append([[positions for _ in range(heads)] for _ in range(batch)])
        else:
            layers.append([])
    return layers


def _store_positions(store: KVStore) -> list[list[Tensor]]:
    window = store.window
    newest = torch.arange(window.first, window.first + window.length)
    sealed = [(segment.layout, segment.slots().cpu().long()) for segment in store.sealed]
    rows = []
    for row in range(store.batch):
        heads = []
        for head in range(store.heads):
            n = row * store.heads + head
            heads.append(torch.cat([*(slots[layout.rows(n)] for layout, slots in sealed), newest]))
        rows.append(heads)
    return rows
