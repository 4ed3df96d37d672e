"""What one attention layer hands to a press: the forward pass just made, and the stored pairs to choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvpress.attention import Logits
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore

SCALED = 0.02
"""Deviation of cos^2 + sin^2 from 1 past which a rotary embedding counts as scaled; 16-bit rounding stays below."""

Phase = Literal["prefill", "decode"]


@dataclass
class LayerCall:
    """One forward pass of one attention layer.

    `queries [B, Hq, Q, D]` are rotated, as the attention function got them. `columns [B, seen]` marks real tokens,
    None where nothing is padded. `lse [N, M]` is the log-sum-exp of the pass, None where the model's own attention
    ran. `layer` counts the layers that this library stores, of `layers` in all. `shared` is state that all layers of the
    cache have in common.
    """

    module: nn.Module
    store: KVStore
    layer: int
    layers: int
    kwargs: dict[str, Any]
    hidden_states: Tensor
    seen_before: int
    phase: Phase = "prefill"
    queries: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: Logits = field(default_factory=lambda: Logits(1.0))
    sinks: Tensor | None = None
    columns: Tensor | None = None
    lse: Tensor | None = None
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

    def unrotate(self, queries: Tensor) -> Tensor:
        """Return this pass's queries as they were before the rotary embedding."""
        cos, sin = self.kwargs.get("position_embeddings") or (None, None)
        if cos is None or sin is None or not getattr(self.module, "use_rope", True):
            return queries
        turned = self.turn(queries, cos, -sin)
        # Scaled embeddings (YaRN) carry a factor in cos and sin, which turning back applies once more.
        factor = float((cos.float() ** 2 + sin.float() ** 2).mean())
        return turned if abs(factor - 1) < SCALED else turned / factor

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
    `seen` counts the real tokens of these rows.
    """

    call: LayerCall
    rows: list[int]
    heads: slice
    keys: Tensor
    values: Tensor
    positions: Tensor
    seen: int
    side: dict[str, Tensor]

    @property
    def length(self) -> int:
        """Pairs per head."""
        return self.keys.shape[2]

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

    def per_head(self) -> list[View]:
        """Split into views of one kv head each, to bound the memory of a scorer."""
        start, stop, _ = self.heads.indices(self.call.store.heads)
        return [
            View(
                self.call,
                self.rows,
                slice(start + h, start + h + 1),
                self.keys[:, h : h + 1],
                self.values[:, h : h + 1],
                self.positions[:, h : h + 1],
                self.seen,
                {name: array[:, h : h + 1] for name, array in self.side.items()},
            )
            for h in range(stop - start)
        ]


def view_groups(call: LayerCall) -> list[list[View]]:
    """Return everything the layer stores: one group per set of rows, whose views together cover all kv heads.

    Rows that hold equally many real tokens share a group. Its heads share one view, unless head-wise eviction has made
    them differ in length: then every head is a view of its own.
    """
    store, columns = call.store, call.columns
    if not store.sealed and columns is None:
        return [[_whole_window(call)]]
    opened = store.open_segment(columns)
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
        call, list(range(call.store.batch)), slice(0, call.store.heads), window.filled_keys, window.filled_values,
        positions.expand(shape), call.store.seen, dict(window.side),
    )  # fmt: skip


def _gather(
    call: LayerCall, parts: list[Segment], pads: Tensor | None, rows: list[int], heads: slice, seen: int
) -> View:
    span = range(*heads.indices(call.store.heads))
    names = {name for part in parts for name in part.side}
    keys, values, positions = [], [], []
    side: dict[str, list[Tensor]] = {name: [] for name in names}
    for row in rows:
        for head in span:
            n = row * call.store.heads + head
            read = [part.read(part.layout.rows(n)) for part in parts]
            keys.append(torch.cat([pair[0] for pair in read]))
            values.append(torch.cat([pair[1] for pair in read]))
            at = torch.cat([part.columns()[part.layout.rows(n)] for part in parts]).long()
            positions.append(at if pads is None else at - pads[row][at])
            for name in names:
                side[name].append(torch.cat([part.side_array(name)[part.layout.rows(n)] for part in parts]))
    shape = (len(rows), len(span))

    def stack(items: list[Tensor]) -> Tensor:
        return torch.stack(items).unflatten(0, shape)

    return View(
        call, rows, heads, stack(keys), stack(values), stack(positions), seen,
        {name: stack(items) for name, items in side.items()},
    )  # fmt: skip


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
