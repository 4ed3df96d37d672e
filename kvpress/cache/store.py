# SPDX-License-Identifier: Apache-2.0
"""All pairs of one attention layer: encoded segments, one dense sealed segment, and the open window.

Slots ascend through these three parts within every stream. Nothing here knows transformers; `kvpress.hf` puts a store behind
a cache layer.

What a copy (`copy.deepcopy`) shares with its original: the tensors of sealed segments and of `Held` objects in the codec
state, which are never written to. It has a window, observers, per-pair arrays and everything else of its own. The dict that all
layers of a cache have in common is copied with the cache: angle tables are shared, what a selector remembers of a step is not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial, group_queries, merge
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.common import CommonSegment
from kvpress.cache.key_bias import offset_of, without
from kvpress.cache.layout import interleave
from kvpress.cache.rollback import Rollback
from kvpress.cache.savepoint import Savepoint
from kvpress.cache.segment import DenseSegment, Segment, survivors
from kvpress.cache.storage import moved, tensors_in
from kvpress.cache.window import Cursor, RealTokens, Window

Reader = Callable[[Tensor], list[Partial]]
"""Attends from `queries [N, G * Q, D]` to some of the pairs of each encoded segment, each token to its own."""
Opened = Callable[[Window, RealTokens | None], Partial]
"""Attends from the newest tokens to what is chosen of the window's."""


