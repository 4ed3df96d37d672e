# SPDX-License-Identifier: Apache-2.0
"""Observers of the attention that stored pairs receive."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache import attention
from kvpress.cache.attention import group_queries
from kvpress.cache.segment import DenseSegment
from kvpress.cache.window import RealTokens
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, hashed


def flat_mass(call: LayerCall, weights: Tensor | None = None) -> Tensor | None:
    """Attention `[B, H, length]` that the pairs of the window receive, by the kernels, which take it as flat rows.

    Every query counts `weights [N, G * n]`, 1 by default. None where the kernels do not run or padding is not on the left,
    which is no part of a stream.
    """
    store, window, length = call.store, call.store.window, call.queries.shape[2]
    pads = window.pads(None if call.tokens.mask is None else RealTokens(call.tokens.mask), window.length)
    if pads is None or not kernels.available(window.keys):
        return None
    part = window.part(pads)
    assert isinstance(part.where, kernels.Ranges)  # noqa: S101 - for type checkers
    sinks = None
    if call.lse is None and call.sinks is not None:
        sinks = call.sinks.float().view(store.heads, -1).repeat(store.batch, 1).repeat_interleave(length, dim=1)
    mass = kernels.column_mass(
        group_queries(call.queries, store.heads),
        part.rows,
        part.where,
        kernels.Options(call.logits.scale, call.logits.softcap, length, sinks),
        lse=call.lse,
        query_weight=weights,
    )
    return mass.view(store.batch, store.heads, -1)[..., : window.length]


class AttentionMass(Observer):
    """Attention that every stored pair has received from all queries so far: side array `mass`, float32.

    Summed over the query heads of the group; `queries` counts the tokens whose attention was added. No matrix of queries x
    keys is ever held: queries are taken in blocks. Every query multiplies what earlier ones gave by `decay`, so that a query
    counts decay ** (number of later queries).
    """

    sums_attention = True

    def __init__(self, decay: float = 1.0) -> None:
        self.queries = 0
        self.decay = decay
        self.sides = ("mass",) if decay == 1 else (f"mass decayed by {decay}",)

    def observe(self, call: LayerCall) -> None:
        (name,), store, length = self.sides, call.store, call.queries.shape[2]
        self.queries += length
        # A token on its own is never padding.
        real = (
            None if call.tokens.mask is None or length == 1 else call.tokens.mask[:, -length:].to(call.queries.device)
        )
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
        mass = flat_mass(call, weights)
        mass = self._blocked_mass(call, weights) if mass is None else mass
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

    def _blocked_mass(self, call: LayerCall, weights: Tensor | None) -> Tensor:
        window, length = call.store.window, call.queries.shape[2]
        streams, groups = call.store.batch * call.store.heads, call.queries.shape[1] // call.store.heads
        block = max(1, attention.BLOCK_BYTES // (4 * streams * groups * max(1, window.length)))
        received = torch.zeros(streams, window.length, device=call.queries.device)
        keys, own = window.filled_keys.flatten(0, 1), window.filled_log_weight
        own = None if own is None else own.flatten(0, 1)
        real = None if call.tokens.mask is None else call.tokens.mask.to(received.device)
        newest = window.length - length
        shape = (streams, groups, length)
        lse = None if call.lse is None else call.lse.view(shape)
        counts = None if weights is None else weights.view(shape)
        for start in range(0, length, block):
            rows = slice(start, start + block)
            part = call.queries[:, :, rows]
            count = part.shape[2]
            scores = call.logits(group_queries(part, call.store.heads), keys, own).view(streams, groups, count, -1)
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


class ProbeAttention(Observer):
    """Attention that pairs which are not encoded yet receive from probe queries: side arrays `saliency` and `probes`, float32.

    `saliency` sums the weights over the query heads of the group, `probes` counts the probes that could see the pair. Of the n
    tokens of a prompt, `share / 2` are probes because they are the newest and `share / 2` by a hash of their position, so
    that a row's probes depend neither on its batch nor on the chunks it is read in; single tokens always are.
    """

    sides = ("saliency", "probes")

    def __init__(self, share: float) -> None:
        self.share = share
        self.start = self.end = 0

    def observe(self, call: LayerCall) -> None:
        window, length = call.store.window, call.queries.shape[2]
        end = max(call.tokens.seen_before + length, call.tokens.prompt_end)
        if end != self.end:
            self.start, self.end = call.tokens.seen_before, end
        if self.end - self.start == 1 and self._add_token(call):
            return
        for name in self.sides:
            held = window.side.get(name)
            shape, device = window.filled_keys.shape[:3], window.keys.device
            window.side[name] = torch.zeros(*shape, device=device) if held is None else held.clone()
        # Of queries that are no probes the log-sum-exp is infinite: they give nothing.
        lse = torch.full(call.queries.shape[:3], torch.inf, device=call.queries.device)
        asking = torch.zeros(call.store.batch, dtype=torch.long)
        for rows, probes in self._rows(call):
            self._add(call, rows, probes, lse)
            asking[rows] = len(probes)
        if call.store.dense is not None:
            self._add_dense(call, call.store.dense, asking, lse)

    def _add_token(self, call: LayerCall) -> bool:
        """Add the attention of a single token by the kernels; False where that takes more."""
        store, window = call.store, call.store.window
        if call.lse is None or call.window_lse is not None or (received := flat_mass(call)) is None:
            return False
        seen = torch.ones_like(received)
        if call.tokens.mask is not None:
            seen *= call.tokens.mask[:, None, window.first : window.first + window.length].to(seen.device)
        for name, new in zip(self.sides, (received, seen), strict=True):
            window.side[name] = window.side[name] + new if name in window.side else new
        if store.dense is not None:
            self._add_dense(call, store.dense, torch.ones(store.batch, dtype=torch.long), call.lse)
        return True

    def _rows(self, call: LayerCall) -> Iterator[tuple[slice, Tensor]]:
        """Rows of the batch, and which tokens of this pass are their probes."""
        length = call.queries.shape[2]
        if call.tokens.mask is None or length == 1:
            yield slice(0, call.store.batch), self._probes(call.tokens.seen_before, length)
            return
        real = call.tokens.mask.sum(dim=1), call.tokens.mask[:, -length:].sum(dim=1)
        for row, (seen, new) in enumerate(zip(*(part.tolist() for part in real), strict=True)):
            if new:
                pads = call.store.seen - seen
                yield slice(row, row + 1), length - new + self._probes(seen - new, new, pads)

    def _probes(self, before: int, tokens: int, pads: int = 0) -> Tensor:
        """Indexes of the probes among `tokens` new ones after `before` others, ascending, in a row with so many pads."""
        order = torch.arange(tokens)
        if self.share == 1 or self.end - self.start == 1:
            return order
        whole = self.end - max(self.start, pads)
        recent = before + order >= self.end - pads - max(1, round(self.share / 2 * whole))
        return (recent | (hashed(before + order) < self.share / 2)).nonzero().flatten()

    def _add(self, call: LayerCall, rows: slice, probes: Tensor, lse: Tensor) -> None:
        """Add the attention of the probes, indexes into this pass, in some batch rows, and note their `lse [B, Hq, Q]`."""
        window, device = call.store.window, call.queries.device
        keys, own = window.filled_keys[rows], window.filled_log_weight
        batch, heads, length, _ = keys.shape
        at = probes.to(device) + length - call.queries.shape[2]
        block = max(1, attention.BLOCK_BYTES // (4 * batch * call.queries.shape[1] * max(1, length)))
        for part in torch.arange(len(probes)).split(block) if len(probes) else ():
            newest, chosen = at[part], probes[part].to(device)
            queries = call.queries[rows][:, :, chosen].reshape(batch, heads, -1, call.queries.shape[-1])
            scores = call.logits(queries, keys, None if own is None else own[rows])
            scores = scores.view(batch, heads, -1, len(part), length)
            visible = (torch.arange(length, device=device) <= newest[:, None]).expand(batch, -1, -1)
            if call.tokens.mask is not None:
                real = call.tokens.mask[rows, window.first : window.first + length].to(device)
                visible = visible & real[:, None]
            scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
            whole = call.lse_of(rows, chosen, scores)
            weights = torch.exp(scores - whole[..., None])
            lse[rows, :, chosen] = whole.flatten(1, 2)
            window.side["saliency"][rows] += weights.sum(dim=(2, 3))
            window.side["probes"][rows] += visible.sum(dim=1)[:, None]

    def _add_dense(self, call: LayerCall, dense: DenseSegment, asking: Tensor, lse: Tensor) -> None:
        """Add the attention of probes, `asking [B]` of them, to the dense pairs behind the window, all of which they see."""
        store = call.store
        received = dense.mass(
            group_queries(call.queries, store.heads), call.logits, lse.view(store.batch * store.heads, -1)
        )
        of_rows = asking if store.batch == 1 else asking[dense.layout.stream_of_row // store.heads]
        seen = of_rows.to(received.device)
        for name, new in zip(self.sides, (received, seen), strict=True):
            dense.side[name] = dense.side_array(name) + new
