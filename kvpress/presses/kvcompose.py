# SPDX-License-Identifier: Apache-2.0
"""Composite tokens: each head keeps its own best pairs, and layers share one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import group_queries
from kvpress.cache.segment_attention import options_of
from kvpress.cache.streams import StoredPairs
from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BudgetPress
from kvpress.core.recipe import Allocator, Eviction, PassHook, Recipe
from kvpress.core.registry import Exemption, register
from kvpress.core.scoring import Scored, top
from kvpress.observe.call import LayerCall
from kvpress.observe.passes import Pass
from kvpress.observe.view import View
from kvpress.presses.repetition import Repetition, set_worth

Aggregate = Literal["max", "mean"]


@register(
    "kvcompose",
    "evict",
    "Akulov et al., 2025, arXiv:2509.05165",
    example="kvcompose:0.5",
    cases=("kvcompose:0.5", "kvcompose:compression_ratio=0.6,structured=false,agg_task=mean,add_v_norm=true"),
    exempt=(Exemption("pairs per layer", "layers share one budget; what is kept is tested against eager attention"),),
)
@dataclass(init=False)
class KVComposePress(BudgetPress):
    """Keep the pairs with the most attention from a second reading of the prompt, in composites of one pair per head.

        a[g, t]  = agg_task over the queries i that read the prompt again of softmax(q_i . k)[t]
        s[h, t]  = agg_group over the query heads of the group of a[g, t]
        c[l, j]  = agg_head over the heads of the layer of the j-th largest s[h, t]

    The best composites (l, j) of all layers stay; where another press has made heads differ in length, short heads have no pair
    in some. If n of them are in a layer, each head of the layer keeps its n best pairs, of any tokens. So the heads of a layer
    are equally long, and layers share the budget. Without `structured`, all pairs of all layers compete by s, and heads differ
    in length. `agg_task`, `agg_group` and `agg_head` are "max" or "mean".
    `add_v_norm` multiplies s by the norm of the value; `add_mean_across_heads` then adds the mean of all heads of the layer.
    `keep_token_lower_bound` is the least number of pairs that a head keeps. The prompt is read again in chunks of `chunk_size`
    tokens, each after the whole prompt, and their pairs are removed again.

    Paper: Akulov et al., KVCompose: Efficient Structured KV Cache Compression with Composite Tokens, 2025, arXiv:2509.05165.
    Differs from the paper: later chunks of the second reading do not attend to earlier ones, so that memory grows by one chunk
    only. Unlike in NVIDIA kvpress, the first layer need not be the longest, evicted pairs are freed with and without
    `structured`, each row of a batch is scored on its own, and every attention implementation works.
    """

    structured: bool = True
    agg_task: Aggregate = "max"
    agg_group: Aggregate = "mean"
    agg_head: Aggregate = "mean"
    add_v_norm: bool = False
    add_mean_across_heads: bool = True
    keep_token_lower_bound: Size = 0
    chunk_size: Count = field(default=2048, kw_only=True)

    def __init__(
        self,
        structured: bool = True,
        compression_ratio: float = 0.0,
        agg_task: Aggregate = "max",
        agg_group: Aggregate = "mean",
        agg_head: Aggregate = "mean",
        add_v_norm: bool = False,
        add_mean_across_heads: bool = True,
        keep_token_lower_bound: int = 0,
        *,
        budget: int | None = None,
        chunk_size: int = 2048,
    ) -> None:
        self.structured, self.compression_ratio, self.budget = structured, compression_ratio, budget
        self.agg_task, self.agg_group, self.agg_head = agg_task, agg_group, agg_head
        self.add_v_norm, self.add_mean_across_heads = add_v_norm, add_mean_across_heads
        self.keep_token_lower_bound, self.chunk_size = keep_token_lower_bound, chunk_size
        self.__post_init__()

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        hook = PassHook(self._read_again, ("prefill",), reads=True)
        slots = Slots(self.structured, self.agg_head, self.keep_token_lower_bound, scope="cache")
        return Recipe(
            (Eviction(Enhanced(self.add_v_norm, self.add_mean_across_heads), self.amount, slots, prepare=hook),)
        )

    def _read_again(self, prefill: Pass) -> None:
        """Read the prompt again and store the scores of its pairs in the observers of the layers."""
        rows = prefill.rows()
        received = _Received(prefill, self.agg_task, self.agg_group)
        for start in range(0, max(len(row.tokens) for row in rows), self.chunk_size):
            texts = [row.tokens[start : start + self.chunk_size] for row in rows]
            longest = max(map(len, texts))
            received.lengths = torch.tensor([len(text) for text in texts])
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=prefill.position.device)
            prefill.read(ids, received.take_in)
        received.finish([len(row.tokens) for row in rows])


class _Received:
    """Attention on all stored pairs from the queries of a second reading: `values[layer][n] [G, pairs]` for stream n."""

    def __init__(self, prefill: Pass, agg_task: str, agg_group: str) -> None:
        self.agg_task, self.agg_group = agg_task, agg_group
        self.lengths = torch.empty(0)
        self.values: dict[int, list[Tensor]] = {}
        self.calls, self.mask = {call.layer.index: call for call in prefill.calls}, prefill.mask

    def take_in(self, call: LayerCall) -> None:
        """Add the attention of one layer's queries."""
        store, new = call.store, call.queries.shape[2]
        stored = StoredPairs(store, call.tokens.mask)
        pieces = [stored.read(n, 0, len(slots)) for n, slots in enumerate(stored.slots)]
        lengths = [len(slots) for slots in stored.slots]
        keys, values = (torch.cat([pair[side] for stream in pieces for pair in stream]) for side in (0, 1))
        count = torch.tensor(lengths, device=keys.device)
        rows, where = (
            kernels.Rows(kernels.Dense(keys), kernels.Dense(values)),
            kernels.Ranges(count.cumsum(0) - count, count, longest=max(lengths)),
        )
        options = options_of(call.logits, new)
        queries = group_queries(call.queries, store.heads).unflatten(1, (-1, new))
        real = (
            (torch.arange(new) < self.lengths[:, None])
            .to(keys.device, torch.float32)
            .repeat_interleave(store.heads, dim=0)
        )
        sinks = None if call.sinks is None else call.sinks.float().view(store.heads, -1).repeat(store.batch, 1)
        operator = kernels.column_max if self.agg_task == "max" else kernels.column_mass
        weights = []
        for g, head in enumerate(queries.unbind(dim=1)):
            head_options = (
                options if sinks is None else replace(options, sinks=sinks[:, g : g + 1].expand(-1, new).contiguous())
            )
            weights.append(operator(head.contiguous(), rows, where, head_options, query_weight=real))
        # The last `new` pairs of a stream are those of the second reading.
        latest = [stream[:, : stream.shape[1] - new] for stream in torch.stack(weights).split(lengths, dim=1)]
        earlier = self.values.get(call.layer.index)
        join = torch.maximum if self.agg_task == "max" else torch.add
        self.values[call.layer.index] = latest if earlier is None else list(map(join, earlier, latest))

    def finish(self, tokens: Sequence[int]) -> None:
        """Aggregate over GQA groups and store scores in the observers; `tokens[b]` is the length of row b's prompt."""
        for layer, streams in self.values.items():
            heads = len(streams) // len(tokens)
            if self.agg_task == "mean":
                streams = [value / max(1, tokens[n // heads]) for n, value in enumerate(streams)]
            scores = [v.amax(dim=0) if self.agg_group == "max" else v.mean(dim=0) for v in streams]
            set_worth(self.calls[layer], self.mask, scores)


@dataclass(frozen=True)
class Enhanced(Repetition):
    """Scorer with the attention of a second reading, times the norms of values, plus the mean over a layer's heads."""

    norms: bool
    """Whether attention is multiplied by the norm of the value."""
    mean: bool
    """Whether the mean over the heads of the layer is added."""

    def for_fixed_size(self) -> Enhanced:
        return self  # the second reading scores pairs of all turns

    def scores(self, view: View) -> Tensor:
        if not self.mean:
            return self._head_scores(view)
        key = (type(self), self.norms)
        if key not in view.memo:
            shape = (len(view.rows), view.seen)
            sums = torch.zeros(2, *shape, device=view.positions.device)
            for member in view.group or [view]:
                scores = self._head_scores(member)
                positions = member.positions.flatten(1)
                sums[0].scatter_add_(1, positions, scores.flatten(1))
                sums[1].scatter_add_(1, positions, torch.ones_like(scores).flatten(1))
            sums = view.call.layer.shards.sum(sums)
            view.memo[key] = sums[0] / sums[1].clamp_min(1)
        mean: Tensor = view.memo[key][:, None].expand(-1, view.shape[1], -1)
        return self._head_scores(view) + mean.gather(2, view.positions)

    def _head_scores(self, view: View) -> Tensor:
        """Return the scores `[b, h, n]` before the mean over heads is added."""
        scores = super().scores(view)
        if self.norms:
            scores = scores * torch.linalg.vector_norm(view.values, dim=-1, dtype=torch.float32)
        return scores


@dataclass(frozen=True)
class Slots(Allocator):
    """Allocator that shares the budget among layers by their composites, or among all heads by their pairs."""

    structured: bool
    """Whether composites compete, and not pairs."""
    agg_head: str
    """Aggregate over the heads of a composite, "max" or "mean"."""
    minimum: int
    """Least number of pairs that a head keeps."""

    compares = True

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return not self.structured

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        layers = [list(items) for _, items in groupby(scored, key=lambda item: item.view.layer)]
        scores = [self._sorted_scores(items) for items in layers]  # [b, h or 1, n] for each layer
        least = max(1, self.minimum)  # within the budget, as every head keeps a pair
        for layer_scores in scores:
            layer_scores[..., :least] = torch.inf
        flat = torch.cat([layer_scores.flatten(1) for layer_scores in scores], dim=1)
        lengths = {item.view.length for item in scored}
        if self.structured and len(lengths) > 1:
            mask = self._within(flat, layers, mean)
        else:
            mask = top(flat, mean * sum(layer_scores.shape[1] for layer_scores in scores))
        masks = mask.split([layer_scores[0].numel() for layer_scores in scores], dim=1)
        counts: list[int | Tensor] = []
        for items, layer_scores, layer_mask in zip(layers, scores, masks, strict=True):
            kept, first = layer_mask.view(layer_scores.shape).sum(dim=2).clamp_min(least), 0
            for view in (item.view for item in items):
                count = kept if self.structured else kept[:, first : first + view.shape[1]]
                counts.append(count.expand(view.shape[:2]).clamp_max(view.length))
                first += view.shape[1]
        return counts

    def _within(self, flat: Tensor, layers: Sequence[Sequence[Scored]], mean: int) -> Tensor:
        """Mark the best composites `[b, composites]` that `mean` pairs per head pay for; ends of long heads have few pairs."""
        sizes = []
        for items in layers:
            ranks = torch.arange(max(item.view.length for item in items), device=flat.device)
            heads = [(ranks < item.view.length) * item.view.shape[1] for item in items]
            sizes.append(torch.stack(heads).sum(dim=0))
        pairs = mean * sum(item.view.shape[1] for items in layers for item in items)
        order = flat.argsort(dim=1, descending=True, stable=True)
        paid = torch.cat(sizes)[order].cumsum(dim=1) <= pairs
        return torch.zeros_like(paid).scatter_(1, order, paid)

    def _sorted_scores(self, items: Sequence[Scored]) -> Tensor:
        """Return the scores of a layer in descending order: `[b, h, n]` of heads, or `[b, 1, n]` of composites."""
        longest = max(item.view.length for item in items)
        ordered = [item.scores.sort(dim=2, descending=True).values for item in items]
        padded = [
            torch.nn.functional.pad(scores, (0, longest - scores.shape[2]), value=-torch.inf) for scores in ordered
        ]
        heads = torch.cat(padded, dim=1)
        if not self.structured:
            return heads
        if self.agg_head == "max":
            return heads.amax(dim=1, keepdim=True)
        missing = heads.isneginf()
        composites = heads.masked_fill(missing, 0.0).sum(dim=1, keepdim=True) / (~missing).sum(dim=1, keepdim=True)
        return composites.cummin(dim=2).values  # where heads have different lengths, fewer and better ones may follow