class KVStore(Rollback):
    """Pairs of `B` rows and `H` kv heads.

    `seen` counts the tokens that the sequence has consumed, pads included; `mask`, where a method takes it, is the
    boolean `[B, seen]` mask of real tokens, or None where nothing is padded. `since_eviction` counts the tokens generated
    since the last eviction that comes after so many of them, up to the `counted`-th token; `settled` are the tokens seen
    when `settle` looked for full tiles without waiting;
    `targets` are the pairs per head that each row was last cut down to, `sealed_tokens` the real tokens of each row that
    the window no longer holds. `codec_state` is what codecs keep of this layer: tensors, containers of them, and objects with
    `tensors`, `moved` and, where they differ from row to row, `select_rows`. `index` caches what selectors derived from all
    encoded pairs; it is forgotten when these change in any other way than by further ones. `observers` watch the layer, as
    `kvpress.observe.observer` says.

    `fetched` counts the bytes of pairs that selectors read of segments which lie in host memory or in files.

    `Rollback` says which of the newest tokens can be taken back.
    """

    fetched: int = 0

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.batch, self.heads = keys.shape[:2]
        self.dtype = keys.dtype
        self.segments: list[Segment] = []
        self.dense = None
        self.window = Window.empty_like(keys, values)
        self.seen = 0
        self.since_eviction = self.counted = 0
        self.settled: list[int] = []
        self.targets: list[int] | None = None
        self.sealed_tokens: list[int] | None = None
        self.observers: dict[Any, Any] = {}
        self.codec_state: dict[str, Any] = {}
        self.index: dict[str, Any] = {}
        self.fixed_at = 0
        self.journal: list[Savepoint] | None = None

    @property
    def device(self) -> torch.device:
        """Where new pairs come, and are attended to."""
        return self.window.keys.device

    @property
    def settled_at(self) -> int | None:
        """Tokens seen when `settle` last looked for full tiles without waiting, None where it never did."""
        return self.settled[-1] if self.settled else None

    @settled_at.setter
    def settled_at(self, seen: int | None) -> None:
        self.settled = [] if seen is None else [seen]

    @property
    def dense(self) -> DenseSegment | None:
        """The dense sealed segment, which no rows have in common: pairs that they have are copied when it is asked for."""
        held = self._dense
        own = None if held is None else held.own()
        if own is not held:
            self.dense = own
        return own  # type: ignore[return-value]

    @dense.setter
    def dense(self, dense: Segment | None) -> None:
        vars(self)["dense"] = dense  # under this name in files and savepoints

    @property
    def _dense(self) -> Segment | None:
        """The dense sealed segment as it is held."""
        return vars(self)["dense"]

    @property
    def sealed(self) -> list[Segment]:
        """All sealed parts, oldest first."""
        return self.segments if self._dense is None else [*self.segments, self._dense]

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

    def ready(self, mask: RealTokens | None, spare: int) -> Cursor | None:
        """Return where a static step writes its token, after making room; None where only `append` can add it.

        `mask` covers the new token; a full window grows by `spare`.
        """
        pads = self.window.pads(mask, self.window.length + 1)
        if pads is None or self.window.side or self._hides_sealed(mask):
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
        mask: RealTokens | Tensor | None = None,
        sinks: Tensor | None = None,
        reader: Reader | None = None,
        opened: Opened | None = None,
        causal: bool = True,
    ) -> Partial:
        """Attend from the newest tokens' `queries [B, Hq, Q, D]` to everything stored and visible.

        Layers that share `mask` find out once what follows from it. `sinks [Hq]` are extra logits without a value. A
        `reader` reads the segments, unless the mask hides tokens in them: then all visible pairs are read. `opened` reads the
        window, unless its pairs have weights of their own: then all of it is read. Without `causal`, new tokens see later ones.
        Returns `(out [N, M, Dv], lse [N, M])` in float32.
        """
        length = queries.shape[2]
        rows = group_queries(queries, self.heads)
        parts: list[Partial] = []
        together: list[kernels.Part] = []  # what one call of an operator reads
        options = kernels.Options(logits.scale, logits.softcap)
        mask = RealTokens(mask) if isinstance(mask, Tensor) else mask
        hides = self._hides_sealed(mask)
        whole = self.sealed
        if reader is not None and self.segments and not hides:
            parts += reader(rows)
            whole = self.sealed[len(self.segments) :]
        for segment in whole:
            hidden = self._hidden(segment, mask.real) if hides and mask is not None else None
            asked = segment.as_parts(rows, logits) if hidden is None else None
            if asked is None:
                parts.append(segment.attend(rows, logits, hidden))
            else:
                together += asked
        if opened is not None and self.window.log_weight is None:
            parts.append(opened(self.window, mask))
        elif self.window.length:
            new = length if causal else 1
            newest = self.window.as_part(rows, mask)
            if newest is None:
                parts.append(self.window.attend(rows, logits, new, mask))
            else:
                together.append(newest)
                options = replace(options, causal=new if new > 1 else 0)
        if sinks is not None:
            extra = sinks.float().view(1, self.heads, -1, 1).expand(self.batch, -1, -1, length)
            extra = extra.reshape(rows.shape[0], rows.shape[1])
            parts.append((extra.new_zeros(*rows.shape[:2], self.window.values.shape[-1]), extra))
        return kernels.decode_parts(rows, together, options, parts) if together else merge(parts)

    def _hides_sealed(self, mask: RealTokens | None) -> bool:
        """Whether the mask hides tokens that were real when they were sealed."""
        if mask is None or self.sealed_tokens is None:
            return False
        return mask.counts(self.window.first) != self.sealed_tokens

    def _hidden(self, segment: Segment, mask: Tensor) -> Tensor:
        row = (segment.layout.stream_of_row // self.heads).to(mask.device)
        # The mask may lie where the model's inputs do, which is another device where layers are spread over several.
        return ~mask[row, segment.slots().to(mask.device).long()].to(self.device)

    # -- sealing ---------------------------------------------------------------------------------------------

    def open_segment(self, mask: Tensor | None) -> DenseSegment:
        """Return the dense sealed segment and the real tokens of the window as one segment; changes nothing."""
        fresh = self.window.segment(mask)
        return fresh if self.dense is None else DenseSegment.join([self.dense, fresh])

    def seal(self, dense: DenseSegment | None, mask: Tensor | None) -> None:
        """Replace the dense sealed segment and empty the window; `dense` holds what of them is kept."""
        self.dense = dense if dense is not None and dense.layout.total else None
        self.window = self.window.emptied(self.seen)
        self.sealed_tokens = [self.seen] * self.batch if mask is None else mask.sum(dim=1).tolist()

    def close(self, mask: Tensor | None) -> None:
        """Seal the window as it is, so that copies share it; tokens that were open still are."""
        self.seal(self.open_segment(mask), mask)

    def hold_in_common(self, copies: int, mask: Tensor | None) -> None:
        """Seal everything, and hold once what so many rows in a row have in common: they hold the same pairs."""
        if self.batch % copies or self.window.side or any(part.side for part in self.sealed):
            return  # observers go on to write down what each row makes of its pairs
        self.close(mask)
        self._choose_rows([row - row % copies for row in range(self.batch)])

    def evict(self, kept: Sequence[Tensor], mask: Tensor | None, opened: DenseSegment | None = None) -> None:
        """Keep, of every stream's stored pairs in order, those that `kept[n]` (bool) marks; free the others.

        `opened` is what `open_segment` returns, where that is known.
        """
        opened = self.open_segment(mask) if opened is None else opened
        parts: list[Segment] = [*self.segments, opened]
        marked = torch.cat(list(kept)).to(self.window.keys.device)
        if self.segments:
            rows, _ = interleave([part.layout for part in parts])
            marked = torch.empty_like(marked).index_copy_(0, rows.to(marked.device), marked)
        *encoded, dense = marked.split([part.layout.total for part in parts])
        left = [survivors(segment, own) for segment, own in zip(self.segments, encoded, strict=True)]
        self.segments = [segment for segment in left if segment.layout.total]
        self.index, self.fixed_at = {}, self.seen
        self.seal(survivors(opened, dense), mask)

    def replace_dense(
        self, keys: Tensor | None = None, values: Tensor | None = None, sides: dict[str, Tensor] | None = None
    ) -> None:
        """Put other keys, values or per-pair arrays in the place of those of the dense sealed segment.

        All are flat, `[total, ...]`, in its order. Copies of the cache keep theirs. Call it right after `evict`: `crop` cannot
        bring back what was replaced.

        Raises:
            ValueError: there is no dense segment, or a shape is another.
        """
        dense = self.dense
        if dense is None:
            raise ValueError("this layer holds no dense sealed pairs that could be replaced")
        for name, array in ({"keys": keys, "values": values} | (sides or {})).items():
            shape = getattr(dense, name).shape if name in ("keys", "values") else dense.keys.shape[:1]
            if array is not None and array.shape != shape:
                raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(array.shape)}")
        twin = copy.deepcopy(dense)
        twin.keys = twin.keys if keys is None else keys.to(dense.keys)
        twin.values = twin.values if values is None else values.to(dense.values)
        twin.side |= {name: array.to(dense.device, torch.float32) for name, array in (sides or {}).items()}
        self.dense, self.window.cursor = twin, None  # a recorded step must not read what was there

    def weigh(self, weights: dict[int, Tensor]) -> None:
        """Give all sealed pairs of some streams other logit weights: `weights[n]`, float32 or float16, in their order.

        Copies of the cache keep theirs. Call it right after `evict`, as `replace_dense`.

        Raises:
            ValueError: a stream holds another number of pairs, or a weight is not finite.
        """
        held = [0] * (self.batch * self.heads)  # a layer may keep nothing where layers compete
        for part in self.sealed:
            held = [count + length for count, length in zip(held, part.layout.lengths, strict=True)]
        for n, weight in weights.items():
            if weight.shape != (held[n],):
                raise ValueError(f"log_weight of stream {n} must have shape ({held[n]},), got {tuple(weight.shape)}")
            if not bool(weight.isfinite().all()):
                raise ValueError("log_weight must be finite")
        used, parts = [0] * len(held), []
        for part in (part.own() for part in self.sealed):
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
        self.segments, self.dense = parts[: len(self.segments)], parts[-1] if self._dense is not None else None
        self.index, self.window.cursor = {}, None  # a recorded step must not read what was there

    def settle(self, codec: Codec, sealing: Sealing, wait: bool = False, turn: bool = False) -> None:
        """Encode full tiles of the oldest dense pairs; the newest `codec.residual` and first `codec.sinks` stay dense.

        With `wait`, only every `codec.interval` tokens: ragged streams would otherwise take turns at every token, and at such
        times all rows are looked at. `turn` marks the end of a prompt or turn that was evicted from: a `whole` codec then
        encodes pairs that fill no tile too. What is encoded of a row, and when, depends on its own pairs alone.
        """
        if wait and self.settled_at is not None and (self.seen - self.settled_at) % codec.interval(self.device):
            return
        if not wait or self.settled_at is None:
            self.settled.append(self.seen)
        longest = self.window.length + (0 if self._dense is None else self._dense.layout.longest)
        begun = [any(lengths) for lengths in zip(*(segment.layout.lengths for segment in self.segments), strict=True)]
        rows_begun = [any(begun[n : n + self.heads]) for n in range(0, len(begun), self.heads)] or [False]
        if longest < codec.residual + codec.tile_size(turn or not all(rows_begun)):
            return
        opened = self.open_segment(sealing.mask)
        sinks, ends = codec.tiles(opened.layout.lengths, self.heads, begun, turn)
        if not any(ends):
            return
        first, old, rest = opened.cut(sinks, ends)
        known = tuple(segment.known() for segment in self.segments)
        offset = offset_of(
            old, codec.spread, replace(sealing, earlier=known)
        )  # which may refuse, before anything changes
        self.save()
        before = list(self.segments)
        self.seal(rest, sealing.mask)
        try:
            if first.layout.total:
                self._prepend(first)
            earlier = tuple(part.known() for part in self.segments)
            own = replace(sealing, earlier=earlier, state=self.codec_state, observers=self.observers)
            segment = codec.encode(old if offset is None else without(offset, old), own)
            segment.key_offset = offset
            segment.describe(old, without=codec.reads_side)
            segment.put(codec.tier)
        except OSError:  # no room where pairs are kept: all of them stay in memory
            self.segments = before
            self.seal(opened, sealing.mask)
            raise
        self.segments.append(segment)
        if turn:
            self.segments = codec.gathered(self.segments)
        self._join_tail()

    def _prepend(self, first: DenseSegment) -> None:
        """Put pairs of rows that hold no sealed ones yet before all segments."""
        if self.segments and self.segments[0].joinable(first):
            self.segments[0] = Segment.join([self.segments[0], first])
        else:
            self.segments.insert(0, first)

    def _join_tail(self) -> None:
        """Join the newest segments while they are of similar size, so that their number stays logarithmic."""
        while len(self.segments) > 1:
            older, newer = self.segments[-2:]
            if not older.joinable(newer) or older.layout.total > 2 * newer.layout.total:
                return
            self.segments[-2:] = [Segment.join([older, newer])]

    # -- batch operations ------------------------------------------------------------------------------------

    def select_rows(self, rows: Tensor) -> None:
        """Keep the given batch rows, in that order; repeats, as of beams, have their sealed pairs in common."""
        order = rows.tolist()
        self._choose_rows(order)
        self.window.select_rows(rows)
        self.batch = len(order)
        if self.journal is not None:
            self.journal = []
        self.targets = None if self.targets is None else [self.targets[row] for row in order]
        if self.sealed_tokens is not None:
            self.sealed_tokens = [self.sealed_tokens[row] for row in order]
        for held in (*self.observers.values(), *self.codec_state.values()):
            if hasattr(held, "select_rows"):
                held.select_rows(rows)

    def _choose_rows(self, order: Sequence[int]) -> None:
        """Make the sealed pairs of the rows those of the given ones."""
        streams = [row * self.heads + head for row in order for head in range(self.heads)]
        chosen = [CommonSegment.of(segment, streams) for segment in self.segments]
        self.segments, self.index = [segment for segment in chosen if segment.layout.total], {}
        if self._dense is not None:
            dense = CommonSegment.of(self._dense, streams)
            self.dense = dense if dense.layout.total else None

    # -- observers and devices ---------------------------------------------------------------------------------------------

    def forget(self, needed: Collection[Any]) -> None:
        """Drop the observers that are not needed any more, and the per-pair arrays that they recorded."""
        for name in [name for name in self.observers if name not in needed]:
            for side in self.observers.pop(name).sides:
                self.window.side.pop(side, None)
                for segment in self.sealed:
                    segment.side.pop(side, None)

    def to(self, device: torch.device | str, memo: dict[int, Any] | None = None) -> None:
        """Move everything to a device, in place; stores that are given the same `memo` share there what they share here."""
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
        """Pairs stored of every stream, window included."""
        counts = [self.window.length] * (self.batch * self.heads)
        for segment in self.sealed:
            counts = [count + length for count, length in zip(counts, segment.layout.lengths, strict=True)]
        return counts

    def tensors(self) -> dict[str, list[Tensor]]:
        """Every tensor that this layer holds, by component."""
        held: dict[str, list[Tensor]] = {
            "window": self.window.tensors(),
            "scores": tensors_in([self.window.side, self.observers]),
            "codec state": tensors_in(self.codec_state),
            "indexes": tensors_in(self.index),
        }
        held = {name: tensors for name, tensors in held.items() if tensors}
        for segment in self.sealed:
            for name, tensors in segment.tensors().items():
                held.setdefault(name, []).extend(tensors)
        if self.journal:
            held["rollback"] = [tensor for point in self.journal for tensor in point.tensors()]
        return held

    def written(self) -> dict[str, Any]:
        """What a file holds of it: everything but what is kept to take tokens back."""
        return {**vars(self), "journal": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> KVStore:
        """Copy what changes; sealed segments copy themselves without their tensors."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        for name in ("segments", "dense", "window", "observers", "codec_state", "settled", "journal"):
            vars(twin)[name] = copy.deepcopy(vars(self)[name], memo)
        twin.index = dict(self.index)
        return twin
