# SPDX-License-Identifier: Apache-2.0
"""What a layer stores, as scorers see it: rows of equal length, padding removed."""

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
    """Stored pairs of some batch rows and kv heads that all hold equally many: what a scorer sees.

    Padding is gone: each row is as if it had been read alone. Shapes: `keys [b, h, n, D]`, `values [b, h, n, Dv]`,
    `positions [b, h, n]` original positions, ascending; `rows` and `heads` say which part of the layer this is;
    `seen` counts the real tokens of these rows. `vectors` gathers keys and values, once a scorer asks for them.

    `target` is how many pairs a head is to keep on average, of `available` in a layer that nothing but its ratios has cut.
    Views that together cover all kv heads of the same rows are each other's `group`; what is worked out for all of them can be
    left in `memo`. `hidden` names the observer of hidden states. A view of some pairs only says of which ones it is a part:
    `whole`, and their `index [b, h, n]` there.
    """

    call: LayerCall
    rows: list[int]
    heads: slice
    vectors: Callable[[], tuple[Tensor, Tensor]]
    positions: Tensor
    seen: int
    side: dict[str, Tensor]
    target: int = 0
    available: int = 0
    group: list[View] = field(default_factory=list, repr=False)
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    hidden: Wanted | None = None
    whole: View | None = field(default=None, repr=False)
    index: Tensor | None = field(default=None, repr=False)

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
        """Streams of the layer that the view shows, row by row."""
        heads = self.call.store.heads
        return [row * heads + head for row in self.rows for head in range(*self.heads.indices(heads))]

    @property
    def groups(self) -> int:
        """Query heads per kv head."""
        self.call.need("its query heads")
        return self.call.queries.shape[1] // self.call.store.heads

    def query_heads(self, tensor: Tensor) -> Tensor:
        """Take the rows and query heads of this view from `tensor [B, Hq, ...]`."""
        groups = tensor.shape[1] // self.call.store.heads
        start, stop, _ = self.heads.indices(self.call.store.heads)
        return tensor[self.rows, start * groups : stop * groups]

    def observer(self, wanted: Wanted) -> Any:
        """Return the observer of this layer that was wanted."""
        if wanted not in self.call.store.observers:
            if self.call.store.observers or not self.call.by_hand:
                raise ValueError(
                    f"{wanted.kind.__name__} is read, and nothing watched it: list it in `wants` of the press that scores, and "
                    "of a wrapper that reads it"
                )
            raise ValueError(
                "this press scores what is observed while a model reads: use it inside `with press(model)`, or call it with an "
                "attention module, its hidden_states and their position_embeddings in kwargs"
            )
        return self.call.store.observers[wanted]

    @property
    def layer(self) -> int:
        """Number of the attention layer."""
        return self.call.layer.index

    def numbers(self, seed: int = 0) -> Tensor:
        """Uniform numbers `[b, h, n]` that depend on layer, length, head, position and seed only."""
        generator = torch.Generator().manual_seed(seed + 1_000_003 * self.layer + self.seen)
        drawn = torch.rand(self.call.store.heads, self.seen, generator=generator)[self.heads]
        return drawn.to(self.positions.device).expand(len(self.rows), -1, -1).gather(2, self.positions)

    def recorded(self, wanted: Wanted) -> Tensor:
        """Return the per-pair array `[b, h, n]` that an observer records; zeros where it saw nothing."""
        name = self.observer(wanted).sides[0]
        return self.side[name] if name in self.side else torch.zeros(self.shape, device=self.positions.device)

    def newest_queries(self, wanted: Wanted) -> Tensor:
        """Return the newest real queries that a wanted `RecentQueries` holds, `[b, Hq, <= size, D]`."""
        queries = self.query_heads(self.observer(wanted).queries)
        return queries[:, :, -min(self.seen, queries.shape[2]) :]

    def observing_queries(self, wanted: Wanted) -> Tensor:
        """How many of the queries that a wanted `AttentionMass` added up could see each pair, `[b, h, n]`."""
        observed: int = self.observer(wanted).queries
        return (self.seen - self.positions).clamp_max(observed)

    def attention(self, queries: Tensor) -> Tensor:
        """Attention weights `[b, h, G, w, n]` of the newest `queries [b, h * G, w, D]` on the pairs, float32.

        It is causal, but for the queries of a block that the pairs lie around.
        """
        batch, heads, length, _ = self.keys.shape
        width = queries.shape[2]
        grouped = queries.reshape(batch, heads, -1, queries.shape[-1])
        scores = self.call.logits(grouped, self.keys).view(batch, heads, -1, width, length)
        if LOG_WEIGHT in self.side:
            scores = scores + self.side[LOG_WEIGHT][:, :, None, None]
        if not self.call.tokens.around:
            at = torch.arange(self.seen - width, self.seen, device=self.keys.device)
            future = self.positions[:, :, None, None, :] > at[:, None]
            scores = scores.masked_fill_(future, float("-inf"))
        if self.call.sinks is None:
            return torch.softmax(scores, dim=-1)
        start, stop, _ = self.heads.indices(self.call.store.heads)
        sinks = self.call.sinks.float().view(self.call.store.heads, -1)[start:stop]
        extra = sinks[None, :, :, None, None].expand(batch, -1, -1, width, 1)
        return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]

    def unrotated_keys(self) -> Tensor:
        """Return the keys as they were before the rotary embedding, `[b, h, n, D]`, float32."""
        self.call.need("keys before the rotary embedding")
        keys = self.keys.float()
        if not self.call.layer.rotates:
            return keys
        turned = zip(keys.split(1, dim=1), self.rotations(self.positions + self.shift), strict=True)
        return torch.cat([self.call.unrotate(head, *angles) for head, angles in turned], dim=1)

    @property
    def shift(self) -> Tensor:
        """How far keys have been turned away from their positions, `[b, h, n]`."""
        return self.side["shift"].long() if "shift" in self.side else torch.zeros_like(self.positions)

    def rotations(self, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for every kv head, `(cos, sin)`, each `[b, n, d]`, of the tokens at `positions [b, h, n]`.

        They are those that the tokens were given, where `Rotations` watched; else those of the model's own embedding.

        Raises:
            NotImplementedError: not all tokens were watched, and those that were got another embedding than the model's own.
        """
        watched = self.call.store.observers.get(ROTATIONS)
        if watched is None or not watched.parts or watched.first:
            self._check_rotations(watched)
            yield from (self.call.angles(at) for at in positions.unbind(dim=1))
            return
        cos, sin = watched.of_rows(self.rows)
        for at in self._columns(positions).unbind(dim=1):
            index = at[..., None].expand(-1, -1, cos.shape[-1])
            yield cos.gather(1, index), sin.gather(1, index)

    def _columns(self, positions: Tensor) -> Tensor:
        """Return where the tokens at `positions [b, h, n]` stand in the batch, padding counted."""
        if self.call.tokens.mask is None:
            return positions
        columns = [self.call.tokens.mask[row].nonzero().flatten().to(positions.device) for row in self.rows]
        return torch.stack([real[at] for real, at in zip(columns, positions, strict=True)])

    def _check_rotations(self, watched: Rotations | None) -> None:
        """Refuse to work with the model's own embedding where the newest tokens were given another one."""
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
        if mask is not None:
            columns = (mask.cumsum(dim=1) - 1).clamp_min(0).to(cos.device)[self.rows].gather(1, columns)
        if not torch.allclose(self.call.angles(columns)[0].to(cos), cos, atol=1e-2):
            raise NotImplementedError(
                "the rotary embedding of earlier tokens is unknown: position_ids are not those of the tokens in the cache, or "
                "frequencies depend on the length; read everything under this press, in one `with` block"
            )

    def pairs(self, index: Tensor) -> View:
        """Return a view of some pairs only: those at `index [b, h, m]`, ascending, in what every head stores."""

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

    def _head(self, head: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, head : head + 1], self.values[:, head : head + 1]

    def per_head(self) -> list[View]:
        """Split into views of one kv head each, to bound the memory of a scorer."""
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


def view_groups(call: LayerCall, opened: DenseSegment | None = None, apart: bool = False) -> list[list[View]]:
    """Return everything the layer stores: one group per set of rows, whose views together cover all kv heads.

    Rows that hold equally many real tokens share a group, unless they are to be `apart`: then group b is row b. Its heads share
    one view, unless head-wise eviction has made them differ in length: then every head is a view of its own. `opened` is what
    `KVStore.open_segment` returns, where that is known.
    """
    store, mask = call.store, call.tokens.mask
    if not store.sealed and mask is None and (store.batch == 1 or not apart):
        return [[_whole_window(call)]]
    opened = store.open_segment(mask) if opened is None else opened
    parts: list[Segment] = [*store.segments, opened]
    counts = [sum(part.layout.lengths[n] for part in parts) for n in range(store.batch * store.heads)]
    real = [store.seen] * store.batch if mask is None else mask.sum(dim=1).tolist()
    pads = None if mask is None else (~mask).cumsum(dim=1).to(store.window.keys.device)
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in range(store.batch):
        key = (row if apart else 0, real[row], *counts[row * store.heads : (row + 1) * store.heads])
        groups.setdefault(key, []).append(row)
    found = []
    for (_, seen, *lengths), rows in groups.items():
        even = len(set(lengths)) == 1
        spans = [slice(0, store.heads)] if even else [slice(h, h + 1) for h in range(store.heads)]
        found.append([_gather(call, parts, pads, rows, span, seen) for span in spans])
    return found


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
        taken = [part.layout.take_streams(streams) for part in parts]
        order, layout = interleave([found for _, found in taken])
        chosen = [(part, index.to(part.device)) for part, (index, _) in zip(parts, taken, strict=True)]
        longest = layout.longest

    def joined(arrays: Sequence[Tensor]) -> Tensor:
        whole = arrays[0] if order is None else torch.cat(list(arrays)).index_select(0, order.to(arrays[0].device))
        return whole.unflatten(0, (len(rows), len(span), longest))

    def of_pairs(array: Callable[[Segment], Tensor]) -> Tensor:
        return joined([array(part)[index] for part, index in chosen])

    def vectors() -> tuple[Tensor, Tensor]:
        keys, values = zip(*[part.read(index) for part, index in chosen], strict=True)
        return joined(keys), joined(values)

    positions = of_pairs(Segment.slots).long()
    if pads is not None:
        positions = positions - pads[rows][:, None].expand(-1, len(span), -1).gather(2, positions)
    names = {name for part in parts for name in part.side}
    side = {name: of_pairs(partial(Segment.side_array, name=name)) for name in names}
    if any(part.log_weight is not None for part in parts):
        side[LOG_WEIGHT] = of_pairs(_log_weight)
    return View(call, rows, heads, vectors, positions, seen, side)


def _log_weight(part: Segment) -> Tensor:
    return torch.zeros(part.layout.total, device=part.device) if part.log_weight is None else part.log_weight


def score_arguments(view: View) -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Arguments of `score` and `compress` for one view: its rows only, padding removed.

    Of a view of some pairs only, those of its first head are the tokens that hidden states, angles and attention are of.
    """
    call = view.call
    states = None if view.hidden is None else getattr(call.store.observers.get(view.hidden), "states", None)
    hidden = call.hidden_states if states is None else states
    kwargs = {**call.kwargs, "kvpress": view, "attention_mask": None}
    new = call.queries.shape[2]
    kwargs.setdefault("cache_position", torch.arange(view.seen - min(new, view.seen), view.seen))
    attentions = call.attentions
    embeddings: Sequence[Tensor] | None = call.position_embeddings
    if len(view.rows) != call.store.batch or hidden.shape[1] > view.seen:
        hidden = hidden[view.rows][:, -view.seen :]
        if embeddings is not None:
            embeddings = [part[view.rows if part.shape[0] > 1 else slice(None)][:, -view.seen :] for part in embeddings]
        attentions = None if attentions is None else attentions[view.rows][:, :, -view.seen :, -view.seen :]
    if view.index is not None:
        at = view.positions[:, 0] - (view.seen - hidden.shape[1])
        if hidden.shape[1] and bool((at >= 0).all()):
            rows = torch.arange(len(at), device=at.device)[:, None]
            hidden = hidden[rows.to(hidden.device), at.to(hidden.device)]
            kwargs["cache_position"] = view.positions[0, 0]
            if embeddings is not None:
                embeddings = [part.expand(len(at), -1, -1)[rows, at] for part in embeddings]
            if attentions is not None:
                attentions = attentions[rows[..., None], :, at[:, :, None], at[:, None]].permute(0, 3, 1, 2)
    if embeddings is not None:
        kwargs["position_embeddings"] = tuple(embeddings)
    return call.layer.module, hidden, view.keys, view.values, attentions, kwargs


def hook_arguments(call: LayerCall) -> dict[str, Any]:
    """Keyword arguments of a module's forward pass, as a `forward_hook` written for NVIDIA kvpress expects them."""
    positions = torch.arange(call.tokens.seen_before, call.store.seen, device=call.hidden_states.device)
    return {**call.kwargs, "hidden_states": call.hidden_states, "cache_position": positions}
