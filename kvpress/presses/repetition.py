# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs while a model repeats its prompt, and the scorers that read them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import group_queries
from kvpress.cache.segment_attention import options_of
from kvpress.cache.streams import StoredPairs, StreamPairs, ranges, split_parts, spread_sinks
from kvpress.core.scoring import ByScore, Scorer
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted
from kvpress.observe.passes import Pass, ReadRow
from kvpress.observe.view import View
from kvpress.presses.criticalkv import output_weight

SMALLEST = 1e-30
"""Smallest recorded score; 0 marks a pair without one."""


class Worth(Observer):
    """Scores of stored pairs from the repetition of a prompt, `values[n] [pairs]` for stream n."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def observe(self, call: LayerCall) -> None:
        """Record nothing: `set_worth` sets `values` after the prefill."""

    def tensors(self) -> list[Tensor]:
        return self.values

    def select_rows(self, rows: Tensor) -> None:
        """Drop all values: the eviction has read them already, and the next prompt computes new ones."""
        self.values = []

    def to(self, device: torch.device | str) -> None:
        self.values = [value.to(device) for value in self.values]


class LastingWorth(Observer):
    """Scores of pairs from the repetition of their prompt, in a per-pair array, for the evictions of all later turns."""

    lasts = True
    sides = ("worth",)

    def observe(self, call: LayerCall) -> None:
        """Record nothing: `set_worth` writes the array after the prefill."""


def set_worth(call: LayerCall, mask: Tensor | None, values: list[Tensor]) -> None:
    """Store the scores `values[n] [pairs]` of all pairs of stream n in the observers of a layer; `mask` as in `StoredPairs`."""
    store, window = call.store, call.store.window
    if Wanted(Worth) in store.observers:
        store.observers[Wanted(Worth)].values = values
    if Wanted(LastingWorth) in store.observers:
        recorded = torch.zeros(store.batch * store.heads, window.length, device=window.keys.device)
        for n, slots in enumerate(StoredPairs(store, mask).slots):
            columns = slots[slots >= window.first] - window.first
            recorded[n, columns.to(recorded.device)] = values[n][len(slots) - len(columns) :].clamp_min(SMALLEST)
        window.side[LastingWorth.sides[0]] = recorded.view(store.batch, store.heads, -1)


@dataclass(frozen=True)
class Repetition(ByScore):
    """Scorer that reads the scores stored in `Worth`; pairs that survived a turn stay in later turns."""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(Worth),)

    def for_fixed_size(self) -> Scorer:
        return LastingRepetition()

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        values = view.observer(*self.wants).values
        return torch.stack([values[n] for n in view.streams]).view(view.shape)


@dataclass(frozen=True)
class LastingRepetition(ByScore):
    """Scorer that reads `LastingWorth`, so that pairs of all turns compete."""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(LastingWorth),)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        return view.recorded(self.wants[0], fill=True)


@dataclass(frozen=True)
class _Gathered:
    """Pairs that the chunks of a pass are scored by, with the place of their scores; streams are rows, heads, parts."""

    pairs: StreamPairs
    """Sinks, pairs of the chunk and those of the pass, of every stream."""
    columns: Tensor
    """Flat columns of `pairs` that get scores."""
    ranks: Tensor
    """Where in the flat scores of the layer these scores belong."""


class RepetitionScores:
    """Scores of all stored pairs; infinite for pairs that were not read again."""

    def __init__(self, prefill: Pass, rows: list[ReadRow], n_sink: int) -> None:
        self.rows, self.n_sink = rows, n_sink
        self.lengths: dict[int, list[int]] = {}
        """Pairs of every stream, by layer."""
        self.flat: dict[int, Tensor] = {}
        """Scores of the pairs of all streams, by layer."""
        self.outputs: dict[int, Tensor] = {}
        """Gram matrices of output projections by layer, kept until the prompt is read."""
        self.gathered: dict[int, _Gathered] = {}
        """Pairs that layers have attended to, until they are scored."""
        for call in prefill.calls:
            index, stored = call.layer.index, StoredPairs(call.store, prefill.mask)
            self.lengths[index] = [len(slots) for slots in stored.slots]
            self.flat[index] = torch.full((sum(self.lengths[index]),), torch.inf, device=call.queries.device)

    def of_layer(self, index: int) -> list[Tensor]:
        """Return the scores `[n] [pairs]` of the streams of a layer."""
        return list(self.flat[index].split(self.lengths[index]))

    def set_chunks(self, chunks: list[slice], lengths: Tensor) -> None:
        """Set the tokens of each row that the parts of the next pass repeat, and the tokens `[B, parts]` of its texts."""
        self.spans = [[row.slots[chunk] for chunk in chunks] for row in self.rows]
        self.text_lengths = lengths
        self.dense: dict[tuple[Any, ...], _Columns] = {}

    def nearby(self, call: LayerCall) -> StreamPairs:
        """Return the sinks, the pairs of the chunk and those of the pass, which the layer attends to and is scored by."""
        gathered = self.gathered[call.layer.index] = self._gather(call)
        return gathered.pairs

    def take_in(self, call: LayerCall, divisor: Tensor | None = None) -> None:
        """Store the scores that one layer's queries give to the pairs of the chunks.

        With a `divisor [B, Q]` of each query, attention weights are divided by it, and multiplied by the norms of the values
        after the output projection.
        """
        gathered = self.gathered.pop(call.layer.index, None)
        lse = None if gathered is None else call.lse
        gathered = self._gather(call) if gathered is None else gathered
        weights = self._weights(call, gathered.pairs, divisor, lse)
        self.flat[call.layer.index][gathered.ranks] = weights[gathered.columns]

    def _gather(self, call: LayerCall) -> _Gathered:
        store, parts = call.store, self.text_lengths.shape[1]
        assert call.written is not None  # noqa: S101 - for type checkers
        own = [tensor.detach().unflatten(2, (parts, -1)) for tensor in call.written]
        if store.sealed:
            return self._gather_by_stream(call, StoredPairs(store, call.tokens.mask), own)
        key = store.window.first, store.heads, store.seen, own[0].device, own[0].shape[3]
        if key not in self.dense:
            self.dense[key] = self._columns(call, StoredPairs(store, call.tokens.mask), own[0].shape[3])
        columns = self.dense[key]
        rows, heads = (torch.arange(count, device=own[0].device) for count in (store.batch, store.heads))
        where = rows[:, None, None, None], heads[:, None, None], columns.stored[:, None]
        keys, values = (
            torch.cat([side[where], new], dim=3).flatten(0, 2)
            for side, new in zip((store.window.keys, store.window.values), own, strict=True)
        )
        return _Gathered(StreamPairs(keys, values, columns.where), columns.scored, columns.ranks)

    def _columns(self, call: LayerCall, stored: StoredPairs, new: int) -> _Columns:
        """Return the pairs that this pass gathers from layers without sealed pairs; `new` is the length of a part."""
        store, device, parts = call.store, call.queries.device, self.text_lengths.shape[1]
        spans = [self._spans(stored.slots[row * store.heads], row) for row in range(store.batch)]
        width = max(sinks + stop - start for row in spans for sinks, start, stop in row)
        columns = torch.zeros(store.batch, parts, width, dtype=torch.int64)
        for row, of_row in enumerate(spans):
            slots = stored.slots[row * store.heads] - store.window.first
            for part, (sinks, start, stop) in enumerate(of_row):
                columns[row, part, width - (sinks + stop - start) :] = torch.cat([slots[:sinks], slots[start:stop]])
        streams = [span for row in spans for _ in range(store.heads) for span in row]
        scored, ranks = self._places(call, streams, width + new, new)
        counts = [sinks + stop - start + new for sinks, start, stop in streams]
        return _Columns(columns.to(device), ranges(counts, width + new, device), scored, ranks)

    def _gather_by_stream(self, call: LayerCall, stored: StoredPairs, own: list[Tensor]) -> _Gathered:
        """Return the pairs of a layer some of which are sealed, so that streams store different pairs."""
        streams, spans = [], []
        keys, values = (side.flatten(0, 1) for side in own)
        for n, slots in enumerate(stored.slots):
            for part, span in enumerate(self._spans(slots, n // call.store.heads)):
                sinks, start, stop = span
                read = [*stored.read(n, 0, sinks), *stored.read(n, start, stop)]
                streams.append([*read, (keys[n, part], values[n, part])])
                spans.append(span)
        pairs = StreamPairs.of(streams)
        return _Gathered(pairs, *self._places(call, spans, pairs.keys.shape[1], keys.shape[2]))

    def _places(
        self, call: LayerCall, spans: list[tuple[int, int, int]], width: int, new: int
    ) -> tuple[Tensor, Tensor]:
        """Return the flat columns of pairs of the chunks, and the ranks of their scores in those of the layer."""
        parts, lengths = self.text_lengths.shape[1], self.lengths[call.layer.index]
        first = torch.tensor([0, *lengths]).cumsum(0).tolist()
        columns, ranks = [], []
        for n, (_, start, stop) in enumerate(spans):
            end = (n + 1) * width - new
            columns.append(torch.arange(end - (stop - start), end))
            ranks.append(torch.arange(start, stop) + first[n // parts])
        return torch.cat(columns).to(call.queries.device), torch.cat(ranks).to(call.queries.device)

    def _spans(self, slots: Tensor, row: int) -> list[tuple[int, int, int]]:
        """Return, for each part, the ranks where a stream's sinks end, and where its pairs of the chunk begin and end."""
        return [self._span(slots, row, span) for span in self.spans[row]]

    def _span(self, slots: Tensor, row: int, span: Tensor) -> tuple[int, int, int]:
        sinks = self.rows[row].real[: self.n_sink]
        if not len(span):
            return 0, 0, 0
        edges = torch.stack([sinks[-1] + 1 if len(sinks) else span[0] * 0, span[0], span[-1] + 1])
        last, start, stop = torch.searchsorted(slots, edges).tolist()
        return last, max(last, start), max(last, stop)

    def _weights(self, call: LayerCall, pairs: StreamPairs, divisor: Tensor | None, lse: Tensor | None) -> Tensor:
        """Return the scores of flat pairs; `lse [N, G * Q]` is that of the queries, None where it is not known."""
        store, parts = call.store, self.text_lengths.shape[1]
        queries = group_queries(call.queries, store.heads)
        streams, groups, new = len(queries), queries.shape[1] // call.queries.shape[2], call.queries.shape[2] // parts
        real = torch.arange(new) < self.text_lengths[:, :, None]

        def spread(per_token: Tensor) -> Tensor:
            """Repeat `[B, parts * new]` for all query heads, as `[N * parts, G * new]`."""
            per_head = per_token[:, None].expand(-1, store.heads * groups, -1).reshape(streams, -1)
            return split_parts(per_head, parts, new)

        queries = split_parts(queries, parts, new)
        lse = None if lse is None else split_parts(lse, parts, new)
        rows, where = pairs.rows(), pairs.where
        options = options_of(call.logits, new)
        sinks = None if call.sinks is None else split_parts(spread_sinks(call.sinks, call.queries, streams), parts, new)
        weight = spread(real.flatten(1).to(queries.device, torch.float32))
        if lse is None:  # the operator computes it
            options = replace(options, sinks=sinks)
        if divisor is None:
            return kernels.column_max(queries, rows, where, options, lse=lse, query_weight=weight)
        weight = weight / spread(divisor).clamp_min(SMALLEST)
        values, gram = (
            pairs.values.unflatten(0, (-1, store.heads, parts)).float(),
            self._gram(call, pairs.values, groups),
        )
        largest = torch.zeros(pairs.keys.shape[:2].numel(), device=queries.device)
        for g in range(groups):
            columns = slice(g * new, (g + 1) * new)
            received = kernels.column_max(
                queries[:, columns],
                rows,
                where,
                options if options.sinks is None else replace(options, sinks=options.sinks[:, columns]),
                lse=None if lse is None else lse[:, columns],
                query_weight=weight[:, columns],
            )
            norms = output_norms_by_head(gram[:, g], values)
            largest = torch.maximum(largest, received * norms.flatten())
        return largest

    def _gram(self, call: LayerCall, values: Tensor, groups: int) -> Tensor:
        """Return the Gram matrices `[H, G, Dv, Dv]` of the output projection of every query head, float32."""
        index, heads = call.layer.index, call.store.heads
        if index not in self.outputs:
            weight = output_weight(call.layer.module, heads, values, groups).float()
            by_head = weight.unflatten(1, (heads, groups, -1)).permute(1, 2, 0, 3)
            self.outputs[index] = by_head.mT @ by_head
        return self.outputs[index]


@dataclass(frozen=True)
class _Columns:
    """Pairs that a pass gathers from every layer without sealed pairs."""

    stored: Tensor
    """Columns of the window `[B, parts, n]`, those of shorter streams last."""
    where: kernels.Ranges
    """Flat rows of the gathered pairs of every stream."""
    scored: Tensor
    """As `_Gathered.columns`."""
    ranks: Tensor
    """As `_Gathered.ranks`."""


def output_norms_by_head(gram: Tensor, values: Tensor) -> Tensor:
    """Return norms `[B, H, parts, n]` of float32 `values [B, H, parts, n, Dv]` after projections with `gram [H, Dv, Dv]`."""
    return ((values @ gram[:, None]) * values).sum(dim=-1).clamp_min(0).sqrt()
