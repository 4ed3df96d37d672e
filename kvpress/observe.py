"""What presses watch while a model reads: observers, one per layer of a cache.

An observer sees the queries of every forward pass as the attention function got them, which is exact for every model
(fused projections, query norms, any rotary embedding) and costs no second projection. Scorers read observers when
they score; all of their state lives in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvpress import attention, kernels
from kvpress.attention import group_queries
from kvpress.cache.window import left_padding

if TYPE_CHECKING:
    from kvpress.context import LayerCall


class Observer(ABC):
    """State of one layer that grows with every forward pass.

    `sides` names the per-pair arrays that it records, which move with the pairs, `held` its own tensors `[B, ...]`, None while
    there is nothing to hold.
    """

    sides: ClassVar[tuple[str, ...]] = ()
    held: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def observe(self, call: LayerCall) -> None:
        """Take in one forward pass, after its attention."""

    def tensors(self) -> list[Tensor]:
        """Tensors held, for the memory report."""
        return [tensor for name in self.held if (tensor := getattr(self, name)) is not None]

    def select_rows(self, rows: Tensor) -> None:
        """Keep the given batch rows, in that order."""
        self._replace(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def to(self, device: torch.device | str) -> None:
        """Move the state to a device."""
        self._replace(lambda tensor: tensor.to(device))

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in self.held:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))

    def crop(self, tokens: int) -> None:
        """Forget the newest tokens; refused where that cannot be undone."""
        if tokens:
            raise NotImplementedError(f"{type(self).__name__} cannot take back tokens; copy the cache before them")


class RecentQueries(Observer):
    """The newest `size` queries, after rotation: `queries [B, Hq, <= size, D]`."""

    held = ("queries",)

    def __init__(self, size: int) -> None:
        self.size = size
        self.queries: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        new = call.queries[:, :, -self.size :]
        if self.queries is not None and new.shape[2] < self.size:
            new = torch.cat([self.queries[:, :, new.shape[2] - self.size :], new], dim=2)
        # A copy of the tail: a view would keep the queries of the whole prompt alive.
        self.queries = new.clone(memory_format=torch.contiguous_format)

    def crop(self, tokens: int) -> None:
        if tokens and self.queries is not None:
            self.queries = self.queries[:, :, : max(0, self.queries.shape[2] - tokens)]


class ColumnMass(Observer):
    """Attention that every stored pair has received from all queries so far: side array `mass`, float32.

    Summed over the query heads of the group; `queries` counts the tokens whose attention was added. No matrix of queries x
    keys is ever held: queries are taken in blocks. Every query multiplies what earlier ones gave by `decay`.
    """

    sides = ("mass",)
    decay = 1.0

    def __init__(self) -> None:
        self.queries = 0

    def observe(self, call: LayerCall) -> None:
        (name,), store, length = self.sides, call.store, call.queries.shape[2]
        self.queries += length
        # A token on its own is never padding.
        real = None if call.columns is None or length == 1 else call.columns[:, -length:].to(call.queries.device)
        weights = self._weights(call, real)
        device = call.queries.device
        fade = torch.full((1,), self.decay**length, device=device) if real is None else self.decay ** real.sum(dim=1)
        for segment in store.sealed:
            row = segment.layout.stream_of_row // store.heads if len(fade) > 1 else slice(None)
            # w * exp(x - lse) = exp(x - (lse - log w)); a pass over sealed pairs always leaves its log-sum-exp.
            lse = call.whole_lse if weights is None else call.whole_lse - weights.log()
            received = segment.mass(group_queries(call.queries, store.heads), call.logits, lse)
            segment.side[name] = segment.side_array(name) * fade[row] + received
        window = store.window
        mass = self._window_mass(call, weights)
        window.side[name] = mass + window.side[name] * fade[:, None, None] if name in window.side else mass

    def _weights(self, call: LayerCall, real: Tensor | None) -> Tensor | None:
        """How much every query counts, `[N, G * n]`: decay ** (later real queries of the pass), 0 for padding; None for 1."""
        length, streams = call.queries.shape[2], call.store.batch * call.store.heads
        if real is None and self.decay == 1:
            return None
        if real is None:
            later = torch.arange(length - 1, -1, -1, device=call.queries.device)
            weights = (self.decay**later).expand(call.store.batch, -1)
        else:
            weights = self.decay ** (real.flip(1).cumsum(dim=1).flip(1) - 1) * real
        per_head = call.queries.shape[1]
        return weights[:, None].expand(-1, per_head, -1).reshape(streams, -1)

    def _window_mass(self, call: LayerCall, weights: Tensor | None) -> Tensor:
        window = call.store.window
        real = None if call.columns is None else call.columns[:, window.first : window.first + window.length]
        pads = None if real is None else left_padding(real)
        if (real is None or pads is not None) and kernels.available(window.keys):
            return self._flat_mass(call, pads, weights)
        return self._blocked_mass(call, weights)

    def _flat_mass(self, call: LayerCall, pads: Tensor | None, weights: Tensor | None) -> Tensor:
        """The window as flat rows; padding is not part of a stream."""
        store, window, length = call.store, call.store.window, call.queries.shape[2]
        sinks = None
        if call.lse is None and call.sinks is not None:
            sinks = call.sinks.float().view(store.heads, -1).repeat(store.batch, 1).repeat_interleave(length, dim=1)
        mass = kernels.column_mass(
            group_queries(call.queries, store.heads),
            window.keys.flatten(0, 2),
            *window.streams(pads),
            call.logits.scale,
            lse=call.lse,
            softcap=call.logits.softcap,
            causal=length,
            sinks=sinks,
            row_weights=weights,
        )
        return mass.view(store.batch, store.heads, -1)[..., : window.length]

    def _blocked_mass(self, call: LayerCall, weights: Tensor | None) -> Tensor:
        window, length = call.store.window, call.queries.shape[2]
        streams, groups = call.store.batch * call.store.heads, call.queries.shape[1] // call.store.heads
        block = max(1, attention.BLOCK_BYTES // (4 * streams * groups * max(1, window.length)))
        received = torch.zeros(streams, window.length, device=call.queries.device)
        keys = window.filled_keys.flatten(0, 1)
        real = None if call.columns is None else call.columns.to(received.device)
        newest = window.length - length
        shape = (streams, groups, length)
        lse = None if call.lse is None else call.lse.view(shape)
        counts = None if weights is None else weights.view(shape)
        for start in range(0, length, block):
            rows = slice(start, start + block)
            part = call.queries[:, :, rows]
            count = part.shape[2]
            scores = call.logits(group_queries(part, call.store.heads), keys).view(streams, groups, count, -1)
            at = torch.arange(newest + start, newest + start + count, device=keys.device)
            visible = torch.arange(window.length, device=keys.device) <= at[:, None]
            scores = scores.masked_fill(~visible, float("-inf"))
            if real is not None:
                seen = real[:, window.first : window.first + window.length]
                seen = seen.repeat_interleave(call.store.heads, dim=0)
                scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
            paid = call.softmax(scores) if lse is None else torch.exp(scores - lse[:, :, rows, None])
            paid = paid.nan_to_num_(0.0)  # of padding, which sees nothing
            received += (paid if counts is None else paid * counts[:, :, rows, None]).sum(dim=(1, 2))
        return received.view(call.store.batch, call.store.heads, -1)


class DecayedMass(ColumnMass):
    """As `ColumnMass` with a decay, side array `decayed_mass`: a query counts decay ** (number of later queries)."""

    sides = ("decayed_mass",)

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay


class ProbeAttention(Observer):
    """Attention that the pairs in the window receive from probe queries: side arrays `saliency` and `probes`, float32.

    `saliency` sums the weights over the query heads of the group, `probes` counts the probes that could see the pair. Of a
    pass of n tokens, `share / 2` are probes because they are the newest and `share / 2` by a hash of their position, so
    that a row's probes depend neither on its batch nor on how often it was read; single tokens always are.
    """

    sides = ("saliency", "probes")

    def __init__(self, share: float) -> None:
        self.share = share

    def observe(self, call: LayerCall) -> None:
        window, length = call.store.window, call.queries.shape[2]
        for name in self.sides:
            if name not in window.side:
                window.side[name] = torch.zeros(*window.filled_keys.shape[:3], device=window.keys.device)
        if call.columns is None or length == 1:
            self._add(call, slice(0, call.store.batch), self._probes(call.seen_before, length))
            return
        real = call.columns.sum(dim=1), call.columns[:, -length:].sum(dim=1)
        for row, (seen, new) in enumerate(zip(*(part.tolist() for part in real), strict=True)):
            self._add(call, slice(row, row + 1), length - new + self._probes(seen - new, new))

    def _probes(self, before: int, tokens: int) -> Tensor:
        """Indexes of the probes among `tokens` new ones after `before` others, ascending."""
        order = torch.arange(tokens)
        if self.share == 1:
            return order
        recent = order >= tokens - max(1, round(self.share / 2 * tokens))
        return (recent | (hashed(before + order) < self.share / 2)).nonzero().flatten()

    def _add(self, call: LayerCall, rows: slice, probes: Tensor) -> None:
        """Add the attention of the probes, indexes into this pass, in some batch rows."""
        window, device = call.store.window, call.queries.device
        keys = window.filled_keys[rows]
        batch, heads, length, _ = keys.shape
        at = probes.to(device) + length - call.queries.shape[2]
        known = None if call.lse is None else call.lse.view(call.store.batch, heads, -1, call.queries.shape[2])[rows]
        block = max(1, attention.BLOCK_BYTES // (4 * batch * call.queries.shape[1] * max(1, length)))
        for part in torch.arange(len(probes)).split(block):
            newest, chosen = at[part], probes[part].to(device)
            queries = call.queries[rows][:, :, chosen].reshape(batch, heads, -1, call.queries.shape[-1])
            scores = call.logits(queries, keys).view(batch, heads, -1, len(part), length)
            visible = (torch.arange(length, device=device) <= newest[:, None]).expand(batch, -1, -1)
            if call.columns is not None:
                real = call.columns[rows, window.first : window.first + length].to(device)
                visible = visible & real[:, None]
            scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
            lse = scores.logsumexp(-1) if known is None else known[..., chosen]
            if known is None and call.sinks is not None:
                lse = torch.logaddexp(lse, call.sinks.float().view(1, heads, -1, 1).to(device))
            weights = torch.exp(scores - lse[..., None])
            window.side["saliency"][rows] += weights.sum(dim=(2, 3))
            window.side["probes"][rows] += visible.sum(dim=1)[:, None]


def hashed(numbers: Tensor) -> Tensor:
    """Spread non-negative integers over [0, 1), the same ones to the same place."""
    mixed = (numbers * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)).double() / 2**32


class QueryStats(Observer):
    """Mean and covariance of the queries before rotation, per query head, over all real tokens but the first `skip`.

    Running moments, float32: `count [B]`, `mean [B, Hq, D]` and `spread [B, Hq, D, D]`, the sum of centred products.
    Centred, because the mean of queries is often far larger than their deviation.
    """

    held = ("count", "mean", "spread")

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.count: Tensor | None = None
        self.mean: Tensor | None = None
        self.spread: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        block = max(1, attention.BLOCK_BYTES // (4 * call.queries[:, :, :1].numel()))
        for part in passes(call, block):
            new = _moments(part.unrotate(part.queries.float()), self._counted(part))
            self.count, self.mean, self.spread = _pool(self.tensors(), new) if self.tensors() else new

    def _counted(self, call: LayerCall) -> Tensor:
        """Mark the queries of a pass that count, float32 `[B, n]`."""
        batch, _, length, _ = call.queries.shape
        device = call.queries.device
        if call.columns is None:
            order = torch.arange(call.seen_before, call.seen_before + length, device=device)
            return (order >= self.skip).float().expand(batch, -1)
        real = call.columns.to(device)
        return (real & (real.cumsum(dim=1) > self.skip))[:, -length:].float()

    def moments(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Return `(mean [b, Hq, D], covariance [b, Hq, D, D])` of the given batch rows."""
        if self.count is None:
            raise ValueError("no queries have been observed yet")
        count, mean, spread = (tensor[rows] for tensor in self.tensors())
        return mean, spread / count.clamp_min(1.0)[:, None, None, None]


