"""Attention within chunks of the prompt, in both directions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d

from kvpress import attention
from kvpress.checks import check_count
from kvpress.context import LayerCall, View
from kvpress.observe import Observer
from kvpress.presses.base import Observers, ScorerPress, view_of
from kvpress.registry import register


@register("non_causal_attn", "evict", "Chari & Van Durme, 2025, arXiv:2507.08143")
@dataclass
class NonCausalAttnPress(ScorerPress):
    """Score a pair by the attention that all tokens of its chunk, later and earlier ones, pay it, times its value's norm.

        a[b, h, t] = sum over i in the chunk of t of softmax over the chunk (q_i . k)[t], mean over the group
        score      = avg_pool(a * ||v||, 3)

    Chunks are `chunk_size` real tokens of a row, counted from where the prompt, or the turn, begins. Pairs that were not
    read in this turn have no such attention and count as average, a = 1.

    Paper: the attention part of Compactor, Chari & Van Durme, 2025, arXiv:2507.08143.
    Differs from the paper: logits are the model's own, with its scale, soft cap and attention sinks; the sums are not
    standardised, which would change no choice among the pairs of a head.
    """

    chunk_size: int = 256

    def validate(self) -> None:
        super().validate()
        check_count("chunk_size", self.chunk_size)

    def observers(self) -> Observers:
        return {**super().observers(), "chunks": partial(ChunkMass, self.chunk_size)}

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict,
    ) -> Tensor:  # fmt: skip
        """Return `[b, h, n]`."""
        return chunk_attention(view_of(kwargs))


def chunk_attention(view: View) -> Tensor:
    """Return the smoothed attention times value norm of every pair of a view, `[b, h, n]`."""
    norms = view.values.float().norm(dim=-1)
    mass = view.side.get("chunk_mass", torch.zeros_like(norms))
    mass = mass.masked_fill(mass == 0, 1.0)
    return avg_pool1d(mass * norms, 3, stride=1, padding=1, count_include_pad=False)


class ChunkMass(Observer):
    """Attention that pairs receive within chunks of `size` real tokens: side array `chunk_mass`, 0 where none was read.

    The last chunk counts as far as it has been read and is computed again when more of it comes, so that reading a prompt
    in pieces ends with what reading it at once gives. What was read without a break are the columns `first` to `end`;
    `queries [B, Hq, < size, D]` are the newest, those of open chunks among them.
    """

    sides = ("chunk_mass",)
    held = ("queries",)

    def __init__(self, size: int) -> None:
        self.size = size
        self.first = self.end = 0
        self.queries: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        if call.phase == "decode":
            return
        window, queries = call.store.window, call.queries
        if self.queries is None or call.seen_before != self.end or window.first > self.first:
            self.first = call.seen_before
        elif self.queries.shape[2]:
            queries = torch.cat([self.queries, queries], dim=2)
        self.end = call.store.seen
        counts = self._real(call, call.seen_before), self._real(call, self.end)
        groups: dict[int, list[int]] = {}
        for row, (before, now) in enumerate(zip(*counts, strict=True)):
            groups.setdefault(before % self.size + now - before, []).append(row)
        if "chunk_mass" not in window.side:
            window.side["chunk_mass"] = torch.zeros(*window.filled_keys.shape[:3], device=queries.device)
        for tokens, rows in groups.items():
            if tokens:
                window.side["chunk_mass"][rows, :, -tokens:] = self._mass(call, queries, rows, tokens)
        rest = max(count % self.size for count in counts[1])
        self.queries = queries[:, :, queries.shape[2] - rest :].clone(memory_format=torch.contiguous_format)

    def _real(self, call: LayerCall, end: int) -> list[int]:
        """Real tokens of each row in the columns from `first` to `end`."""
        if call.columns is None:
            return [end - self.first] * call.store.batch
        return call.columns[:, self.first : end].sum(dim=1).tolist()

    def _mass(self, call: LayerCall, queries: Tensor, rows: list[int], tokens: int) -> Tensor:
        """Return what the newest `tokens` of some rows, which start with a chunk, receive: `[b, H, tokens]`."""
        whole = tokens // self.size * self.size
        step = self.size * max(1, attention.BLOCK_BYTES // (4 * len(rows) * queries.shape[1] * self.size**2))
        edges = [*range(0, whole, step), whole, *([tokens] if tokens > whole else [])]
        received = []
        for start, stop in itertools.pairwise(edges):
            asking = queries[:, :, queries.shape[2] - tokens :][:, :, start:stop][rows]
            asked = call.store.window.filled_keys[:, :, -tokens:][:, :, start:stop][rows]
            received.append(self._chunks(call, asking, asked, min(self.size, stop - start)))
        return torch.cat(received, dim=2)

    def _chunks(self, call: LayerCall, queries: Tensor, keys: Tensor, size: int) -> Tensor:
        """Return what the tokens of full chunks receive, `[b, H, n]`, from `queries [b, Hq, n, D]` on `keys [b, H, n, D]`."""
        batch, heads, length, dim = keys.shape
        groups, chunks = queries.shape[1] // heads, length // size
        rows = queries.reshape(batch, heads, groups, chunks, size, dim).transpose(2, 3).reshape(-1, groups * size, dim)
        keys = keys.reshape(-1, size, dim)
        received = torch.zeros(keys.shape[:2], device=keys.device)
        for block in attention.query_blocks(rows, keys):
            scores = call.logits(rows[:, block], keys)
            total = scores.logsumexp(dim=2)
            if call.sinks is not None:
                sinks = call.sinks.float().view(1, heads, 1, groups, 1).expand(batch, -1, chunks, -1, size)
                total = torch.logaddexp(total, sinks.reshape(len(rows), -1)[:, block])
            received += torch.exp(scores - total[..., None]).sum(dim=1)
        # 0 stands for pairs that were not read.
        received = (received / groups).clamp_min(torch.finfo(torch.float32).tiny)
        return received.view(batch, heads, length)
