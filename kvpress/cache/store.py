# SPDX-License-Identifier: Apache-2.0
"""All pairs of one attention layer: encoded segments, one dense sealed segment, and the open window.

Slots ascend through these three parts within every stream. This module does not depend on transformers; `kvpress.hf` connects
a store to a cache layer.

A copy (`copy.deepcopy`) shares with its original the tensors of sealed segments and of `Held` objects in the codec state,
which are never written to. The window, observers, per-pair arrays and all other state are copied. The dict that all layers of a
cache share is copied with the cache: angle tables are shared, the state that a selector keeps of a step is not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial, group_queries, merge
from kvpress.cache.codec import Codec, JointCodec, Sealing
from kvpress.cache.common import CommonSegment
from kvpress.cache.decode_plan import DecodePlan
from kvpress.cache.key_bias import offset_of, without
from kvpress.cache.layout import interleave
from kvpress.cache.rollback import Rollback
from kvpress.cache.savepoint import Savepoint
from kvpress.cache.segment import DenseSegment, Segment, survivors
from kvpress.cache.segment_attention import options_of
from kvpress.cache.storage import moved, tensors_in
from kvpress.cache.window import Cursor, RealTokens, Window

Reader = Callable[[Tensor], Sequence[Partial | kernels.Part]]
"""Selects pairs of the encoded segments for `queries [N, G * Q, D]`.

