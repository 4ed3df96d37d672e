# SPDX-License-Identifier: Apache-2.0
"""Pairs in host memory: a segment that keeps them there, and what fetches a layer's selection ahead of time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attended import Block
from kvpress.cache.attention import Logits, Partial, attend
from kvpress.cache.chosen import Chosen
from kvpress.cache.codec import DenseCodec, Sealing
from kvpress.cache.held import per_pair
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.store import KVStore

BUFFERS = 2
"""One is filled for the next layer while this one reads the other."""


class HostCodec(DenseCodec):
    """Moves sealed pairs to host memory, as they are."""

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        del sealing
        home = segment.device
        return HostSegment(segment.keys, segment.values, segment.layout, home)


@dataclass(eq=False, repr=False)
class HostSegment(DenseSegment):
    """Dense pairs in host memory, pinned where the model runs on another device: `home`."""

    keys: Annotated[Tensor, per_pair("host", stay=True)]
    values: Annotated[Tensor, per_pair("host", stay=True)]
    home: torch.device

    @property
    def device(self) -> torch.device:
        """Where the pairs are read; what is known about them lies there."""
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

    # Where the host computes, it reads its memory directly; elsewhere, block by block.

    def blocks(self) -> Iterator[Block]:
        return super().blocks() if self.home.type == "cpu" else Segment.blocks(self)

    def operand(self) -> kernels.Rows | None:
        return super().operand() if self.home.type == "cpu" else None


def _host(tensor: Tensor, home: torch.device) -> Tensor:
    tensor = tensor.cpu()
    return tensor.pin_memory() if home.type == "cuda" and not tensor.is_pinned() else tensor


@dataclass
class Fetched:
    """Chosen pairs that were brought to where they are read: `keys` and `values [N, K, D]` of the rows `chosen`.

    `log_weight [N, K]` is added to their logits.
    """

    keys: Tensor
    values: Tensor
    chosen: Chosen
    log_weight: Tensor | None = None
    ready: torch.cuda.Event | None = None

    def attend(self, queries: Tensor, logits: Logits) -> Partial:
        """Attend from `queries [N, G, D]`."""
        if self.ready is not None:
            torch.cuda.current_stream(self.keys.device).wait_event(self.ready)
        counts, (streams, width, _) = self.chosen.counts, self.keys.shape
        if kernels.serves(queries, self.keys):
            starts = torch.arange(streams, device=counts.device) * width
            keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
            weight = None if self.log_weight is None else self.log_weight.flatten()
            rows = kernels.Rows(kernels.Dense(keys), kernels.Dense(values), log_weight=weight)
            return kernels.decode(
                queries, rows, kernels.Ranges(starts, counts), kernels.Options(logits.scale, logits.softcap)
            )
        visible = torch.arange(width, device=counts.device) < counts[:, None]
        return attend(queries, self.keys, self.values, logits, visible[:, None], self.log_weight)


@dataclass(frozen=True)
class PendingFetch:
    """A selection that is being fetched: of which store, for the step that makes it hold `seen` tokens."""

    store: KVStore
    seen: int
    parts: Future[list[Fetched]]


class Prefetcher:
    """Brings selections to the device beside the model's own work, one after another, into alternating buffers."""

    def __init__(self) -> None:
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvpress-offload")
        self.buffers: list[dict[str, Tensor]] = [{} for _ in range(BUFFERS)]
        self.next_buffer = 0
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, store: KVStore, choose: Callable[[], list[Chosen] | None]) -> PendingFetch:
        """Choose pairs of a store's segments and fetch them; None fetches nothing."""
        buffer, self.next_buffer = self.buffers[self.next_buffer], (self.next_buffer + 1) % BUFFERS
        segments, home = list(store.segments), store.window.keys.device
        started = None
        if home.type == "cuda":
            # The buffer may still be read by what was launched before.
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
                stream.synchronize()  # what was staged in this buffer before has left it
                stream.wait_event(started)
                parts = _gather(segments, choose(), buffer, home)
                for part in parts:
                    part.ready = torch.cuda.Event()
                    part.ready.record(stream)
            return parts


class Fetching(threading.local):
    """The `prefetcher` of each thread that runs the model, and what is `pending` in it, by who will read it."""

    def __init__(self) -> None:
        self.prefetcher = Prefetcher()
        self.pending: dict[Any, PendingFetch] = {}


def _gather(
    segments: Sequence[Segment], chosen: list[Chosen] | None, buffer: dict[str, Tensor], home: torch.device
) -> list[Fetched]:
    """Copy the chosen pairs of every segment into a buffer."""
    fetched = []
    for i, (segment, part) in enumerate(zip(segments, chosen or (), strict=False)):
        held, rows = segment.located(part.rows.flatten().long())
        assert isinstance(held, DenseSegment)  # noqa: S101 - a host codec seals nothing else
        rows = rows.to(held.keys.device)
        moved = []
        for name, source in (("keys", held.keys), ("values", held.values)):
            staged = _room(buffer, f"{name} {i} host", len(rows), source, source.device, home.type == "cuda")
            torch.index_select(source, 0, rows, out=staged)
            if home.type == "cpu":
                moved.append(staged)
                continue
            moved.append(_room(buffer, f"{name} {i}", len(rows), source, home, False))
            moved[-1].copy_(staged, non_blocking=True)
        keys, values = (tensor.view(*part.rows.shape, -1) for tensor in moved)
        weight = None if segment.log_weight is None else segment.log_weight[part.rows.long()]
        fetched.append(Fetched(keys, values, part, weight))
    return fetched


def _room(buffer: dict[str, Tensor], name: str, rows: int, like: Tensor, device: torch.device, pinned: bool) -> Tensor:
    """The first `rows` rows of a buffer that grows as needed."""
    held = buffer.get(name)
    if held is None or len(held) < rows or held.shape[1] != like.shape[1] or held.dtype != like.dtype:
        held = buffer[name] = torch.empty(rows, like.shape[1], dtype=like.dtype, device=device, pin_memory=pinned)
    return held[:rows]
