# SPDX-License-Identifier: Apache-2.0
"""Observers of the attention that stored pairs receive."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache import attention
from kvpress.cache.attention import group_queries
from kvpress.cache.segment import DenseSegment
from kvpress.cache.window import RealTokens
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, hashed
from kvpress.observe.queries import new_real_tokens


def flat_mass(call: LayerCall, weights: Tensor | None = None) -> Tensor | None:
    """Compute the attention `[B, H, length]` that the pairs of the window receive, by the kernels.

    Each query counts with its weight in `weights [N, G * n]`, 1 by default. Returns None where the kernels do not run, or where
    padding is not on the left, so that the window does not view as flat rows.
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
    """Attention that every stored pair has received from all queries so far: per-pair array `mass`, float32.

    Summed over the query heads of the GQA group; `queries` is the number of columns whose attention was added, of which
    `padding [B]` are padding. Queries are read in blocks, so that no matrix of queries x keys is stored. Each query multiplies
    the sum by `decay` before its own attention is added, so that a query counts decay ** (number of later queries).
    """

    state_names = ("padding",)
    sums_attention = True
    padding: Tensor | None = None

    def __init__(self, decay: float = 1.0) -> None:
        self.queries = 0
        self.decay = decay
        self.sides = ("mass",) if decay == 1 else (f"mass decayed by {decay}",)

    def observe(self, call: LayerCall) -> None:
        (name,), store, length = self.sides, call.store, call.queries.shape[2]
        self.queries += length
        real = new_real_tokens(call)
        if self.padding is None:
            self.padding = torch.zeros(store.batch, dtype=torch.long, device=call.queries.device)
        if real is not None:
            self.padding = self.padding + (~real).sum(dim=1)
        weights = self._weights(call, real)
        device = call.queries.device
        fade = torch.full((1,), self.decay**length, device=device) if real is None else self.decay ** real.sum(dim=1)
        for segment in store.sealed:
            row = segment.layout.stream_of_row // store.heads if len(fade) > 1 else slice(None)
            # w * exp(x - lse) = exp(x - (lse - log w)); a pass over sealed pairs always stores its log-sum-exp.
            lse = call.whole_lse if weights is None else call.whole_lse - weights.log()
            received = segment.mass(group_queries(call.queries, store.heads), call.logits, lse)
            segment.side[name] = segment.side_array(name) * fade[row] + received
        window = store.window
        mass = flat_mass(call, weights)
        mass = self._blocked_mass(call, weights) if mass is None else mass
        window.side[name] = mass + window.side[name] * fade[:, None, None] if name in window.side else mass

    def joined(self, observers: Sequence[AttentionMass], seen: int) -> AttentionMass:
        del seen
        twin = copy.copy(self)
        twin.queries = max(observer.queries for observer in observers)
        paddings = [o.padding + (twin.queries - o.queries) for o in observers if o.padding is not None]
        twin.padding = torch.cat(paddings) if len(paddings) == len(observers) else None
        return twin

    def observed(self, rows: list[int], device: torch.device) -> Tensor:
        """Return the number of real tokens of some rows whose attention was added, `[b]`."""
        if self.padding is None:
            return torch.tensor([self.queries] * len(rows), device=device)
        return (self.queries - self.padding.to(device))[rows]

    def _weights(self, call: LayerCall, real: Tensor | None) -> Tensor | None:
        """Return query weights `[N, G * n]`: decay ** (later real queries of the pass), 0 for padding; None if all are 1."""
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
        keys, log_weight = window.filled_keys.flatten(0, 1), window.filled_log_weight
        log_weight = None if log_weight is None else log_weight.flatten(0, 1)
        real = None if call.tokens.mask is None else call.tokens.mask.to(received.device)
        newest = window.length - length
        shape = (streams, groups, length)
        lse = None if call.lse is None else call.lse.view(shape)
        counts = None if weights is None else weights.view(shape)
        for start in range(0, length, block):
            rows = slice(start, start + block)
            query_block = call.queries[:, :, rows]
            count = query_block.shape[2]
            scores = call.logits(group_queries(query_block, call.store.heads), keys, log_weight).view(
                streams, groups, count, -1
            )
            newest_ranks = torch.arange(newest + start, newest + start + count, device=keys.device)
            visible = torch.arange(window.length, device=keys.device) <= newest_ranks[:, None]
            scores = scores.masked_fill(~visible, float("-inf"))
            if real is not None:
                seen = real[:, window.first : window.first + window.length]
                seen = seen.repeat_interleave(call.store.heads, dim=0)
                scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
            weight_block = call.softmax(scores) if lse is None else torch.exp(scores - lse[:, :, rows, None])
            weight_block = weight_block.nan_to_num_(0.0)  # queries of padding see no pair
            received += (weight_block if counts is None else weight_block * counts[:, :, rows, None]).sum(dim=(1, 2))
        return received.view(call.store.batch, call.store.heads, -1)


