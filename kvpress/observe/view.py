# SPDX-License-Identifier: Apache-2.0
"""Views of the pairs that a layer stores, the input of scorers: rows of equal length without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.cache.layout import interleave
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Wanted
from kvpress.observe.rotations import ROTATIONS, Rotations

LOG_WEIGHT = "log_weight"
"""Name of the logit weights of pairs among the per-pair arrays of a view."""


@dataclass
class View:
    """Stored pairs of some batch rows and KV heads that all store equally many: the input of a scorer.

    Padding is removed, so that each row looks as if the model had read it alone.
    """

    call: LayerCall
    """Forward pass of the layer."""
    rows: list[int]
    """Batch rows of the view."""
    heads: slice
    """KV heads of the view."""
    vectors: Callable[[], tuple[Tensor, Tensor]]
    """Gathers keys and values at the first access to either of them."""
    positions: Tensor
    """Original positions `[b, h, n]`, ascending; a pair that belongs to no token has that of the pair before it."""
    seen: int
    """Real tokens that each of these rows has seen."""
    side: dict[str, Tensor]
    """Per-pair arrays `[b, h, n]` by name."""
    target: int = 0
    """Pairs that a head keeps on average after the eviction."""
    available: int = 0
    """Pairs per head in a layer that only its ratios have cut."""
    group: list[View] = field(default_factory=list, repr=False)
    """Views that together cover all KV heads of the same rows."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Results that scorers cache for the whole group."""
    hidden: Wanted | None = None
    """Observer of hidden states."""
    whole: View | None = field(default=None, repr=False)
    """View that these pairs were chosen from; None where they are all of a head's pairs."""
    index: Tensor | None = field(default=None, repr=False)
    """Rank of each pair in `whole`, `[b, h, n]`."""

    @cached_property
    def _gathered(self) -> tuple[Tensor, Tensor]:
        return self.vectors() if self.call.layer.expand is None else self.call.layer.expand(*self.vectors())

    @property
    def keys(self) -> Tensor:
        """Keys `[b, h, n, D]`."""
        return self._gathered[0]

    @property
    def values(self) -> Tensor:
        """Values `[b, h, n, Dv]`."""
        return self._gathered[1]

    @property
    def shape(self) -> torch.Size:
        """Rows, heads and pairs, `[b, h, n]`."""
        return self.positions.shape

    @property
    def length(self) -> int:
        """Pairs per head."""
        return self.positions.shape[2]

    @property
    def streams(self) -> list[int]:
        """Streams of the layer that the view covers, row by row."""
        heads = self.call.store.heads
        return [row * heads + head for row in self.rows for head in range(*self.heads.indices(heads))]

    @property
    def device(self) -> torch.device:
        """Device of the pairs."""
        return self.positions.device

    @property
    def new_tokens(self) -> int:
        """Number of real tokens of each row that the pass has read."""
        new, mask = self.call.hidden_states.shape[1], self.call.tokens.mask
        if mask is None or not new:
            return min(new, self.seen)
        return int(mask[self.rows[0], -new:].sum())

    @property
    def model_heads(self) -> slice:
        """KV heads of the view as numbered in the model, where tensor parallel divides the heads among ranks."""
        return self.call.layer.shards.heads(self.heads, self.call.store.heads)

    def mean_of_heads(self, tensor: Tensor) -> Tensor:
        """Return the mean `[b, 1, ...]` of `tensor [b, h, ...]` over heads, those of other ranks included.

        A view of some of the heads of this rank has the mean of these.
        """
        mean = tensor.mean(dim=1, keepdim=True)
        return self.call.layer.shards.mean(mean) if self.shape[1] == self.call.store.heads else mean

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        self.call.need("its query heads")
        return self.call.queries.shape[1] // self.call.store.heads

    def query_heads(self, tensor: Tensor) -> Tensor:
        """Take the rows and query heads of this view from `tensor [B, Hq, ...]`."""
        groups = tensor.shape[1] // self.call.store.heads
        start, stop, _ = self.heads.indices(self.call.store.heads)
        return tensor[self.rows, start * groups : stop * groups]

    def observer(self, request: Wanted) -> Any:
        """Return an observer of this layer.

        Raises:
            ValueError: nothing requested this observer before the tokens were read.
        """
        if request not in self.call.store.observers:
            if self.call.store.observers or not self.call.by_hand:
                raise ValueError(
                    f"{request.kind.__name__} has recorded nothing: list it in `wants` of the press that reads it, and of a "
                    "wrapper that reads it"
                )
            raise ValueError(
                "this press scores from observers, which record while a model runs: use it inside `with press(model)`, or call "
                "it with an attention module, its hidden_states and their position_embeddings in kwargs"
            )
        return self.call.store.observers[request]

    @property
    def layer(self) -> int:
        """Index of the attention layer."""
        return self.call.layer.index

    def numbers(self, seed: int = 0) -> Tensor:
        """Return uniform random numbers `[b, h, n]` that depend on layer, length, head, position and seed only."""
        generator = torch.Generator().manual_seed(seed + 1_000_003 * self.layer + self.seen)
        heads = self.call.store.heads * self.call.layer.shards.count
        uniform = torch.rand(heads, self.seen, generator=generator)[self.model_heads]
        return uniform.to(self.positions.device).expand(len(self.rows), -1, -1).gather(2, self.positions)

    def recorded(self, request: Wanted, fill: bool = False) -> Tensor:
        """Return the per-pair array `[b, h, n]` that an observer records; zeros where it recorded nothing.

        With `fill`, these pairs, such as generated tokens of an earlier turn, get the mean of the finite numbers of their head.
        """
        name = self.observer(request).sides[0]
        array = self.side[name] if name in self.side else torch.zeros(self.shape, device=self.positions.device)
        if not fill:
            return array
        finite = array.isfinite() & (array != 0)
        mean = array.masked_fill(~finite, 0.0).sum(dim=2, keepdim=True) / finite.sum(dim=2, keepdim=True).clamp_min(1)
        return torch.where(array == 0, mean, array)

    def newest_queries(self, request: Wanted) -> Tensor:
        """Return the newest real queries of a `RecentQueries` observer, `[b, Hq, <= size, D]`.

        A row without any real token has the query of its newest column.
        """
        observer = self.observer(request)
        queries, padding = self.query_heads(observer.queries), observer.row_padding()
        recorded = queries.shape[2] - (0 if padding is None else padding[self.rows[0]])
        return queries[:, :, queries.shape[2] - max(1, min(self.seen, recorded)) :]

    def observing_queries(self, request: Wanted) -> Tensor:
        """Return how many queries of an `AttentionMass` observer could see each pair, `[b, h, n]`."""
        observed = self.observer(request).observed(self.rows, self.device)
        return (self.seen - self.positions).minimum(observed[:, None, None])

    def attention(self, queries: Tensor, causal: bool = True) -> Tensor:
        """Return attention weights `[b, h, G, w, n]` of `queries [b, h * G, w, D]` on the pairs, float32.

        With `causal`, they are the newest queries, and see no later pairs, except where pairs lie before and behind the queries
        (masked diffusion). Otherwise each query sees all pairs.
        """
        batch, heads, length, _ = self.keys.shape
        width = queries.shape[2]
        grouped = queries.reshape(batch, heads, -1, queries.shape[-1])
        scores = self.call.logits(grouped, self.keys).view(batch, heads, -1, width, length)
        if LOG_WEIGHT in self.side:
            scores = scores + self.side[LOG_WEIGHT][:, :, None, None]
        if causal and not self.call.tokens.around:
            newest_positions = torch.arange(self.seen - width, self.seen, device=self.keys.device)
            future = self.positions[:, :, None, None, :] > newest_positions[:, None]
            scores = scores.masked_fill_(future, float("-inf"))
        if self.call.sinks is None:
            return torch.softmax(scores, dim=-1)
        start, stop, _ = self.heads.indices(self.call.store.heads)
        sinks = self.call.sinks.float().view(self.call.store.heads, -1)[start:stop]
        extra = sinks[None, :, :, None, None].expand(batch, -1, -1, width, 1)
        return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]

    def unrotated_keys(self) -> Tensor:
        """Return the keys before the rotary embedding, `[b, h, n, D]`, float32."""
        self.call.need("keys before the rotary embedding")
        keys = self.keys.float()
        if not self.call.layer.rotates:
            return keys
        keys_and_angles = zip(keys.split(1, dim=1), self.rotations(self.positions + self.shift), strict=True)
        return torch.cat([self.call.unrotate(head, *angles) for head, angles in keys_and_angles], dim=1)

    @property
    def shift(self) -> Tensor:
        """Positions by which keys were rotated away from their own, `[b, h, n]`."""
        return self.side["shift"].long() if "shift" in self.side else torch.zeros_like(self.positions)

    def rotations(self, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for every KV head, `(cos, sin)`, each `[b, n, d]`, of the tokens at `positions [b, h, n]`.

        They come from the `Rotations` observer where it recorded all tokens, and else from the model's rotary embedding.

        Raises:
            NotImplementedError: some tokens are not recorded, and the recorded ones differ from the model's rotary embedding.
        """
        watched = self.call.store.observers.get(ROTATIONS)
        if watched is None or not watched.parts or watched.first:
            self._check_rotations(watched)
            yield from (self.call.angles(at) for at in positions.unbind(dim=1))
            return
        cos, sin = watched.of_rows(self.rows)
        for at in self.slots(positions).unbind(dim=1):
            index = at[..., None].expand(-1, -1, cos.shape[-1])
            yield cos.gather(1, index), sin.gather(1, index)

    def slots(self, positions: Tensor) -> Tensor:
        """Return the slots of the tokens at `positions [b, h, n]`, padding counted."""
        if self.call.tokens.mask is None:
            return positions
        columns = [self.call.tokens.mask[row].nonzero().flatten().to(positions.device) for row in self.rows]
        return torch.stack([real[at] for real, at in zip(columns, positions, strict=True)])

    def _check_rotations(self, watched: Rotations | None) -> None:
        """Raise if the rotary embedding of the newest tokens differs from the model's at their positions."""
        if watched is None or not watched.parts:
            watched = Rotations()
            watched.observe(self.call)
        if not watched.parts:
            return
        cos, _ = watched.of_rows(self.rows)
        columns = torch.arange(watched.first, watched.first + cos.shape[1], device=cos.device).expand(
            len(self.rows), -1
        )
        mask = self.call.tokens.mask
        real = torch.ones_like(columns, dtype=torch.bool)
        if mask is not None:  # padding may have any position
            real = mask.to(cos.device)[self.rows].gather(1, columns)
            columns = (mask.cumsum(dim=1) - 1).clamp_min(0).to(cos.device)[self.rows].gather(1, columns)
        if not torch.allclose(self.call.angles(columns)[0].to(cos)[real], cos[real], atol=1e-2):
            raise NotImplementedError(
                "the rotary embedding of earlier tokens is unknown: position_ids are not those of the tokens in the cache, or "
                "frequencies depend on the length; read everything under this press, in one `with` block"
            )

    def pairs(self, index: Tensor) -> View:
        """Return a view of the pairs of ranks `index [b, h, m]`, ascending, of every head."""

        def chosen(source: Tensor) -> Tensor:
            return source.gather(2, index[..., None].expand(-1, -1, -1, source.shape[3]))

        return replace(
            self,
            vectors=lambda: (chosen(self.keys), chosen(self.values)),
            positions=self.positions.gather(2, index),
            side={name: array.gather(2, index) for name, array in self.side.items()},
            group=[],
            memo={},
            whole=self if self.whole is None else self.whole,
            index=index if self.index is None else self.index.gather(2, index),
        )

    def oldest(self, count: int) -> View:
        """Return a view of the oldest `count` pairs of every head."""
        count = max(0, count)
        return replace(
            self,
            vectors=lambda: (self.keys[:, :, :count], self.values[:, :, :count]),
            positions=self.positions[..., :count],
            side={name: array[..., :count] for name, array in self.side.items()},
            group=[],
            memo={},
        )

    def some_rows(self, members: list[int]) -> View:
        """Return a view of some of its rows, by their index in `rows`."""
        return replace(
            self,
            rows=[self.rows[member] for member in members],
            vectors=lambda: (self.keys[members], self.values[members]),
            positions=self.positions[members],
            side={name: array[members] for name, array in self.side.items()},
            group=[],
            memo={},
        )

    def _head(self, head: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, head : head + 1], self.values[:, head : head + 1]

    def per_head(self) -> list[View]:
        """Split into views of one KV head each, to bound the memory of a scorer."""
        start = self.heads.start
        return [
            replace(
                self,
                heads=slice(start + h, start + h + 1),
                vectors=partial(self._head, h),
                positions=self.positions[:, h : h + 1],
                side={name: array[:, h : h + 1] for name, array in self.side.items()},
            )
            for h in range(self.shape[1])
        ]


def view_groups(
    call: LayerCall, opened: DenseSegment | None = None, by_row: bool = False, rows: Sequence[int] | None = None
) -> list[list[View]]:
    """Return views of all pairs of some `rows`, None for all: one group per set of rows, whose views cover all KV heads.

    Rows with equally many real tokens, also in this pass, share a group if their earlier evictions left equally many pairs at
    the same token, and if observers recorded equally many tokens of them; with `by_row`, every row is a group. The heads of a
    group share one view if they store equally many pairs; otherwise each head has its own view. `opened` is the result of
    `KVStore.open_segment` if the caller has it.
    """
    store, mask = call.store, call.tokens.mask
    rows = range(store.batch) if rows is None else rows
    if not store.sealed and mask is None and len(rows) == store.batch and (store.batch == 1 or not by_row):
        return [[_whole_window(call)]]
    opened = store.open_segment(mask) if opened is None else opened
    parts: list[Segment] = [*store.segments, opened]
    counts = [sum(part.layout.lengths[n] for part in parts) for n in range(store.batch * store.heads)]
    real = [store.seen] * store.batch if mask is None else mask.sum(dim=1).tolist()
    new = real if mask is None else mask[:, call.tokens.seen_before :].sum(dim=1).tolist()
    pads = None if mask is None else (~mask).cumsum(dim=1).to(store.window.keys.device)
    watched = () if mask is None else (observer.row_padding() for observer in store.observers.values())
    paddings = [padding for padding in watched if padding is not None]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        lengths = tuple(counts[row * store.heads : (row + 1) * store.heads])
        history = store.since_eviction[row], store.targets[row], (new[row], *(padding[row] for padding in paddings))
        groups.setdefault((row if by_row else 0, history, real[row], lengths), []).append(row)
    views = []
    for (_, _, seen, lengths), members in groups.items():
        even = len(set(lengths)) == 1
        spans = [slice(0, store.heads)] if even else [slice(h, h + 1) for h in range(store.heads)]
        views.append([_gather(call, parts, pads, members, span, seen) for span in spans])
    return views


def _whole_window(call: LayerCall) -> View:
    window = call.store.window
    positions = torch.arange(window.first, window.first + window.length, device=window.keys.device)
    shape = (call.store.batch, call.store.heads, -1)
    return View(
        call, list(range(call.store.batch)), slice(0, call.store.heads),
        lambda: (window.filled_keys, window.filled_values), positions.expand(shape), call.store.seen, dict(window.side),
    )  # fmt: skip


def _gather(
    call: LayerCall, parts: list[Segment], pads: Tensor | None, rows: list[int], heads: slice, seen: int
) -> View:
    span = range(*heads.indices(call.store.heads))
    streams = [row * call.store.heads + head for row in rows for head in span]
    chosen: list[tuple[Segment, Tensor | slice]]
    if len(parts) == 1 and streams == list(range(parts[0].layout.streams)):
        chosen, order, longest = [(parts[0], slice(None))], None, parts[0].layout.longest
    else:
        order, layout = interleave([part.layout.of_streams(streams) for part in parts])
        chosen = [(part, part.layout.rows_of_streams(streams).to(part.device)) for part in parts]
        longest = layout.longest

    def joined(arrays: Sequence[Tensor]) -> Tensor:
        flat = arrays[0] if order is None else torch.cat(list(arrays)).index_select(0, order.to(arrays[0].device))
        per_head: Tensor = flat.unflatten(0, (len(rows), len(span), longest))
        return per_head

    def of_pairs(array: Callable[[Segment], Tensor]) -> Tensor:
        return joined([array(part)[index] for part, index in chosen])

    def vectors() -> tuple[Tensor, Tensor]:
        keys, values = zip(*[part.read(index) for part, index in chosen], strict=True)
        return joined(keys), joined(values)

    slots = of_pairs(Segment.slots).long()
    positions = torch.where(slots < 0, slots.cummax(dim=2).values, slots).clamp_min(0)
    if pads is not None:
        positions = positions - pads[rows][:, None].expand(-1, len(span), -1).gather(2, positions)
        positions = positions.clamp_min(0)
    names = {name for part in parts for name in part.side}
    side = {name: of_pairs(partial(Segment.side_array, name=name)) for name in names}
    if any(part.log_weight is not None for part in parts):
        side[LOG_WEIGHT] = of_pairs(_log_weight)
    return View(call, rows, heads, vectors, positions, seen, side)


def _log_weight(part: Segment) -> Tensor:
    return torch.zeros(part.layout.total, device=part.device) if part.log_weight is None else part.log_weight


def score_arguments(view: View) -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Return the arguments of `score` and `compress` for one view: its rows only, padding removed.

    In a view of some pairs only, hidden states, angles and attention cover the tokens of its first head's pairs.
    """
    call = view.call
    watched = None if view.hidden is None else call.store.observers.get(view.hidden)
    new = view.new_tokens
    if watched is None or watched.states is None:
        hidden, recorded = call.hidden_states, new
    else:
        hidden, padding = watched.states, watched.row_padding()
        recorded = min(view.seen, hidden.shape[1] - (0 if padding is None else padding[view.rows[0]]))
    is_of_call = hidden.shape == call.hidden_states.shape
    kwargs = {**call.kwargs, "kvpress": view, "attention_mask": None}
    kwargs.setdefault("cache_position", torch.arange(view.seen - min(new, call.queries.shape[2]), view.seen))
    attentions = call.attentions
    embeddings: Sequence[Tensor] | None = call.position_embeddings
    if len(view.rows) != call.store.batch or hidden.shape[1] > recorded or call.hidden_states.shape[1] > new:
        hidden = hidden[view.rows][:, hidden.shape[1] - recorded :]
        if embeddings is not None:
            embeddings = [
                part[view.rows if part.shape[0] > 1 else slice(None)][:, max(0, part.shape[1] - new) :]
                for part in embeddings
            ]
        if attentions is not None:
            attentions = attentions[view.rows][:, :, max(0, attentions.shape[2] - new) :]
            if attentions.shape[3] == call.store.seen:
                columns = view.slots(torch.arange(view.seen, device=attentions.device).expand(len(view.rows), 1, -1))
                attentions = attentions.gather(3, columns[:, :, None].expand(*attentions.shape[:3], -1))
            else:
                attentions = attentions[..., -view.seen :]
    if view.index is not None:
        indices = view.positions[:, 0] - (view.seen - hidden.shape[1])
        if hidden.shape[1] and bool((indices >= 0).all()):
            rows = torch.arange(len(indices), device=indices.device)[:, None]
            hidden = hidden[rows.to(hidden.device), indices.to(hidden.device)]
            kwargs["cache_position"] = view.positions[0, 0]
            if embeddings is not None:
                embeddings = [part.expand(len(indices), -1, -1)[rows, indices] for part in embeddings]
            if attentions is not None:
                attentions = attentions[rows[..., None], :, indices[:, :, None], indices[:, None]].permute(0, 3, 1, 2)
    if embeddings is not None:
        kwargs["position_embeddings"] = tuple(embeddings)
    if is_of_call and "hidden_states" in kwargs:
        kwargs["hidden_states"] = hidden  # presses written for NVIDIA kvpress read them here too
    return call.layer.module, hidden, view.keys, view.values, attentions, kwargs


def hook_arguments(call: LayerCall) -> dict[str, Any]:
    """Return keyword arguments of a module's forward pass, as a `forward_hook` written for NVIDIA kvpress expects them."""
    positions = torch.arange(call.tokens.seen_before, call.store.seen, device=call.hidden_states.device)
    return {**call.kwargs, "hidden_states": call.hidden_states, "cache_position": positions}
