# SPDX-License-Identifier: Apache-2.0
"""Pairs in host memory: the segment that stores them, and the prefetch of a layer's selection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial, attend
from kvpress.cache.codec import DenseCodec, Sealing
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.segment_attention import DenseBlock, options_of
from kvpress.cache.selection import Chosen
from kvpress.cache.storage import per_pair
from kvpress.cache.store import KVStore

BUFFERS = 2
"""One buffer is filled for the next layer while the current layer reads the other."""


class HostCodec(DenseCodec):
    """Moves sealed pairs to host memory, in the model's type."""

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        del sealing
        home = segment.device
        return HostSegment(segment.keys, segment.values, segment.layout, home)


@dataclass(eq=False, repr=False)
class HostSegment(DenseSegment):
    """Dense pairs in host memory, which is pinned if the model runs on a GPU."""

    keys: Annotated[Tensor, per_pair("host", stay=True)]
    values: Annotated[Tensor, per_pair("host", stay=True)]
    home: torch.device
    """Device of the model."""

    @property
    def device(self) -> torch.device:
        """Device that reads the pairs, and stores their index."""
        return self.home

    def _place(self) -> None:
        self.keys, self.values = _host(self.keys, self.home), _host(self.values, self.home)

    def moved(self, device: torch.device | str, memo: dict[int, Any] | None = None) -> HostSegment:
        twin = super().moved(device, memo)
        twin.home = torch.device(device)
        twin._place()
        return twin

    def away(self) -> float:
        return (self.keys.shape[1] + self.values.shape[1]) * self.keys.element_size()

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = rows if isinstance(rows, slice) else rows.cpu()
        return self.keys[rows].to(self.home), self.values[rows].to(self.home)

    # A model on the CPU reads the pairs in place; on another device, they are copied block by block.

    def blocks(self) -> Iterator[DenseBlock]:
        return super().blocks() if self.home.type == "cpu" else Segment.blocks(self)

    def operand(self) -> kernels.Rows | None:
        return super().operand() if self.home.type == "cpu" else None


def _host(tensor: Tensor, home: torch.device) -> Tensor:
    tensor = tensor.cpu()
    return tensor.pin_memory() if home.type == "cuda" and not tensor.is_pinned() else tensor


@dataclass
class Fetched:
    """Chosen pairs of a segment, copied to the model's device."""

    keys: Tensor
    """`[N, K, D]`."""
    values: Tensor
    """`[N, K, Dv]`."""
    chosen: Chosen
    """Rows of the segment."""
    log_weight: Tensor | None = None
    """Added to the logits of the pairs, `[N, K]`."""
    ready: torch.cuda.Event | None = None
    """Recorded when the copy is complete; None on the CPU."""

    def attend(self, queries: Tensor, logits: Logits) -> Partial:
        """Attend from `queries [N, G, D]` to the pairs."""
        if self.ready is not None:
            torch.cuda.current_stream(self.keys.device).wait_event(self.ready)
        counts, (streams, width, _) = self.chosen.counts, self.keys.shape
        if kernels.serves(queries, self.keys):
            starts = torch.arange(streams, device=counts.device) * width
            keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
            weight = None if self.log_weight is None else self.log_weight.flatten()
            rows = kernels.Rows(kernels.Dense(keys), kernels.Dense(values), log_weight=weight)
            return kernels.decode(queries, rows, kernels.Ranges(starts, counts), options_of(logits))
        visible = torch.arange(width, device=counts.device) < counts[:, None]
        return attend(queries, self.keys, self.values, logits, visible[:, None], self.log_weight)


@dataclass(frozen=True)
class PendingFetch:
    """A fetch that runs in the background."""

    store: KVStore
    """Store whose pairs are fetched."""
    seen: int
    """Tokens that the store will have seen in the decode step which reads the pairs."""
    parts: Future[list[Fetched]]
    """Fetched pairs of each segment."""


class Prefetcher:
    """Copies selections to the device in a background thread, one after another, into alternating buffers."""

    def __init__(self) -> None:
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvpress-offload")
        self.buffers: list[dict[str, Tensor]] = [{} for _ in range(BUFFERS)]
        self.next_buffer = 0
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, store: KVStore, choose: Callable[[], list[Chosen] | None]) -> PendingFetch:
        """Call `choose` and fetch the chosen pairs of a store in the background; if it returns None, nothing is fetched."""
        buffer, self.next_buffer = self.buffers[self.next_buffer], (self.next_buffer + 1) % BUFFERS
        segments, home = list(store.segments), store.window.keys.device
        started = None
        if home.type == "cuda":
            # Kernels that were launched before may still read the buffer.
            started = torch.cuda.Event()
            started.record(torch.cuda.current_stream(home))
        run = self.worker.submit(self._fetch, segments, choose, buffer, home, started)
        return PendingFetch(store, store.seen + 1, run)

    def _fetch(
        self,
        segments: Sequence[Segment],
        choose: Callable[[], list[Chosen] | None],
        buffer: dict[str, Tensor],
        home: torch.device,
        started: torch.cuda.Event | None,
    ) -> list[Fetched]:
        with torch.no_grad():
            if started is None:
                return _gather(segments, choose(), buffer, home)
            stream = self.streams.setdefault(home, torch.cuda.Stream(home))
            with torch.cuda.stream(stream):
                stream.synchronize()  # earlier copies out of this staging buffer are complete
                stream.wait_event(started)
                fetched = _gather(segments, choose(), buffer, home)
                for pairs in fetched:
                    pairs.ready = torch.cuda.Event()
                    pairs.ready.record(stream)
            return fetched


class Fetching(threading.local):
    """Prefetcher of each thread that runs the model, and its pending fetches by the selector that will read them."""

    def __init__(self) -> None:
        self.prefetcher = Prefetcher()
        self.pending: dict[Any, PendingFetch] = {}


def _gather(
    segments: Sequence[Segment], chosen: list[Chosen] | None, buffer: dict[str, Tensor], home: torch.device
) -> list[Fetched]:
    """Copy the chosen pairs of every segment into a buffer."""
    fetched = []
    for i, (segment, pairs) in enumerate(zip(segments, chosen or (), strict=False)):
        source, rows = segment.located(pairs.rows.flatten().long())
        assert isinstance(source, DenseSegment)  # noqa: S101 - a host codec seals nothing else
        rows = rows.to(source.keys.device)
        moved = []
        for name, tensor in (("keys", source.keys), ("values", source.values)):
            staging = _room(buffer, f"{name} {i} host", len(rows), tensor, tensor.device, home.type == "cuda")
            torch.index_select(tensor, 0, rows, out=staging)
            if home.type == "cpu":
                moved.append(staging)
                continue
            moved.append(_room(buffer, f"{name} {i}", len(rows), tensor, home, False))
            moved[-1].copy_(staging, non_blocking=True)
        keys, values = (tensor.view(*pairs.rows.shape, -1) for tensor in moved)
        weight = None if segment.log_weight is None else segment.log_weight[pairs.rows.long()]
        fetched.append(Fetched(keys, values, pairs, weight))
    return fetched


def _room(buffer: dict[str, Tensor], name: str, rows: int, like: Tensor, device: torch.device, pinned: bool) -> Tensor:
    """Return the first `rows` rows of a named buffer, enlarged if needed."""
    tensor = buffer.get(name)
    if tensor is None or len(tensor) < rows or tensor.shape[1] != like.shape[1] or tensor.dtype != like.dtype:
        tensor = buffer[name] = torch.empty(rows, like.shape[1], dtype=like.dtype, device=device, pin_memory=pinned)
    return tensor[:rows]
