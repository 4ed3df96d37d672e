# SPDX-License-Identifier: Apache-2.0
"""Measure every attention layer along a continuation: the error of its output, and its attention recall.

Forward hooks measure each layer whose cache grows, after its attention and before the press evicts or encodes. Extra passes
of a press, such as reading tokens again, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.cache.attention import group_queries
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import cache_among
from kvpress.hf.session.session import Session
from kvpress.observe.call import LayerCall

See = Callable[[LayerCall, Tensor], None]
Feed = Callable[[int], Tensor]


@contextmanager
def watching(session: Session, see: See, feed: Feed | None = None) -> Iterator[None]:
    """Call `see(call, output)` after every pass of every layer with a growing cache; `output [B, n, hidden]`.

    With `feed`, the input of a module is replaced by `feed(layer)`.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if feed is None or session.watch is not None:
            return None
        return args[1:], {**kwargs, "hidden_states": feed(layer_of(module))}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        del args
        cache = cache_among(kwargs.values())
        layer = None if cache is None else cache.layers[layer_of(module)]
        if session.watch is None and isinstance(layer, PressLayer) and layer.call is not None:
            see(layer.call, output[0] if isinstance(output, tuple) else output)

    handles = []
    for module in (session.modules[i] for i in session.growing):
        # Before the hooks of the session, in which the press evicts or encodes.
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layer_of(module: nn.Module) -> int:
    """Return the index of the cache layer that an attention module writes."""
    return module.layer_idx  # type: ignore[return-value]


@dataclass
class FullLayer:
    """Record of one layer of a full cache along a continuation; every list has one entry per pass."""

    call: LayerCall
    """Newest call, whose store holds all pairs."""
    inputs: list[Tensor] = field(default_factory=list)
    """Hidden states `[B, n, hidden]` that the layer read."""
    queries: list[Tensor] = field(default_factory=list)
    """Queries `[B, Hq, n, D]`."""
    outputs: list[Tensor] = field(default_factory=list)
    """Outputs `[B, n, hidden]` of the attention module."""

    def recall(self, step: int, call: LayerCall) -> Tensor:
        """Return the share of this layer's attention in pass `step` on pairs that `call` reads, float32 `[B, n]`.

        Shares are averaged over query heads. Attention to learned sinks does not count, as they are not pairs.
        """
        queries, read = self.queries[step], columns_read(call)
        batch, _, length, _ = queries.shape
        if read is None:
            return torch.ones(batch, length, device=queries.device)
        shares = []
        for i, query in enumerate(queries.split(1, dim=2)):
            if i and call.read is not None:
                read = columns_read(call, i)
                assert read is not None  # noqa: S101 - for mypy: if one token reads a part, all do
            weights = self.weights(query, call.tokens.seen_before + i + 1)
            on_read = (weights * read[..., : weights.shape[-1]]).sum(dim=-1)
            shares.append(on_read.view(batch, -1).mean(dim=1))
        return torch.stack(shares, dim=1)

    def weights(self, query: Tensor, seen: int) -> Tensor:
        """Return the attention of one token's `query [B, Hq, 1, D]` to the first `seen` pairs, float32 `[N, G, seen]`."""
        store = self.call.store
        keys = store.window.filled_keys[:, :, :seen].flatten(0, 1)
        return torch.softmax(self.call.logits(group_queries(query, store.heads), keys), dim=-1)


class LayerRecorder:
    """Record the layers of a full cache along a continuation."""

    def __init__(self) -> None:
        self.layers: dict[int, FullLayer] = {}
        """Records by the layer of the cache."""

    def on(self, session: Session) -> AbstractContextManager[None]:
        """Record the passes of a session inside the returned context."""
        return watching(session, self._see)

    def _see(self, call: LayerCall, output: Tensor) -> None:
        layer = self.layers.setdefault(layer_of(call.layer.module), FullLayer(call))
        layer.call = call
        layer.inputs.append(call.hidden_states)
        layer.queries.append(call.queries)
        layer.outputs.append(output)


class Meter:
    """Compare the layers under a press with those of the full cache, pass by pass.

    With `isolated`, every layer gets the input that it has with the full cache, so that errors of earlier layers do not
    count; only errors are measured then.
    """

    def __init__(self, full: dict[int, FullLayer], isolated: bool = False) -> None:
        self.full, self.isolated = full, isolated
        self.errors: dict[int, list[Tensor]] = {layer: [] for layer in full}
        """Relative errors `[B, n]` of the outputs, one per pass, by layer."""
        self.recalls: dict[int, list[Tensor]] = {layer: [] for layer in full}
        """Attention recalls `[B, n]`, one per pass, by layer."""

    def on(self, session: Session) -> AbstractContextManager[None]:
        """Measure the passes of a session inside the returned context; it must read the tokens that were recorded."""
        return watching(session, self._see, self._feed if self.isolated else None)

    def _feed(self, layer: int) -> Tensor:
        return self.full[layer].inputs[len(self.errors[layer])]

    def _see(self, call: LayerCall, output: Tensor) -> None:
        layer = layer_of(call.layer.module)
        full, step = self.full[layer], len(self.errors[layer])
        self.errors[layer].append(relative_error(output, full.outputs[step]))
        if not self.isolated:
            self.recalls[layer].append(full.recall(step, call))


def by_layer(figures: dict[int, list[Tensor]]) -> Tensor:
    """Join figures `[B, n]` of each layer and pass as `[B, tokens, layers]` on the host."""
    return torch.stack([torch.cat(passes, dim=1).cpu() for passes in figures.values()], dim=-1)


def relative_error(output: Tensor, expected: Tensor) -> Tensor:
    """Return ||output - expected|| / ||expected|| of vectors along the last axis, float32."""
    size = expected.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (output.float() - expected.float()).norm(dim=-1) / size


def columns_read(call: LayerCall, token: int = 0) -> Tensor | None:
    """Return a mask of the slots whose pairs a token of a pass reads, bool `[N, G, seen]`; None if it reads all.

    Pairs that a press made itself belong to no token and are not marked.
    """
    store = call.store
    if call.read is None and all(count == store.seen for count in store.stored()):
        return None
    streams, window = store.batch * store.heads, store.window
    read = torch.zeros(streams, call.queries.shape[1] // store.heads, store.seen, dtype=torch.bool)
    read[:, :, window.first : window.first + window.length] = True
    for i, segment in enumerate(store.sealed):
        stream, columns = segment.layout.stream_of_row, segment.slots().cpu().long()
        if call.read is None or i >= len(store.segments):
            chosen = [torch.arange(segment.layout.total)]
        else:
            selections = [heads[i].of_tokens(slice(token * streams, (token + 1) * streams)) for heads in call.read]
            filled = [
                torch.arange(selection.rows.shape[1]) < selection.counts.cpu()[:, None] for selection in selections
            ]
            chosen = [
                selection.rows.cpu().long()[is_filled] for selection, is_filled in zip(selections, filled, strict=True)
            ]
        for rows, heads in zip(chosen, read.chunk(len(chosen), dim=1), strict=True):
            marked = rows[columns[rows] >= 0]
            heads.transpose(1, 2)[stream[marked], columns[marked]] = True
    return read.to(call.queries.device)
