# SPDX-License-Identifier: Apache-2.0
"""Non-causal attention within chunks of the prompt."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvpress import kernels
from kvpress.cache import attention
from kvpress.core.checks import Count, Positive
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.core.scoring import ByScore
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted
from kvpress.observe.view import View


@register(
    "non_causal_attn",
    "evict",
    "Chari & Van Durme, 2025, arXiv:2507.08143",
    example="non_causal_attn:0.5",
    cases=("non_causal_attn:0.5,chunk_size=8",),
)
@dataclass
class NonCausalAttnPress(ScorerPress):
    """Score a pair by the attention of all tokens of its chunk, later and earlier ones, times the norm of its value.

        a[b, h, t] = sum over i in the chunk of t of softmax over the chunk (q_i . k)[t], mean over the group
        score      = avg_pool(a * ||v||, 3)

    Chunks are `chunk_size` real tokens of a row, counted from the start of the prompt or turn. Pairs that were not read in
    this turn have no such attention and get the average, a = 1. `scale` replaces the model's factor of the products q . k;
    1 is that of the authors' code and of NVIDIA kvpress, which do not scale them.

    Paper: the attention part of Compactor, Chari & Van Durme, 2025, arXiv:2507.08143.
    Differs from the paper: logits are the model's own, with its scale unless `scale` is given, soft cap and attention
    sinks; the sums are not standardised, which would change no choice among the pairs of a head.
    """

    chunk_size: Count = 256
    scale: Positive | None = field(default=None, kw_only=True)

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(ChunkMass, self.chunk_size, self.scale),)

    def without_values(self) -> ByScore:
        return ChunkAttention(self)

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`."""
        return chunk_attention(view, self.wants[0])


@dataclass(frozen=True)
class ChunkAttention(ByScore):
    """Score pairs as `press` does, without the norm of the values."""

    press: NonCausalAttnPress
    """Press with the size of chunks and the scale."""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return self.press.wants

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`."""
        return chunk_attention(view, self.wants[0], weigh_values=False)


def chunk_attention(view: View, chunks: Wanted, weigh_values: bool = True) -> Tensor:
    """Return the smoothed attention within `chunks` to all pairs of a view, `[b, h, n]`, times the norms of values."""
    mass = view.recorded(chunks)
    mass = mass.masked_fill(mass == 0, 1.0)
    if weigh_values:
        mass = mass * view.values.float().norm(dim=-1)
    return avg_pool1d(mass, 3, stride=1, padding=1, count_include_pad=False)


class ChunkMass(Observer):
    """Record the attention that pairs receive within chunks of `size` real tokens, in a side array; 0 for unread pairs.

    An incomplete last chunk counts as far as it has been read, and is computed again when more of it is read. Reading a
    prompt in pieces therefore gives the same sums as reading it in one pass. Columns `first` to `end` were read without a
    gap; `queries [B, Hq, < size, D]` are the newest queries, including those of incomplete chunks. Logits are scaled by
    `scale`, None for the model's own factor; the first `skip` tokens of a row are in no chunk.
    """

    state_names = ("queries",)

    def __init__(self, size: int, scale: float | None = None, skip: int = 0) -> None:
        self.size, self.scale, self.skip = size, scale, skip
        self.sides = (f"mass in chunks of {size}, scale {scale}, behind {skip}",)
        self.first = self.end = 0
        self.queries: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        if call.phase == "decode":
            return
        window, queries = call.store.window, call.queries
        has_gap = call.tokens.seen_before != self.end or window.first > self.first or call.follows_eviction
        if self.queries is None or has_gap:
            self.first = call.tokens.seen_before
        elif self.queries.shape[2]:
            queries = torch.cat([self.queries, queries], dim=2)
        self.end = call.store.seen
        counts = self._real(call, call.tokens.seen_before), self._real(call, self.end)
        groups: dict[int, list[int]] = {}
        for row, (before, now) in enumerate(zip(*counts, strict=True)):
            groups.setdefault(before % self.size + now - before, []).append(row)
        (name,) = self.sides
        recorded, shape = window.side.get(name), window.filled_keys.shape[:3]
        window.side[name] = torch.zeros(*shape, device=queries.device) if recorded is None else recorded.clone()
        for tokens, rows in groups.items():
            if tokens:
                window.side[name][rows, :, -tokens:] = self._mass(call, queries, rows, tokens)
        num_open = max(count % self.size for count in counts[1])
        self.queries = queries[:, :, queries.shape[2] - num_open :].clone(memory_format=torch.contiguous_format)

    def _real(self, call: LayerCall, end: int) -> list[int]:
        """Return the number of real tokens of each row that are in chunks, in the columns from `first` to `end`."""
        if call.tokens.mask is None:
            return [max(0, end - max(self.first, self.skip))] * call.store.batch
        before, upto = (call.tokens.mask[:, :columns].sum(dim=1).clamp(min=self.skip) for columns in (self.first, end))
        return (upto - before).tolist()

    def _mass(self, call: LayerCall, queries: Tensor, rows: list[int], tokens: int) -> Tensor:
        """Return the attention `[b, H, tokens]` to the newest `tokens` of some rows; these begin with a chunk."""
        complete = tokens // self.size * self.size
        token_bytes = len(rows) * queries.shape[1] * queries.shape[3] * queries.element_size()
        step = self.size * max(1, attention.BLOCK_BYTES // (self.size * token_bytes))  # bounds the copies below
        edges = [*range(0, complete, step), complete, *([tokens] if tokens > complete else [])]
        received = []
        for start, stop in itertools.pairwise(edges):
            chunk_queries = queries[:, :, queries.shape[2] - tokens :][:, :, start:stop][rows]
            chunk_keys = call.store.window.filled_keys[:, :, -tokens:][:, :, start:stop][rows]
            received.append(self._chunks(call, chunk_queries, chunk_keys, min(self.size, stop - start)))
        return torch.cat(received, dim=2)

    def _chunks(self, call: LayerCall, queries: Tensor, keys: Tensor, size: int) -> Tensor:
        """Return the attention `[b, H, n]` to tokens of complete chunks: `queries [b, Hq, n, D]`, `keys [b, H, n, D]`."""
        batch, heads, length, dim = keys.shape
        groups, chunks = queries.shape[1] // heads, length // size
        rows = queries.reshape(batch, heads, groups, chunks, size, dim).transpose(2, 3).reshape(-1, groups * size, dim)
        sinks = None
        if call.sinks is not None:
            sinks = call.sinks.float().view(1, heads, 1, groups, 1).expand(batch, -1, chunks, -1, size)
            sinks = sinks.reshape(len(rows), -1)
        stored = kernels.Dense(keys.reshape(-1, dim))
        starts = torch.arange(len(rows), device=keys.device) * size
        scale = call.logits.scale if self.scale is None else self.scale
        received = kernels.column_mass(
            rows,
            kernels.Rows(stored, stored),  # values are not read
            kernels.Ranges(starts, torch.full_like(starts, size)),
            kernels.Options(scale, call.logits.softcap, sinks=sinks),
        )
        # 0 is reserved for pairs that were not read.
        return (received / groups).clamp_min(torch.finfo(torch.float32).tiny).view(batch, heads, length)
