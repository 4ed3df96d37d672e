"""What one attention layer hands to a press: the forward pass just made, and the stored pairs to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from kvpress.attention import Logits
from kvpress.cache.layout import interleave
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.store import KVStore

if TYPE_CHECKING:
    from kvpress.sparse.base import Sets

Phase = Literal["prefill", "decode"]


@dataclass
class LayerCall:
    """One forward pass of one attention layer.

    `queries [B, Hq, Q, D]` are rotated, as the attention function got them. `columns [B, seen]` marks real tokens,
    None where nothing is padded. `lse [N, M]` is the log-sum-exp of the pass, None where the model's own attention
    ran. `read` is what a selector read of the sealed segments, None for all of them. `layer` counts attention layers, of
    `layers` in all, and `depth` those that this library stores, of `depths`. `shared` is state that all layers of the cache
    have in common.
    """

    module: nn.Module
    store: KVStore
    layer: int
    layers: int
    kwargs: dict[str, Any]
    hidden_states: Tensor
    seen_before: int
    depth: int = 0
    depths: int = 1
    phase: Phase = "prefill"
    queries: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: Logits = field(default_factory=lambda: Logits(1.0))
    sinks: Tensor | None = None
    columns: Tensor | None = None
    lse: Tensor | None = None
    read: Sets = None
    attentions: Tensor | None = None
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def whole_lse(self) -> Tensor:
        """Log-sum-exp of the pass over all parts; attention over sealed pairs always leaves it."""
        if self.lse is None:
            raise ValueError("the model's own attention ran, which returns no log-sum-exp")
        return self.lse

    @property
    def rotates(self) -> bool:
        """Whether this layer turns keys and queries by their positions; some models have layers that do not."""
        return bool(getattr(self.module, "use_rope", True))

    def unrotate(self, queries: Tensor) -> Tensor:
        """Return this pass's queries as they were before the rotary embedding."""
        cos, sin = self.kwargs.get("position_embeddings") or (None, None)
        if cos is None or sin is None or not self.rotates:
            return queries
        return self.turn_back(queries, cos, sin)

    def turn_back(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Undo the rotation of `vectors [B, heads, n, D]` by `cos` and `sin [B, n, d]`, in float32.

        Exact for cos and sin that carry a factor (YaRN) or were rounded to 16 bits.
        """
        cos, sin = cos.float(), sin.float()
        square = cos**2 + sin**2
        return self.turn(vectors.float(), cos / square, -sin / square)

    def turn(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `vectors [B, heads, n, D]` with the model's own rotary function; linear in `cos` and `sin [B, n, d]`."""
        if self.rotate is None:
            raise NotImplementedError(
                f"{type(self.module).__name__} has no `apply_rotary_pos_emb`: methods that need keys or queries before "
                "the rotary embedding are not available for this model"
            )
        return self.rotate(vectors, cos, sin)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(cos, sin)`, each `[B, n, d]`, of this layer's rotary embedding at `positions [B, n]`."""
        if self.rotary is None:
            raise NotImplementedError(f"found no rotary embedding beside {type(self.module).__name__}")
        return self.rotary(positions)

    def softmax(self, scores: Tensor) -> Tensor:
        """Softmax over the last axis of `scores [N, G, n, T]`, with the layer's learned attention sinks if any."""
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)
        sinks = self.sinks.float().view(1, self.store.heads, -1, 1).expand(self.store.batch, -1, -1, -1)
        sinks = sinks.reshape(scores.shape[0], scores.shape[1], 1, 1).expand(-1, -1, scores.shape[2], 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


@dataclass
class View:
    """Stored pairs of some batch rows and kv heads that all hold equally many: what a scorer sees.

    Padding is gone: each row is as if it had been read alone. Shapes: `keys [b, h, n, D]`, `values [b, h, n, Dv]`,
    `positions [b, h, n]` original positions, ascending; `rows` and `heads` say which part of the layer this is;
    `seen` counts the real tokens of these rows. `vectors` gathers keys and values, once a scorer asks for them.
    """

    call: LayerCall
    rows: list[int]
    heads: slice
    vectors: Callable[[], tuple[Tensor, Tensor]]
    positions: Tensor
    seen: int
    side: dict[str, Tensor]

    @cached_property
    def _gathered(self) -> tuple[Tensor, Tensor]:
        return self.vectors()

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
    def groups(self) -> int:
        """Query heads per kv head."""
        return self.call.queries.shape[1] // self.call.store.heads

    def query_heads(self, tensor: Tensor) -> Tensor:
        """Take the rows and query heads of this view from `tensor [B, Hq, ...]`."""
        groups = tensor.shape[1] // self.call.store.heads
        start, stop, _ = self.heads.indices(self.call.store.heads)
        return tensor[self.rows, start * groups : stop * groups]

    def newest_queries(self, size: int) -> Tensor:
        """Return the newest real queries that were observed, `[b, Hq, <= size, D]`."""
        observer = self.call.store.observers["queries"]
        queries = self.query_heads(observer.queries)  # type: ignore[attr-defined]
        return queries[:, :, -min(size, self.seen, queries.shape[2]) :]

    def observing_queries(self) -> Tensor:
        """How many of the queries whose attention was added up could see each pair, `[b, h, n]`."""
        observed: int = self.call.store.observers["mass"].queries  # type: ignore[attr-defined]
        return (self.seen - self.positions).clamp_max(observed)

    def attention(self, queries: Tensor) -> Tensor:
        """Attention weights `[b, h, G, w, n]` of the newest `queries [b, h * G, w, D]` on the pairs, causal, float32."""
        batch, heads, length, _ = self.keys.shape
        width = queries.shape[2]
        grouped = queries.reshape(batch, heads, -1, queries.shape[-1])
        scores = self.call.logits(grouped, self.keys).view(batch, heads, -1, width, length)
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
        keys = self.keys.float()
        if not self.call.rotates:
            return keys
        at = self.positions + self.side["shift"].long() if "shift" in self.side else self.positions
        heads = [self.call.turn_back(keys[:, h : h + 1], *self.call.angles(at[:, h])) for h in range(keys.shape[1])]
        return torch.cat(heads, dim=1)

    def pairs(self, index: Tensor) -> View:
        """Return a view of some pairs only: those at `index [b, h, m]`, ascending, in what every head stores."""

        def chosen(source: Tensor) -> Tensor:
            return source.gather(2, index[..., None].expand(-1, -1, -1, source.shape[3]))

        return replace(
            self,
            vectors=lambda: (chosen(self.keys), chosen(self.values)),
            positions=self.positions.gather(2, index),
            side={name: array.gather(2, index) for name, array in self.side.items()},
        )

    def _head(self, head: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, head : head + 1], self.values[:, head : head + 1]

    def per_head(self) -> list[View]:
        """Split into views of one kv head each, to bound the memory of a scorer."""
        start = self.heads.indices(self.call.store.heads)[0]
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


def view_groups(call: LayerCall, opened: DenseSegment | None = None) -> list[list[View]]:
    """Return everything the layer stores: one group per set of rows, whose views together cover all kv heads.

    Rows that hold equally many real tokens share a group. Its heads share one view, unless head-wise eviction has made
    them differ in length: then every head is a view of its own. `opened` is what `KVStore.open_segment` returns, where that
    is known.
    """
    store, columns = call.store, call.columns
    if not store.sealed and columns is None:
        return [[_whole_window(call)]]
    opened = store.open_segment(columns) if opened is None else opened
    parts: list[Segment] = [*store.segments, opened]
    counts = [sum(part.layout.lengths[n] for part in parts) for n in range(store.batch * store.heads)]
    real = [store.seen] * store.batch if columns is None else columns.sum(dim=1).tolist()
    pads = None if columns is None else (~columns).cumsum(dim=1).to(store.window.keys.device)
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in range(store.batch):
        key = (real[row], *counts[row * store.heads : (row + 1) * store.heads])
        groups.setdefault(key, []).append(row)
    found = []
    for key, rows in groups.items():
        even = len(set(key[1:])) == 1
        spans = [slice(0, store.heads)] if even else [slice(h, h + 1) for h in range(store.heads)]
        found.append([_gather(call, parts, pads, rows, span, key[0]) for span in spans])
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

    positions = of_pairs(Segment.columns).long()
    if pads is not None:
        positions = positions - pads[rows][:, None].expand(-1, len(span), -1).gather(2, positions)
    names = {name for part in parts for name in part.side}
    side = {name: of_pairs(partial(Segment.side_array, name=name)) for name in names}
    return View(call, rows, heads, vectors, positions, seen, side)


def view_of(kwargs: dict[str, Any]) -> View:
    """Return the view that a score is asked for."""
    if "kvpress" not in kwargs:
        raise ValueError("this press scores what was observed while the model read: use it inside `with press(model)`")
    view: View = kwargs["kvpress"]
    return view


def score_arguments(view: View) -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Arguments of `score` and `compress` for one view: its rows only, padding removed."""
    call = view.call
    observer = call.store.observers.get("hidden")
    states = getattr(observer, "states", None)
    hidden = call.hidden_states if states is None else states
    kwargs = {**call.kwargs, "kvpress": view, "attention_mask": None}
    whole = len(view.rows) == call.store.batch and hidden.shape[1] <= view.seen
    if not whole:
        hidden = hidden[view.rows][:, -view.seen :]
    embeddings = call.kwargs.get("position_embeddings")
    if embeddings is not None and not whole:
        kwargs["position_embeddings"] = tuple(
            part[view.rows if part.shape[0] > 1 else slice(None)][:, -view.seen :] for part in embeddings
        )
    new = call.queries.shape[2]
    kwargs.setdefault("cache_position", torch.arange(view.seen - min(new, view.seen), view.seen))
    attentions = call.attentions
    if attentions is not None and not whole:
        attentions = attentions[view.rows][:, :, -view.seen :, -view.seen :]
    return call.module, hidden, view.keys, view.values, attentions, kwargs