The result has the attention to them, and parts to attend to in the same call as to the other pairs.
"""
Opened = Callable[[Window, RealTokens | None], Partial]
"""Attends from the newest tokens to the selected pairs of the window."""


@dataclass
class SealedTiles:
    """Pairs of a layer that are encoded, between those that stay dense."""

    opened: list[DenseSegment]
    """All pairs that were not encoded before, oldest first."""
    sinks: DenseSegment
    """Pairs before the encoded ones."""
    pairs: DenseSegment
    """Pairs to encode."""
    tail: DenseSegment
    """Newer pairs."""


def settle_together(
    stores: Sequence[KVStore],
    codecs: Sequence[Codec],
    sealings: Sequence[Sealing],
    wait: bool = False,
    turn: bool = False,
) -> None:
    """Encode full tiles of one layer, or of all layers of a `JointCodec`; see `KVStore.settle`."""
    looked_for = [
        store._full_tiles(codec, sealing, wait, turn)
        for store, codec, sealing in zip(stores, codecs, sealings, strict=True)
    ]
    tiles = [layer_tiles for layer_tiles in looked_for if layer_tiles is not None]
    if len(tiles) < len(stores):
        return  # layers that store different tokens stay dense until all have a full tile
    encoders: list[Callable[[DenseSegment, Sealing], Segment]] = [codec.encode for codec in codecs]
    if len(stores) > 1:
        codec = codecs[0]
        assert isinstance(codec, JointCodec)  # noqa: S101 - for type checkers
        pairs = [layer_tiles.pairs for layer_tiles in tiles]
        with torch.no_grad(), torch.autocast(pairs[0].device.type, enabled=False):
            segments = codec.encode_together(pairs, sealings)
        encoders = [lambda *_, segment=segment: segment for segment in segments]
    for store, layer_tiles, codec, sealing, encode in zip(stores, tiles, codecs, sealings, encoders, strict=True):
        store._encode(layer_tiles, codec, sealing, turn, encode)


class KVStore(Rollback):
    """Pairs of `B` rows and `H` KV heads.

    `mask`, where a method takes it, is the boolean `[B, seen]` mask of real tokens, or None where nothing is padded. `Rollback`
    defines which of the newest tokens can be removed again.
    """

    fetched: int = 0
    """Bytes of pairs that selectors have read from host memory or files."""
    settle_lags: tuple[int, ...] = ()
    """Tokens by which `settled_at` is too late for each row, where caches of different turns were joined; () for zeros."""
    joined_parts: tuple[Segment, ...] = ()
    """Sealed pairs of joined rows that are not encoded, oldest first, until an eviction or encoding copies them to `dense`."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.batch, self.heads = keys.shape[:2]
        self.dtype = keys.dtype
        self.segments: list[Segment] = []
        self.dense = None
        self.window = Window.empty_like(keys, values)
        self.seen = 0
        """Tokens that the sequence has consumed, padding included."""
        self.since_eviction = [0] * self.batch
        """Tokens that each row has generated since its last eviction, counted up to token number `counted`."""
        self.counted = 0
        self.settled: list[int] = []
        """Values of `seen` at which `settle` looked for full tiles without waiting."""
        self.targets: list[int | None] = [None] * self.batch
        """Pairs per head that the last eviction left in each row; None before the first."""
        self.sealed_tokens: list[int] | None = None
        """Real tokens of each row that are no longer in the window."""
        self.observers: dict[Any, Any] = {}
        """Observers of the layer (`kvpress.observe.observer`)."""
        self.codec_state: dict[str, Any] = {}
        """State of codecs: tensors, containers of them, objects with `tensors`, `moved` and, if rows differ, `select_rows`."""
        self.index: dict[str, Any] = {}
        """Cache of data that selectors derive from encoded pairs; it stays valid only while pairs are appended."""
        self.fixed_at = 0
        self.journal: list[Savepoint] | None = None

    @property
    def device(self) -> torch.device:
        """Device of the window, on which attention runs."""
        return self.window.keys.device

    @property
    def settled_at(self) -> int | None:
        """Value of `seen` when `settle` last looked for full tiles without waiting; None before that.

        In rows that were joined to a batch later, that was `settle_lags` tokens earlier.
        """
        return self.settled[-1] if self.settled else None

    @settled_at.setter
    def settled_at(self, seen: int | None) -> None:
        self.settled = [] if seen is None else [seen]

    @property
    def dense(self) -> DenseSegment | None:
        """Dense sealed segment, unshared: pairs that rows share, or of joined rows, are copied at the first access."""
        parts = self.dense_parts()
        if len(parts) > 1:
            self.dense = Segment.join([part.own() for part in parts])
        elif parts and (unshared := parts[0].own()) is not vars(self)["dense"]:
            self.dense = unshared
        return vars(self)["dense"]  # type: ignore[no-any-return]

    @dense.setter
    def dense(self, dense: Segment | None) -> None:
        vars(self)["dense"] = dense  # under this name in files and savepoints
        vars(self).pop("joined_parts", None)

    def dense_parts(self) -> list[Segment]:
        """Return the segments of sealed pairs that are not encoded, oldest first, in which rows may share pairs."""
        dense: Segment | None = vars(self)["dense"]
        return [*self.joined_parts, *([] if dense is None else [dense])]

    @property
    def _dense(self) -> Segment | None:
        """Dense sealed segment, in which rows may share pairs."""
        return self.dense if self.joined_parts else vars(self)["dense"]

    @property
    def sealed(self) -> list[Segment]:
        """All sealed segments, oldest first."""
        return [*self.segments, *self.dense_parts()]

    @property
    def has_sealed(self) -> bool:
        """Whether any pair is sealed."""
        return bool(self.segments or self.joined_parts or vars(self)["dense"] is not None)

    def count_generated(self, tokens: int) -> None:
        """Count so many generated tokens since the last eviction from every row."""
        self.since_eviction, self.counted = [count + tokens for count in self.since_eviction], self.seen

    def restart_count(self, rows: Collection[int]) -> None:
        """Count generated tokens of some rows from here on: pairs were evicted from them."""
        counts = self.since_eviction
        self.since_eviction, self.counted = [0 if row in rows else n for row, n in enumerate(counts)], self.seen

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add new tokens `[B, H, n, D]` at the end."""
        if (keys.shape[0], keys.shape[1]) != (self.batch, self.heads) or keys.shape[3] != self.window.keys.shape[3]:
            shape = (self.batch, self.heads, "*", self.window.keys.shape[3])
            raise ValueError(
                f"this cache holds keys of shape {shape} (batch, kv heads, tokens, head dim) but the model brings "
                f"{tuple(keys.shape)}; use one cache per model and batch"
            )
        if keys.dtype != self.dtype:
            raise TypeError(f"this cache holds {self.dtype} keys but the model brings {keys.dtype}")
        self.window.append(keys, values)
        self.seen += keys.shape[2]

    def ready(self, mask: RealTokens | None, spare: int) -> Cursor | None:
        """Return the cursor at which a static step writes its token, after making room; None where only `append` works.

        `mask` covers the new token; a full window grows by `spare` tokens.
        """
        pads = self.window.pads(mask, self.window.length + 1)
        if pads is None or self.window.side or self._hides_sealed(mask):
            return None
        self.window.reserve(spare)
        return self.window.cursor_at(pads)

    def count_token(self) -> None:
        """Count the token of a static step, which does not update the counters on the host."""
        self.window.length += 1
        self.seen += 1

    def restart_at(self, seen: int) -> None:
        """Undo `count_token` after a static step that failed, when the store had seen `seen` tokens."""
        self.window.length -= self.seen - seen
        self.seen, self.window.cursor = seen, None

    # -- attention -------------------------------------------------------------------------------------------

    def attend(
        self,
        queries: Tensor,
        logits: Logits,
        mask: RealTokens | Tensor | None = None,
        sinks: Tensor | None = None,
        reader: Reader | None = None,
        opened: Opened | None = None,
        causal: bool = True,
    ) -> Partial:
        """Attend from the newest tokens' `queries [B, Hq, Q, D]` to all stored, visible pairs.

        Layers that pass the same `RealTokens` compute its counts once. `sinks [Hq]` are extra logits without a value. `reader`
        reads the segments, unless the mask hides tokens in them: then all visible pairs are read. `opened` reads the window,
        unless its pairs have log-weights: then all of it is read. Without `causal`, new tokens see later ones.
        Returns `(out [N, M, Dv], lse [N, M])` in float32.
        """
        length = queries.shape[2]
        parts: list[Partial] = []
        operator_parts: list[kernels.Part] = []  # read by one call of an operator
        causal_tokens = 0
        mask = RealTokens(mask) if isinstance(mask, Tensor) else mask
        hides = self._hides_sealed(mask)
        cursor = self.window.cursor
        is_plain = reader is None and opened is None and sinks is None and not hides
        if is_plain and cursor is not None and cursor.plan is not None:
            planned = cursor.plan.attend(self.sealed, queries, logits, self.window.pads(mask, self.window.length))
            if planned is not None:
                return planned
        rows = group_queries(queries, self.heads)
        chosen = reader(rows) if reader is not None and self.segments and not hides else None
        for read in chosen or ():
            if isinstance(read, kernels.Part):
                operator_parts.append(read)
            else:
                parts.append(read)
        for segment in self.sealed if chosen is None else self.dense_parts():
            hidden = self._hidden(segment, mask.real) if hides and mask is not None else None
            operands = segment.as_parts(rows, logits) if hidden is None else None
            if operands is None:
                parts.append(segment.attend(rows, logits, hidden))
            else:
                operator_parts += operands
        if opened is not None and self.window.log_weight is None:
            parts.append(opened(self.window, mask))
        elif self.window.length:
            new = length if causal else 1
            newest = self.window.as_part(rows, mask)
            if newest is None:
                parts.append(self.window.attend(rows, logits, new, mask))
            else:
                operator_parts.append(newest)
                causal_tokens = new if new > 1 else 0
        if sinks is not None:
            extra = sinks.float().view(1, self.heads, -1, 1).expand(self.batch, -1, -1, length)
            extra = extra.reshape(rows.shape[0], rows.shape[1])
            parts.append((extra.new_zeros(*rows.shape[:2], self.window.values.shape[-1]), extra))
        if not operator_parts:
            return merge(parts)
        result = kernels.decode_parts(rows, operator_parts, options_of(logits, causal_tokens), parts)
        cursor = self.window.cursor
        if is_plain and length == 1 and cursor is not None and operator_parts[-1] is cursor.part:
            call = kernels.packed_call(cursor.part)
            cursor.plan = None if call is None else DecodePlan(call, self.sealed, queries, logits, cursor.pads)
        return result

    def _hides_sealed(self, mask: RealTokens | None) -> bool:
        """Whether the mask hides tokens that were real when they were sealed."""
        if mask is None or self.sealed_tokens is None:
            return False
        return mask.counts(self.window.first) != self.sealed_tokens

    def _hidden(self, segment: Segment, mask: Tensor) -> Tensor:
        row = (segment.layout.stream_of_row // self.heads).to(mask.device)
        # The mask is on the device of the model's inputs, which may differ if layers are spread over several devices.
        return ~mask[row, segment.slots().to(mask.device).long()].to(self.device)

    # -- sealing ---------------------------------------------------------------------------------------------

    def open_segment(self, mask: Tensor | None) -> DenseSegment:
        """Return the dense sealed segment and the real tokens of the window as one segment; changes nothing."""
        newest = self.window.segment(mask)
        return newest if self.dense is None else DenseSegment.join([self.dense, newest])

    def seal(self, dense: DenseSegment | None, mask: Tensor | None) -> None:
        """Replace the dense sealed segment and empty the window; `dense` holds the pairs of both that are kept."""
        self.dense = dense if dense is not None and dense.layout.total else None
        self.window = self.window.emptied(self.seen)
        self.sealed_tokens = [self.seen] * self.batch if mask is None else mask.sum(dim=1).tolist()

    def close(self, mask: Tensor | None) -> None:
        """Seal all pairs of the window, so that copies share them; open tokens stay open."""
        self.seal(self.open_segment(mask), mask)

    def hold_in_common(self, copies: int, mask: Tensor | None) -> None:
        """Seal all pairs, and store them once for each `copies` consecutive rows, which hold the same pairs."""
        if self.batch % copies or self.window.side or any(part.side for part in self.sealed):
            return  # per-pair arrays will differ from row to row
        self.close(mask)
        self._choose_rows([row - row % copies for row in range(self.batch)])

    def evict(self, kept: Sequence[Tensor], mask: Tensor | None, opened: DenseSegment | None = None) -> None:
        """Keep the pairs of each stream n that `kept[n]`, bool, marks in order of rank; free the others.

        `opened` is the result of `open_segment` if the caller has it.
        """
        opened = self.open_segment(mask) if opened is None else opened
        parts: list[Segment] = [*self.segments, opened]
        marked = torch.cat(list(kept)).to(self.window.keys.device)
        if self.segments:
            rows, _ = interleave([part.layout for part in parts])
            marked = torch.empty_like(marked).index_copy_(0, rows.to(marked.device), marked)
        *encoded, dense = marked.split([part.layout.total for part in parts])
        kept_segments = [survivors(segment, marks) for segment, marks in zip(self.segments, encoded, strict=True)]
        self.segments = [segment for segment in kept_segments if segment.layout.total]
        self.index, self.fixed_at = {}, self.seen
        self.seal(survivors(opened, dense), mask)

    def replace_dense(
        self, keys: Tensor | None = None, values: Tensor | None = None, sides: dict[str, Tensor] | None = None
    ) -> None:
        """Replace keys, values or per-pair arrays of the dense sealed segment.

        All are flat, `[total, ...]`, in its order. Copies of the cache do not change. Call it right after `evict`, since
        `crop` cannot restore replaced pairs.

        Raises:
            ValueError: there is no dense segment, or a shape differs.
        """
        dense = self.dense
        if dense is None:
            raise ValueError("this layer holds no dense sealed pairs to replace")
        for name, array in ({"keys": keys, "values": values} | (sides or {})).items():
            shape = getattr(dense, name).shape if name in ("keys", "values") else dense.keys.shape[:1]
            if array is not None and array.shape != shape:
                raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(array.shape)}")
        twin = copy.deepcopy(dense)
        twin.keys = twin.keys if keys is None else keys.to(dense.keys)
        twin.values = twin.values if values is None else values.to(dense.values)
        twin.side |= {name: array.to(dense.device, torch.float32) for name, array in (sides or {}).items()}
        self.dense, self.window.cursor = twin, None  # a recorded step must not read the old tensors

    def weigh(self, weights: dict[int, Tensor]) -> None:
        """Set the log-weights of all sealed pairs of some streams: `weights[n]`, float32 or float16, in order of rank.

        Copies of the cache do not change. Call it right after `evict`, like `replace_dense`.

        Raises:
            ValueError: a stream has a different number of pairs, or a weight is not finite.
        """
        num_pairs = [0] * (self.batch * self.heads)  # a layer may keep nothing where layers compete
        dense = self._dense
        sealed = [*self.segments, *([] if dense is None else [dense])]
        for part in sealed:
            num_pairs = [count + length for count, length in zip(num_pairs, part.layout.lengths, strict=True)]
        for n, weight in weights.items():
            if weight.shape != (num_pairs[n],):
                raise ValueError(
                    f"log_weight of stream {n} must have shape ({num_pairs[n]},), got {tuple(weight.shape)}"
                )
        with torch.autocast(self.device.type, enabled=False):  # it refuses to join float16 where it casts to bfloat16
            is_finite = torch.cat(list(weights.values())).isfinite().all() if weights else True
        if not bool(is_finite):
            raise ValueError("log_weight must be finite")
        used, parts = [0] * len(num_pairs), []
        for part in (part.own() for part in sealed):
            old = (
                next(iter(weights.values())).new_zeros(part.layout.total)
                if part.log_weight is None
                else part.log_weight
            )
            flat = old.to(part.device, copy=True)
            for n, weight in weights.items():
                length = part.layout.lengths[n]
                flat[part.layout.rows(n)] = weight[used[n] : used[n] + length].to(flat)
                used[n] += length
            twin = copy.deepcopy(part)
            twin.log_weight = flat
            parts.append(twin)
        self.segments, self.dense = parts[: len(self.segments)], parts[-1] if dense is not None else None
        self.index, self.window.cursor = {}, None  # a recorded step must not read the old tensors

    def is_due(self, codec: Codec) -> bool:
        """Whether `settle` with `wait` looks for full tiles of any row now."""
        return any(self._due_rows(codec, wait=True))

    def settle(self, codec: Codec, sealing: Sealing, wait: bool = False, turn: bool = False) -> None:
        """Encode full tiles of the oldest dense pairs; the newest `codec.residual` and first `codec.sinks` stay dense.

        With `wait`, do so only every `codec.interval` tokens of a row, since in ragged streams some tile would otherwise fill
        at almost every token. `turn` marks the end of a prompt or turn with an eviction: a `whole` codec then also encodes
        partial tiles. The pairs of a row that are encoded, and when, depend on that row alone.
        """
        settle_together([self], [codec], [sealing], wait, turn)

    def _full_tiles(self, codec: Codec, sealing: Sealing, wait: bool, turn: bool) -> SealedTiles | None:
        """Return the pairs that `settle` encodes now, None for none; note that it has looked for them."""
        due_rows = self._due_rows(codec, wait)
        if not any(due_rows):
            return None
        if not wait or self.settled_at is None:
            self.settled.append(self.seen)
            vars(self).pop("settle_lags", None)
        new_lengths = [count for count in self.window.counts(sealing.mask) for _ in range(self.heads)]
        lengths = list(map(sum, zip(new_lengths, *(part.layout.lengths for part in self.dense_parts()), strict=True)))
        begun = [any(lengths) for lengths in zip(*(segment.layout.lengths for segment in self.segments), strict=True)]
        rows_begun = [any(begun[n : n + self.heads]) for n in range(0, len(begun), self.heads)] or [False]
        if max(lengths) < codec.residual + codec.tile_size(turn or not all(rows_begun)):
            return None
        sinks, ends = (
            [rank if due_rows[n // self.heads] else 0 for n, rank in enumerate(ranks)]
            for ranks in codec.tiles(lengths, self.heads, begun, turn, sealing)
        )
        if not any(ends):
            return None
        dense_parts: list[Any] = [part.own() for part in self.dense_parts()]
        opened = [*dense_parts, self.window.segment(sealing.mask)]
        return SealedTiles(opened, *DenseSegment.join_and_cut(opened, sinks, ends))

    def _encode(
        self,
        tiles: SealedTiles,
        codec: Codec,
        sealing: Sealing,
        turn: bool,
        encode: Callable[[DenseSegment, Sealing], Segment],
    ) -> None:
        """Replace full tiles by the segment that `encode` returns; where it fails, all pairs stay as they were."""
        old = tiles.pairs
        templates = tuple(segment.known() for segment in self.segments)
        # May raise, so it comes before any change.
        with torch.no_grad():
            offset = offset_of(old, codec.spread, replace(sealing, earlier=templates))
        self.save()
        before = list(self.segments)
        self.seal(tiles.tail, sealing.mask)
        try:
            if tiles.sinks.layout.total:
                self._prepend(tiles.sinks)
            earlier = tuple(part.known() for part in self.segments)
            codec_input = replace(sealing, earlier=earlier, state=self.codec_state, observers=self.observers)
            # Scales must not keep the graph of the pass alive, and products must not be rounded to 16 bits.
            with torch.no_grad(), torch.autocast(old.device.type, enabled=False):
                segment = encode(old if offset is None else without(offset, old), codec_input)
            _check_encoded(codec, segment, old)
            segment.key_offset = offset
            segment.describe(old, without=codec.reads_side)
            segment.put(codec.tier)
        except BaseException:  # such as no space in the tier: all pairs stay as they were
            self.segments = before
            self.seal(DenseSegment.join(tiles.opened), sealing.mask)
            raise
        self.segments.append(segment)
        if turn:
            self.segments = codec.gathered(self.segments)
        self._join_tail()
        for part in self.sealed:
            part.drop_stale_operands()

    def _due_rows(self, codec: Codec, wait: bool) -> list[bool]:
        """Return for every row whether `settle` looks for full tiles now."""
        if not wait or self.settled_at is None:
            return [True] * self.batch
        return [tokens % codec.interval(self.device) == 0 for tokens in self.tokens_since_settled()]

    def tokens_since_settled(self) -> list[int]:
        """Return the tokens of each row since `settle` last looked for full tiles without waiting, which it has done once."""
        assert self.settled_at is not None  # noqa: S101 - for type checkers
        since = self.seen - self.settled_at
        return [since + lag for lag in self.settle_lags or [0] * self.batch]

    def _prepend(self, first: DenseSegment) -> None:
        """Insert pairs of rows without sealed pairs before all segments."""
        if self.segments and self.segments[0].joinable(first):
            self.segments[0] = Segment.join([self.segments[0], first])
        else:
            self.segments.insert(0, first)

    def _join_tail(self) -> None:
        """Join the newest segments while they are of similar size, so that their number stays logarithmic."""
        total, begin = self.segments[-1].layout.total, len(self.segments) - 1
        while begin:
            older, newer = self.segments[begin - 1], self.segments[begin:]
            if older.layout.total > 2 * total or not all(older.joinable(segment) for segment in newer):
                break
            total, begin = total + older.layout.total, begin - 1
        if len(self.segments) - begin > 1:
            self.segments[begin:] = [Segment.join(self.segments[begin:])]

    # -- batch operations ------------------------------------------------------------------------------------

    def select_rows(self, rows: Tensor) -> None:
        """Keep some batch rows, in this order; repeated rows, as in beam search, share their sealed pairs."""
        order = rows.tolist()
        self._choose_rows(order)
        self.window.select_rows(rows)
        self.batch = len(order)
        if self.settle_lags:
            self.settle_lags = tuple(self.settle_lags[row] for row in order)
        if self.journal is not None:
            self.journal = []
        self.targets = [self.targets[row] for row in order]
        self.since_eviction = [self.since_eviction[row] for row in order]
        if self.sealed_tokens is not None:
            self.sealed_tokens = [self.sealed_tokens[row] for row in order]
        for state in (*self.observers.values(), *self.codec_state.values()):
            if hasattr(state, "select_rows"):
                state.select_rows(rows)

    def _choose_rows(self, order: Sequence[int]) -> None:
        """Replace the sealed pairs by those of the rows in `order`."""
        streams = [row * self.heads + head for row in order for head in range(self.heads)]
        chosen = [CommonSegment.of(segment, streams) for segment in self.segments]
        self.segments, self.index = [segment for segment in chosen if segment.layout.total], {}
        dense = [CommonSegment.of(part, streams) for part in self.dense_parts()]
        self.hold_dense([part for part in dense if part.layout.total])

    def hold_dense(self, parts: Sequence[Segment]) -> None:
        """Hold dense sealed pairs in several segments, oldest first, instead of those until now."""
        self.dense = parts[0] if len(parts) == 1 else None
        if len(parts) > 1:
            self.joined_parts = tuple(parts)

    # -- observers and devices ---------------------------------------------------------------------------------------------

    def forget(self, needed: Collection[Any]) -> None:
        """Remove observers that are not `needed`, and their per-pair arrays."""
        for name in [name for name in self.observers if name not in needed]:
            for side in self.observers.pop(name).sides:
                self.window.side.pop(side, None)
                for segment in self.sealed:
                    segment.side.pop(side, None)

    def to(self, device: torch.device | str, memo: dict[int, Any] | None = None) -> None:
        """Move all tensors to a device, in place; stores that pass the same `memo` go on sharing tensors."""
        memo = {} if memo is None else memo
        for segment in self.sealed:
            segment.to(device, memo)
        self.index = {}
        self.codec_state = moved(self.codec_state, device, memo)
        for point in self.journal or ():
            point.to(device, memo)
        self.window.to(device)
        for observer in self.observers.values():
            observer.to(device)

    # -- accounting ------------------------------------------------------------------------------------------

    def stored(self) -> list[int]:
        """Return the number of stored pairs of every stream, window included."""
        counts = [self.window.length] * (self.batch * self.heads)
        for segment in self.sealed:
            counts = [count + length for count, length in zip(counts, segment.layout.lengths, strict=True)]
        return counts

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return all tensors of this layer, by component."""
        by_component: dict[str, list[Tensor]] = {
            "window": self.window.tensors(),
            "scores": tensors_in([self.window.side, self.observers]),
            "codec state": tensors_in(self.codec_state),
            "indexes": tensors_in(self.index),
        }
        by_component = {name: tensors for name, tensors in by_component.items() if tensors}
        for segment in self.sealed:
            for name, tensors in segment.tensors().items():
                by_component.setdefault(name, []).extend(tensors)
        if self.journal:
            by_component["rollback"] = [tensor for point in self.journal for tensor in point.tensors()]
        return by_component

    def written(self) -> dict[str, Any]:
        """Return the state for a file: everything except savepoints."""
        dense = self._dense
        return {name: value for name, value in vars(self).items() if name != "joined_parts"} | {
            "dense": dense,
            "journal": None,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> KVStore:
        """Copy mutable state; copies of sealed segments share their tensors."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        for name in ("segments", "dense", "window", "observers", "codec_state", "settled", "journal"):
            vars(twin)[name] = copy.deepcopy(vars(self)[name], memo)
        if self.joined_parts:
            twin.joined_parts = copy.deepcopy(self.joined_parts, memo)
        twin.index = dict(self.index)
        return twin


def _check_encoded(codec: Codec, segment: Any, pairs: DenseSegment) -> None:
    """Refuse an encoded segment that does not hold the pairs that a codec was given.

    Raises:
        TypeError: it is no segment.
        ValueError: it has another layout.
    """
    name = f"{type(codec).__name__}.encode"
    if not isinstance(segment, Segment):
        raise TypeError(f"{name} must return a Segment, got {type(segment).__name__}")
    if segment.layout.lengths != pairs.layout.lengths:
        raise ValueError(f"{name} must return a segment with the layout of the pairs that it got")