def passes(call: LayerCall, size: int) -> Iterator[LayerCall]:
    """Cut a pass into passes of at most `size` tokens, for observers that need queries turned back or in float32."""
    length = call.queries.shape[2]
    if length <= size:
        yield call
        return
    embeddings = call.kwargs.get("position_embeddings")
    for start in range(0, length, size):
        tokens = slice(start, min(start + size, length))
        kwargs = dict(call.kwargs)
        if embeddings is not None:
            kwargs["position_embeddings"] = tuple(part[:, tokens] for part in embeddings)
        seen = call.seen_before + tokens.stop
        yield replace(
            call,
            queries=call.queries[:, :, tokens],
            kwargs=kwargs,
            seen_before=call.seen_before + start,
            columns=None if call.columns is None else call.columns[:, :seen],
        )


def _moments(vectors: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and summed centred products of `vectors [B, Hq, n, D]` under `weights [B, n]` of 0 and 1."""
    count, weights = weights.sum(dim=1), weights[:, None, :, None]
    mean = (vectors * weights).sum(dim=2) / count.clamp_min(1.0)[:, None, None]
    centred = (vectors - mean[:, :, None]) * weights
    return count, mean, centred.transpose(-1, -2) @ centred


def _pool(old: Sequence[Tensor], new: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of two disjoint sets as one."""
    count = old[0] + new[0]
    share = (new[0] / count.clamp_min(1.0))[:, None, None]
    step = new[1] - old[1]
    mean = old[1] + share * step
    between = (old[0][:, None, None] * share)[..., None] * step[..., :, None] * step[..., None, :]
    return count, mean, old[2] + new[2] + between


class HiddenStates(Observer):
    """The attention input of the prompt, then of the newest `size` tokens: `states [B, n, hidden]`.

    Kept only for presses that compute their score from hidden states, as presses written for NVIDIA kvpress may.
    """

    held = ("states",)

    def __init__(self, size: int = 256) -> None:
        self.size = size
        self.states: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        old = None if self.states is None else self.states
        self.states = call.hidden_states if old is None else torch.cat([old, call.hidden_states], dim=1)
        if call.phase == "decode":
            self.states = self.states[:, -self.size :].clone()
