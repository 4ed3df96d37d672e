"""Heads that keep everything beside heads that keep sinks and a recent window."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from kvpress.checks import check_count
from kvpress.context import LayerCall
from kvpress.presses.base import BasePress
from kvpress.presses.head_table import HeadTable, lowest, read_head_table
from kvpress.presses.streams import Stored, real_columns


@dataclass
class StreamingHeadsPress(BasePress):
    """Let `round(head_compression_ratio * L * H)` of the kv heads, those of the lowest value, keep a window only.

    After the prompt and every `interval` generated tokens, these streaming heads are cut down to the first `sink_size` and the
    newest `recent_size` tokens, so that they never hold more than `sink_size + recent_size + interval` pairs. The other heads
    keep everything. `table` is a .tsv file with a line per layer and a column per kv head, or the folder that holds it. Sizes
    that are None are those of the config.json beside it, else of the method.
    """

    acts_in_decoding: ClassVar[bool] = True
    is_head_wise: ClassVar[bool] = True
    sizes: ClassVar[tuple[int, int]]
    """Sinks and recent tokens of the method."""

    head_compression_ratio: float = 0.0
    table: str | None = field(default=None, kw_only=True)
    sink_size: int | None = field(default=None, kw_only=True)
    recent_size: int | None = field(default=None, kw_only=True)
    interval: int = field(default=128, kw_only=True)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        ratio = self.head_compression_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
            raise TypeError(f"head_compression_ratio must be a number in [0, 1], got {ratio!r}")
        if not 0 <= ratio <= 1:
            raise ValueError(f"head_compression_ratio must be in [0, 1], got {ratio}")
        if self.table is not None:
            self.table = os.fspath(self.table)
            read_head_table(self.table)
        elif ratio and not self.measures:
            raise ValueError(f"{type(self).__name__} needs to know which heads stream: {self.remedy}")
        sink_size, recent_size = self.window
        check_count("sink_size", sink_size, least=0)
        check_count("recent_size", recent_size)
        check_count("interval", self.interval)

    @property
    def measures(self) -> bool:
        """Whether heads are told apart without a table."""
        return False

    @property
    def remedy(self) -> str:
        """What to do where there is no table."""
        return "give table=, a .tsv file of one value per layer and kv head"

    @property
    def window(self) -> tuple[int, int]:
        """Sinks and recent tokens that a streaming head keeps."""
        known = HeadTable("", torch.empty(0)) if self.table is None else read_head_table(self.table)
        given = zip((self.sink_size, self.recent_size), (known.sink_size, known.recent_size), self.sizes, strict=True)
        sink_size, recent_size = (next(size for size in sizes if size is not None) for sizes in given)
        return sink_size, recent_size

    def post_init_from_model(self, model: nn.Module) -> None:
        if self.table is not None:
            read_head_table(self.table).check(model)

    def planned_pairs(self, tokens: int) -> int:
        return round(tokens - self.head_compression_ratio * max(0, tokens - sum(self.window)))

    def streaming(self, call: LayerCall) -> Tensor | None:
        """Return which heads of a layer stream, `[B, H]` on the host; None where that is not known."""
        if self.table is None:
            return None
        return lowest(read_head_table(self.table).values, self.head_compression_ratio)[call.layer].expand(
            call.store.batch, -1
        )

    def after_prefill(self, call: LayerCall) -> None:
        self.cut(call)

    def after_decode(self, call: LayerCall) -> None:
        if call.store.since_eviction >= self.interval:
            self.cut(call)

    def cut(self, call: LayerCall) -> None:
        """Cut the streaming heads of a layer down to their window."""
        store, streaming = call.store, self.streaming(call)
        store.since_eviction = 0
        if streaming is None or not bool(streaming.any()):
            return
        sink_size, recent_size = self.window
        edges = []
        for real in real_columns(store, call.columns):
            middle = real[sink_size : max(sink_size, len(real) - recent_size)]
            edges.append((int(middle[0]), int(middle[-1])) if len(middle) else None)
        masks = []
        for n, at in enumerate(Stored(store, call.columns).columns):
            row, head = divmod(n, store.heads)
            edge = edges[row] if streaming[row, head] else None
            masks.append(torch.ones(len(at), dtype=torch.bool) if edge is None else (at < edge[0]) | (at > edge[1]))
        if not all(bool(mask.all()) for mask in masks):
            store.evict(masks, call.columns)