class ProbeAttention(Observer):
    """Attention of probe queries on the dense pairs: per-pair arrays `saliency` and `probes`, float32.

    `saliency` sums attention weights over the query heads of the GQA group; `probes` counts the probes that can see the pair.
    The newest `share / 2` of a prompt's tokens are probes, and another `share / 2` chosen by a hash of their position, so that
    the probes of a row depend neither on its batch nor on the chunks of its prompt. A single token is always a probe.
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
            recorded = window.side.get(name)
            shape, device = window.filled_keys.shape[:3], window.keys.device
            window.side[name] = torch.zeros(*shape, device=device) if recorded is None else recorded.clone()
        # An infinite log-sum-exp makes the attention of all other queries zero.
        lse = torch.full(call.queries.shape[:3], torch.inf, device=call.queries.device)
        num_probes = torch.zeros(call.store.batch, dtype=torch.long)
        for rows, probes in self._rows(call):
            self._add(call, rows, probes, lse)
            num_probes[rows] = len(probes)
        if call.store.dense is not None:
            self._add_dense(call, call.store.dense, num_probes, lse)

    def joined(self, observers: Sequence[ProbeAttention], seen: int) -> ProbeAttention:
        del observers
        twin = copy.copy(self)
        twin.start = twin.end = seen
        return twin

    def _add_token(self, call: LayerCall) -> bool:
        """Add the attention of a single token by the kernels; return False where they cannot."""
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
        """Yield rows of the batch and the indices of their probes in this pass."""
        length = call.queries.shape[2]
        mask = call.tokens.mask
        if mask is None or length == 1:
            yield slice(0, call.store.batch), self._probes(call.tokens.seen_before, length, self.start, self.end)
            return
        counts = [mask[:, begin:].sum(dim=1).tolist() for begin in (0, mask.shape[1] - length, self.start)]
        for row, (seen, new, of_turn) in enumerate(zip(*counts, strict=True)):
            if new:
                end = self.end - call.store.seen + seen
                yield slice(row, row + 1), length - new + self._probes(seen - new, new, seen - of_turn, end)

    def _probes(self, before: int, tokens: int, start: int, end: int) -> Tensor:
        """Return indices of the probes, ascending, among `tokens` new tokens after `before` earlier ones of a row.

        The turn consists of the tokens `start` to `end - 1` of the row; padding does not count in any of these numbers.
        """
        order = torch.arange(tokens)
        if self.share == 1 or self.end - self.start == 1:
            return order
        recent = before + order >= end - max(1, round(self.share / 2 * (end - start)))
        return (recent | (hashed(before + order) < self.share / 2)).nonzero().flatten()

    def _add(self, call: LayerCall, rows: slice, probes: Tensor, lse: Tensor) -> None:
        """Add the attention of probes, indices into this pass, in some batch rows; write log-sum-exps to `lse [B, Hq, Q]`."""
        window, device = call.store.window, call.queries.device
        keys, log_weight = window.filled_keys[rows], window.filled_log_weight
        batch, heads, length, _ = keys.shape
        ranks = probes.to(device) + length - call.queries.shape[2]
        block = max(1, attention.BLOCK_BYTES // (4 * batch * call.queries.shape[1] * max(1, length)))
        for block_indices in torch.arange(len(probes)).split(block) if len(probes) else ():
            newest, chosen = ranks[block_indices], probes[block_indices].to(device)
            queries = call.queries[rows][:, :, chosen].reshape(batch, heads, -1, call.queries.shape[-1])
            scores = call.logits(queries, keys, None if log_weight is None else log_weight[rows])
            scores = scores.view(batch, heads, -1, len(block_indices), length)
            visible = (torch.arange(length, device=device) <= newest[:, None]).expand(batch, -1, -1)
            if call.tokens.mask is not None:
                real = call.tokens.mask[rows, window.first : window.first + length].to(device)
                visible = visible & real[:, None]
            scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
            block_lse = call.lse_of(rows, chosen, scores)
            weights = torch.exp(scores - block_lse[..., None])
            lse[rows, :, chosen] = block_lse.flatten(1, 2)
            window.side["saliency"][rows] += weights.sum(dim=(2, 3))
            window.side["probes"][rows] += visible.sum(dim=1)[:, None]

    def _add_dense(self, call: LayerCall, dense: DenseSegment, num_probes: Tensor, lse: Tensor) -> None:
        """Add the attention of `num_probes [B]` probes to the sealed dense pairs, all of which they can see."""
        store = call.store
        received = dense.mass(
            group_queries(call.queries, store.heads), call.logits, lse.view(store.batch * store.heads, -1)
        )
        probes_of_pair = num_probes if store.batch == 1 else num_probes[dense.layout.stream_of_row // store.heads]
        seen = probes_of_pair.to(received.device)
        for name, new in zip(self.sides, (received, seen), strict=True):
            dense.side[name] = dense.side_array(name) + new
