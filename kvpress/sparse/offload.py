"""Pairs in host memory: a segment that keeps them there, and the lane that brings a layer's selection ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.attention import Logits, Partial, attend
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Block, DenseSegment, Segment
from kvpress.cache.store import KVStore, Sealing
from kvpress.quant.base import DenseCodec
from kvpress.sparse.base import Chosen

SLOTS = 2
"""Buffers that take turns: one is filled for the next layer while this one reads the other."""


class HostCodec(DenseCodec):
    """Moves sealed pairs to host memory, as they are."""

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        del sealing
        home = segment.device
        return HostSegment(_host(segment.keys, home), _host(segment.values, home), segment.layout, home)


class HostSegment(DenseSegment):
    """Dense pairs in host memory, pinned where the model runs on another device: `home`."""

    def __init__(self, keys: Tensor, values: Tensor, layout: Layout, home: torch.device) -> None:
        super().__init__(keys, values, layout)
        self.home = home

    @property
    def device(self) -> torch.device:
        """Where the pairs are read; what is known about them lies there."""
        return self.home

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = rows if isinstance(rows, slice) else rows.cpu()
        return self.keys[rows].to(self.home), self.values[rows].to(self.home)

    def _take(self, rows: Tensor, layout: Layout) -> HostSegment:
        rows = rows.cpu()
        return HostSegment(_host(self.keys[rows], self.home), _host(self.values[rows], self.home), layout, self.home)

    @classmethod
    def _concatenate(cls, segments: Sequence[DenseSegment]) -> HostSegment:
        joined, home = DenseSegment._concatenate(segments), segments[0].device
        return cls(_host(joined.keys, home), _host(joined.values, home), joined.layout, home)

    def storage(self) -> dict[str, list[Tensor]]:
        return {"host": [self.keys, self.values]}

    def _to(self, device: torch.device | str) -> None:
        self.home = torch.device(device)
        self.keys, self.values = _host(self.keys, self.home), _host(self.values, self.home)

    # Where the host computes, it reads its memory directly; elsewhere, block by block.

    def blocks(self) -> Iterator[Block]:
        return super().blocks() if self.home.type == "cpu" else Segment.blocks(self)

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        if self.home.type == "cpu":
            return super().attend(queries, logits, hidden)
        return Segment.attend(self, queries, logits, hidden)

    def mass(self, queries: Tensor, logits: Logits, lse: Tensor) -> Tensor:
        return (
            super().mass(queries, logits, lse) if self.home.type == "cpu" else Segment.mass(self, queries, logits, lse)
        )

    def attend_rows(self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor) -> Partial:
        if self.home.type == "cpu":
            return super().attend_rows(queries, logits, rows, counts)
        return Segment.attend_rows(self, queries, logits, rows, counts)


def _host(tensor: Tensor, home: torch.device) -> Tensor:
    tensor = tensor.cpu()
    return tensor.pin_memory() if home.type == "cuda" and not tensor.is_pinned() else tensor


@dataclass
class Fetched:
    """Chosen pairs that were brought to where they are read: `keys` and `values [N, K, D]` of the rows `chosen`."""

    keys: Tensor
    values: Tensor
    chosen: Chosen
    ready: torch.cuda.Event | None = None

    def attend(self, queries: Tensor, logits: Logits) -> Partial:
        """Attend from `queries [N, G, D]`."""
        if self.ready is not None:
            torch.cuda.current_stream(self.keys.device).wait_event(self.ready)
        counts, (streams, width, _) = self.chosen.counts, self.keys.shape
        if kernels.serves(queries, self.keys):
            starts = torch.arange(streams, device=counts.device) * width
            keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
            return kernels.dense_decode(queries, keys, values, starts, counts, logits.scale, softcap=logits.softcap)
        visible = torch.arange(width, device=counts.device) < counts[:, None]
        return attend(queries, self.keys, self.values, logits, visible[:, None])


@dataclass(frozen=True)
class Order:
    """A selection that was sent for: of which store, for the step that makes it hold `seen` tokens."""

    store: KVStore
    seen: int
    parts: Future[list[Fetched]]


class Lane:
    """Brings selections to the device beside the model's own work, one after another, into buffers that take turns."""

    def __init__(self) -> None:
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvpress-offload")
        self.slots: list[dict[str, Tensor]] = [{} for _ in range(SLOTS)]
        self.turn = 0
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def order(self, store: KVStore, choose: Callable[[], list[Chosen] | None]) -> Order:
        """Choose pairs of a store's segments and fetch them; None fetches nothing."""
        slot, self.turn = self.slots[self.turn], (self.turn + 1) % SLOTS
        segments, home = list(store.segments), store.window.keys.device
        started = None
        if home.type == "cuda":
            # The buffer may still be read by what was launched before.
            started = torch.cuda.Event()
            started.record(torch.cuda.current_stream(home))
        run = self.worker.submit(self._fetch, segments, choose, slot, home, started)
        return Order(store, store.seen + 1, run)

    def _fetch(
        self,
        segments: Sequence[Segment],
        choose: Callable[[], list[Chosen] | None],
        slot: dict[str, Tensor],
        home: torch.device,
        started: torch.cuda.Event | None,
    ) -> list[Fetched]:
        with torch.no_grad():
            if started is None:
                return _gather(segments, choose(), slot, home)
            stream = self.streams.setdefault(home, torch.cuda.Stream(home))
            with torch.cuda.stream(stream):
                stream.synchronize()  # what was staged in this buffer before has left it
                stream.wait_event(started)
                parts = _gather(segments, choose(), slot, home)
                for part in parts:
                    part.ready = torch.cuda.Event()
                    part.ready.record(stream)
            return parts


def _gather(
    segments: Sequence[Segment], chosen: list[Chosen] | None, slot: dict[str, Tensor], home: torch.device
) -> list[Fetched]:
    """Copy the chosen pairs of every segment into a buffer."""
    fetched = []
    for i, (segment, part) in enumerate(zip(segments, chosen or (), strict=False)):
        assert isinstance(segment, DenseSegment)  # noqa: S101 - a host codec seals nothing else
        rows = part.rows.flatten().long().to(segment.keys.device)
        moved = []
        for name, source in (("keys", segment.keys), ("values", segment.values)):
            staged = _buffer(slot, f"{name} {i} host", len(rows), source, source.device, home.type == "cuda")
            torch.index_select(source, 0, rows, out=staged)
            if home.type == "cpu":
                moved.append(staged)
                continue
            moved.append(_buffer(slot, f"{name} {i}", len(rows), source, home, False))
            moved[-1].copy_(staged, non_blocking=True)
        keys, values = (tensor.view(*part.rows.shape, -1) for tensor in moved)
        fetched.append(Fetched(keys, values, part))
    return fetched


def _buffer(slot: dict[str, Tensor], name: str, rows: int, like: Tensor, device: torch.device, pinned: bool) -> Tensor:
    """The first `rows` rows of a buffer that grows as needed."""
    held = slot.get(name)
    if held is None or len(held) < rows or held.shape[1] != like.shape[1] or held.dtype != like.dtype:
        held = slot[name] = torch.empty(rows, like.shape[1], dtype=like.dtype, device=device, pin_memory=pinned)
    return held[:rows]
