"""All pairs of one attention layer: encoded segments, one dense sealed segment, and the open window.

Positions ascend through these three parts within every stream. Nothing here knows transformers; `kvpress.hf` puts a
store behind a cache layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpress.attention import Logits, Partial, group_queries, merge
from kvpress.cache.layout import Layout, interleave
from kvpress.cache.segment import DenseSegment, Segment, SegmentT
from kvpress.cache.window import Columns, Cursor, Window

if TYPE_CHECKING:
    from kvpress.context import LayerCall
    from kvpress.observe import Observer
    from kvpress.quant.base import Codec

Reader = Callable[[Tensor], list[Partial]]
"""Attends from `queries [N, G, D]` to some of the pairs of each encoded segment."""


@dataclass(frozen=True)
class Sealing:
    """What a codec may look at beside the pairs that it encodes.

    Stream `n` of a segment belongs to kv head `n % heads`; `earlier` are the layer's encoded segments, oldest first;
    `call` is the pass that filled the window, None outside a model.
    """

    heads: int
    earlier: Sequence[Segment] = field(default_factory=tuple)
    call: LayerCall | None = None


class KVStore:
    """Pairs of `B` rows and `H` kv heads.

    `seen` counts the tokens that the sequence has consumed, pads included; `columns`, where a method takes it, is the
    boolean `[B, seen]` mask of real tokens, or None where nothing is padded. `since_eviction` counts generated tokens;
    `targets` are the pairs per head that each row was last cut down to, `sealed_tokens` the real tokens of each row that
    the window no longer holds.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.batch, self.heads = keys.shape[:2]
        self.dtype = keys.dtype
        self.segments: list[Segment] = []
        self.dense: DenseSegment | None = None
        self.window = Window.empty_like(keys, values)
        self.seen = 0
        self.since_eviction = 0
        self.targets: list[int] | None = None
        self.sealed_tokens: list[int] | None = None
        self.observers: dict[str, Observer] = {}

    @property
    def sealed(self) -> list[Segment]:
        """All sealed parts, oldest first."""
        return self.segments if self.dense is None else [*self.segments, self.dense]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add new tokens `[B, H, n, D]` at the end."""
        if (keys.shape[0], keys.shape[1]) != (self.batch, self.heads) or keys.shape[3] != self.window.keys.shape[3]:
            held = (self.batch, self.heads, "*", self.window.keys.shape[3])
            raise ValueError(
                f"this cache holds keys of shape {held} (batch, kv heads, tokens, head dim) but the model brings "
                f"{tuple(keys.shape)}; use one cache per model and batch"
            )
        if keys.dtype != self.dtype:
            raise TypeError(f"this cache holds {self.dtype} keys but the model brings {keys.dtype}")
        self.window.append(keys, values)
        self.seen += keys.shape[2]

    def ready(self, columns: Columns | None, spare: int) -> Cursor | None:
        """Return where a static step writes its token, after making room; None where only `append` can add it.

        `columns` covers the new token; a full window grows by `spare`.
        """
        pads = self.window.pads(columns, self.window.length + 1)
        if pads is None or self.window.side or self._hides_sealed(columns):
            return None
        self.window.reserve(spare)
        return self.window.cursor_at(pads)

    def count_token(self) -> None:
        """Count the token of a static step, which itself leaves all counters on the host alone."""
        self.window.length += 1
        self.seen += 1

    # -- attention -------------------------------------------------------------------------------------------

    def attend(
        self,
        queries: Tensor,
        logits: Logits,
        columns: Columns | Tensor | None = None,
        sinks: Tensor | None = None,
        reader: Reader | None = None,
    ) -> Partial:
        """Attend from the newest tokens' `queries [B, Hq, Q, D]` to everything stored and visible.

        Layers that share `columns` find out once what follows from it. `sinks [Hq]` are extra logits without a value. A
        `reader` reads the segments in the place of all of them, where there is one query per row.
        Returns `(out [N, M, Dv], lse [N, M])` in float32.
        """
        length = queries.shape[2]
        rows = group_queries(queries, self.heads)
        parts = []
        columns = Columns(columns) if isinstance(columns, Tensor) else columns
        hides = self._hides_sealed(columns)
        whole = self.sealed
        if reader is not None and length == 1 and self.segments and not hides:
            parts += reader(rows)
            whole = [] if self.dense is None else [self.dense]
        for segment in whole:
            hidden = self._hidden(segment, columns.real) if hides and columns is not None else None
            parts.append(segment.attend(rows, logits, hidden))
        if self.window.length:
            parts.append(self.window.attend(rows, logits, length, columns))
        if sinks is not None:
            extra = sinks.float().view(1, self.heads, -1, 1).expand(self.batch, -1, -1, length)
            extra = extra.reshape(rows.shape[0], rows.shape[1])
            parts.append((torch.zeros_like(parts[-1][0]), extra))
        return merge(parts)

    def _hides_sealed(self, columns: Columns | None) -> bool:
        """Whether the mask hides tokens that were real when they were sealed."""
        if columns is None or self.sealed_tokens is None:
            return False
        return columns.counts(self.window.first) != self.sealed_tokens

    def _hidden(self, segment: Segment, columns: Tensor) -> Tensor:
        row = (segment.layout.stream_of_row // self.heads).to(columns.device)
        return ~columns[row, segment.columns().to(columns.device).long()]

    # -- sealing ---------------------------------------------------------------------------------------------

    def open_segment(self, columns: Tensor | None) -> DenseSegment:
        """Return the dense sealed segment and the real tokens of the window as one segment; changes nothing."""
        fresh = self._window_segment(columns)
        return fresh if self.dense is None else DenseSegment.join([self.dense, fresh])

    def _window_segment(self, columns: Tensor | None) -> DenseSegment:
        window = self.window
        filled, first = window.length, window.first
        keys, values = window.filled_keys, window.filled_values
        if columns is None:
            layout = Layout([filled] * (self.batch * self.heads))
            flat = DenseSegment(
                keys.reshape(-1, keys.shape[-1]),
                values.reshape(-1, values.shape[-1]),
                layout,
                first=[first] * layout.streams,
            )
            flat.side = {name: array.reshape(-1) for name, array in window.side.items()}
            return flat
        real = columns[:, first : first + filled].to(keys.device)
        chosen = real[:, None].expand(-1, self.heads, -1)
        counts = real.sum(dim=1).tolist()
        layout = Layout(count for count in counts for _ in range(self.heads))
        flat = DenseSegment(keys[chosen], values[chosen], layout)
        flat.side = {name: array[chosen] for name, array in window.side.items()}
        flat._set_positions(chosen.nonzero()[:, 2] + first)
        return flat

    def seal(self, dense: DenseSegment | None, columns: Tensor | None) -> None:
        """Replace the dense sealed segment and empty the window; `dense` holds what of them is kept."""
        self.dense = dense if dense is not None and dense.layout.total else None
        self.window.clear(self.seen)
        self.sealed_tokens = [self.seen] * self.batch if columns is None else columns.sum(dim=1).tolist()

    def evict(self, kept: Sequence[Tensor], columns: Tensor | None, opened: DenseSegment | None = None) -> None:
        """Keep, of every stream's stored pairs in order, those that `kept[n]` (bool) marks; free the others.

        `opened` is what `open_segment` returns, where that is known.
        """
        opened = self.open_segment(columns) if opened is None else opened
        parts: list[Segment] = [*self.segments, opened]
        marked = torch.cat(list(kept)).to(self.window.keys.device)
        if self.segments:
            rows, _ = interleave([part.layout for part in parts])
            marked = torch.empty_like(marked).index_copy_(0, rows.to(marked.device), marked)
        *encoded, dense = marked.split([part.layout.total for part in parts])
        left = [survivors(segment, own) for segment, own in zip(self.segments, encoded, strict=True)]
        self.segments = [segment for segment in left if segment.layout.total]
        self.seal(survivors(opened, dense), columns)
        self.since_eviction = 0

    def settle(self, codec: Codec, columns: Tensor | None, wait: bool = False, call: LayerCall | None = None) -> None:
        """Encode full tiles of the oldest dense pairs; the newest `codec.residual` and first `codec.sinks` stay dense.

        With `wait`, only once the window holds a tile: ragged streams would otherwise take turns at every token.
        """
        if wait and self.window.length < codec.group:
            return
        held = 0 if self.dense is None else self.dense.layout.longest
        if held + self.window.length < codec.residual + codec.group:
            return
        opened = self.open_segment(columns)
        lengths = opened.layout.lengths
        sinks = [0] * len(lengths) if self.segments else [min(codec.sinks, length) for length in lengths]
        ends = [
            sink + max(0, (length - codec.residual - sink) // codec.group * codec.group)
            for sink, length in zip(sinks, lengths, strict=True)
        ]
        if ends == sinks:
            return
        first, old, rest = opened.cut(sinks, ends)
        self.seal(rest, columns)
        if first.layout.total:
            self.segments.append(first)
        segment = codec.encode(old, Sealing(self.heads, tuple(self.segments), call))
        segment.positions, segment.first = old.positions, old.first
        segment.side = {name: array for name, array in old.side.items() if name not in codec.reads_side}
        self.segments.append(segment)
        self._join_tail()

    def _join_tail(self) -> None:
        """Join the newest segments while they are of similar size, so that their number stays logarithmic."""
        while len(self.segments) > 1:
            older, newer = self.segments[-2:]
            if not older.joinable(newer) or older.layout.total > 2 * newer.layout.total:
                return
            self.segments[-2:] = [type(older).join([older, newer])]

    # -- batch operations ------------------------------------------------------------------------------------

    def select_rows(self, rows: Tensor) -> None:
        """Keep the given batch rows, in that order; repeats are allowed (beams, `num_return_sequences`)."""
        order = rows.tolist()
        streams = [row * self.heads + head for row in order for head in range(self.heads)]
        chosen = [segment.take(*segment.layout.take_streams(streams)) for segment in self.segments]
        self.segments = [segment for segment in chosen if segment.layout.total]
        if self.dense is not None:
            dense = self.dense.take(*self.dense.layout.take_streams(streams))
            self.dense = dense if dense.layout.total else None
        self.window.select_rows(rows)
        self.batch = len(order)
        self.targets = None if self.targets is None else [self.targets[row] for row in order]
        if self.sealed_tokens is not None:
            self.sealed_tokens = [self.sealed_tokens[row] for row in order]
        for observer in self.observers.values():
            observer.select_rows(rows)

    @property
    def open_tokens(self) -> int:
        """How many of the newest tokens can be taken back: those in the window, and those left dense behind it."""
        if self.dense is None or self.dense.side:
            return self.window.length
        tail = self.since_eviction - self.window.length
        for n in range(self.dense.layout.streams):
            newest = self.dense.columns()[self.dense.layout.rows(n)].flip(0)
            expected = torch.arange(self.window.first, self.window.first - len(newest), -1, device=newest.device) - 1
            tail = min(tail, int((newest == expected).long().cumprod(0).sum()))
        return self.window.length + max(0, tail)

    def crop(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens, of which nothing may have been evicted or encoded."""
        if tokens > self.window.length and tokens > self.open_tokens:
            raise ValueError(
                f"cannot remove {tokens} tokens: only the newest {self.open_tokens} are still open, older ones were "
                "evicted from or encoded; copy the cache (copy.deepcopy) before the tokens that you want to take back"
            )
        for observer in self.observers.values():
            observer.crop(tokens)
        self.take_back(tokens)

    def take_back(self, tokens: int) -> None:
        """Drop the pairs of the newest `tokens` tokens, at most `open_tokens`; what observers saw stays."""
        sealed = max(0, tokens - self.window.length)
        self.window.crop(tokens - sealed)
        self.seen -= tokens
        self.since_eviction = max(0, self.since_eviction - tokens)
        if sealed and self.dense is not None:
            held, _ = self.dense.cut([length - sealed for length in self.dense.layout.lengths])
            self.dense = held if held.layout.total else None
            self.window.clear(self.seen)
            self.sealed_tokens = [count - sealed for count in self.sealed_tokens or []]

    def forget(self, needed: Collection[str]) -> None:
        """Drop the observers that are not needed any more, and the per-pair arrays that they recorded."""
        for name in [name for name in self.observers if name not in needed]:
            for side in self.observers.pop(name).sides:
                self.window.side.pop(side, None)
                for segment in self.sealed:
                    segment.side.pop(side, None)

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device, in place."""
        for segment in self.sealed:
            segment.to(device)
        self.window.to(device)
        for observer in self.observers.values():
            observer.to(device)

    # -- accounting ------------------------------------------------------------------------------------------

    def stored(self) -> list[int]:
        """Pairs stored of every stream, window included."""
        counts = [self.window.length] * (self.batch * self.heads)
        for segment in self.sealed:
            counts = [count + length for count, length in zip(counts, segment.layout.lengths, strict=True)]
        return counts

    def tensors(self) -> dict[str, list[Tensor]]:
        """Every tensor that this layer holds, by component."""
        held: dict[str, list[Tensor]] = {"window": self.window.tensors()}
        extra: list[Tensor] = list(self.window.side.values())
        for observer in self.observers.values():
            extra += observer.tensors()
        if extra:
            held["scores"] = extra
        for segment in self.sealed:
            for name, tensors in segment.tensors().items():
                held.setdefault(name, []).extend(tensors)
        return held

    def __deepcopy__(self, memo: dict[int, Any]) -> KVStore:
        """Copy what changes in place; the content of sealed segments is immutable and stays shared."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.segments = [copy.copy(segment) for segment in self.segments]
        twin.dense = copy.copy(self.dense)
        for segment in twin.sealed:
            segment.side, segment.index = dict(segment.side), dict(segment.index)
        twin.window = copy.deepcopy(self.window, memo)
        twin.observers = copy.deepcopy(self.observers, memo)
        return twin


def survivors(part: SegmentT, marked: Tensor) -> SegmentT:
    """Return the segment made of the marked (bool [total]) pairs."""
    layout = Layout(part.layout.pad(marked, False).sum(dim=1).tolist())
    return part if layout.lengths == part.layout.lengths else part.take(marked.nonzero().flatten(), layout)
