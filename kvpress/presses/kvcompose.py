# SPDX-License-Identifier: Apache-2.0
"""Composite tokens: each head keeps its own best pairs, layers share a budget of slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import group_queries
from kvpress.cache.streams import Stored
from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BudgetPress
from kvpress.core.recipe import Allocator, Eviction, PassHook, Recipe
from kvpress.core.registry import Exemption, register
from kvpress.core.scoring import Scored, top
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Wanted
from kvpress.observe.passes import Pass
from kvpress.observe.view import View
from kvpress.presses.kvzip import Repetition, Worth

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
    """Keep the pairs that a second reading of the prompt attends to; the j-th best of all heads of a layer go together.

        a[g, t]  = agg_task over the queries i that read the prompt again of softmax(q_i . k)[t]
        s[h, t]  = agg_group over the query heads of the group of a[g, t]
        c[l, j]  = agg_head over the heads of the layer of the j-th largest s[h, t]

    The best composites (l, j) of all layers stay: with n of them, each head of a layer keeps its n best pairs, of whatever
    tokens. So heads are equally long, and layers share the budget. Without `structured`, all pairs of all layers
    compete by s, and heads differ in length. `agg_task`, `agg_group` and `agg_head` are "max" or "mean". `add_v_norm`
    multiplies s by the norm of the value, `add_mean_across_heads` then adds the mean of all heads of the layer to each.
    `keep_token_lower_bound` is the least number of pairs that a head keeps. The prompt is read again in chunks of `chunk_size`
    tokens, each behind the whole prompt, and taken back.

    Paper: Akulov et al., KVCompose: Efficient Structured KV Cache Compression with Composite Tokens, 2025, arXiv:2509.05165.
    Differs from the paper: later chunks of the second reading do not see earlier ones, so that no more than a chunk is held
    beside the prompt. Unlike in NVIDIA kvpress the first layer need not be the longest, what is evicted is freed in
    either form, rows of a batch are scored alone, and any attention implementation serves.
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

    def _read_again(self, done: Pass) -> None:
        """Leave what the second reading pays with the observers of the layers."""
        rows = done.rows()
        received = _Received(done, self.agg_task, self.agg_group)
        for start in range(0, max(len(row.tokens) for row in rows), self.chunk_size):
            texts = [row.tokens[start : start + self.chunk_size] for row in rows]
            longest = max(map(len, texts))
            received.lengths = torch.tensor([len(text) for text in texts])
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=done.position.device)
            done.read(ids, received.take_in)
        received.finish([len(row.tokens) for row in rows])


class _Received:
    """Attention on all stored pairs by the queries of a second reading: `values[layer][n] [G, pairs]` for stream n."""

    def __init__(self, done: Pass, agg_task: str, agg_group: str) -> None:
        self.agg_task, self.agg_group = agg_task, agg_group
        self.lengths = torch.empty(0)
        self.values: dict[int, list[Tensor]] = {}
        self.worth: dict[int, Worth] = {call.layer.index: call.store.observers[Wanted(Worth)] for call in done.calls}

    def take_in(self, call: LayerCall) -> None:
        """Add what one layer's queries pay."""
        store, new = call.store, call.queries.shape[2]
        stored = Stored(store, call.tokens.mask)
        parts = [stored.read(n, 0, len(at)) for n, at in enumerate(stored.slots)]
        lengths = [len(at) for at in stored.slots]
        keys, values = (torch.cat([pair[side] for part in parts for pair in part]) for side in (0, 1))
        count = torch.tensor(lengths, device=keys.device)
        rows, where = (
            kernels.Rows(kernels.Dense(keys), kernels.Dense(values)),
            kernels.Ranges(count.cumsum(0) - count, count, longest=max(lengths)),
        )
        options = kernels.Options(call.logits.scale, call.logits.softcap, causal=new)
        queries = group_queries(call.queries, store.heads).unflatten(1, (-1, new))
        real = (
            (torch.arange(new) < self.lengths[:, None])
            .to(keys.device, torch.float32)
            .repeat_interleave(store.heads, dim=0)
        )
        sinks = None if call.sinks is None else call.sinks.float().view(store.heads, -1).repeat(store.batch, 1)
        operator = kernels.column_max if self.agg_task == "max" else kernels.column_mass
        paid = []
        for g, asking in enumerate(queries.unbind(dim=1)):
            own = options if sinks is None else replace(options, sinks=sinks[:, g : g + 1].expand(-1, new).contiguous())
            paid.append(operator(asking.contiguous(), rows, where, own, query_weight=real))
        found = [weights[:, : weights.shape[1] - new] for weights in torch.stack(paid).split(lengths, dim=1)]
        known = self.values.get(call.layer.index)
        join = torch.maximum if self.agg_task == "max" else torch.add
        self.values[call.layer.index] = found if known is None else list(map(join, known, found))

    def finish(self, tokens: Sequence[int]) -> None:
        """Hand over what each pair is worth, given how many tokens each row has read again."""
        for layer, found in self.values.items():
            heads = len(found) // len(tokens)
            if self.agg_task == "mean":
                found = [value / max(1, tokens[n // heads]) for n, value in enumerate(found)]
            self.worth[layer].values = [v.amax(dim=0) if self.agg_group == "max" else v.mean(dim=0) for v in found]


@dataclass(frozen=True)
class Enhanced(Repetition):
    """What pairs were paid in a second reading, times the norms of values, plus the mean over the heads of the layer."""

    norms: bool
    mean: bool

    def scores(self, view: View) -> Tensor:
        if not self.mean:
            return self._own(view)
        key = (type(self), self.norms)
        if key not in view.memo:
            shape = (len(view.rows), view.seen)
            sums = torch.zeros(2, *shape, device=view.positions.device)
            for each in view.group or [view]:
                own = self._own(each)
                at = each.positions.flatten(1)
                sums[0].scatter_add_(1, at, own.flatten(1))
                sums[1].scatter_add_(1, at, torch.ones_like(own).flatten(1))
            view.memo[key] = sums[0] / sums[1].clamp_min(1)
        mean = view.memo[key][:, None].expand(-1, view.shape[1], -1)
        return self._own(view) + mean.gather(2, view.positions)

    def _own(self, view: View) -> Tensor:
        scores = super().scores(view)
        if self.norms:
            scores = scores * torch.linalg.vector_norm(view.values, dim=-1, dtype=torch.float32)
        return scores


@dataclass(frozen=True)
class Slots(Allocator):
    """Shares out slots among layers by their composites, or pairs among all heads; each head gets `least` first."""

    structured: bool
    agg_head: str
    least: int

    compares = True

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return not self.structured

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        layers = [list(views) for _, views in groupby(scored, key=lambda each: each.view.layer)]
        worth = [self._worth(views) for views in layers]  # [b, h or 1, slots] for each layer
        for each in worth:
            each[..., : self.least] = torch.inf
        total = mean * sum(each.shape[1] for each in worth)
        chosen = top(torch.cat([each.flatten(1) for each in worth], dim=1), total)
        split = chosen.split([each[0].numel() for each in worth], dim=1)
        counts: list[int | Tensor] = []
        for views, each, part in zip(layers, worth, split, strict=True):
            kept, first = part.view(each.shape).sum(dim=2).clamp_min(max(1, self.least)), 0
            for view in (one.view for one in views):
                own = kept if self.structured else kept[:, first : first + view.shape[1]]
                counts.append(own.expand(view.shape[:2]).clamp_max(view.length))
                first += view.shape[1]
        return counts

    def _worth(self, views: Sequence[Scored]) -> Tensor:
        """Return the scores of a layer, best first: of each head, or of composites."""
        longest = max(each.view.length for each in views)
        ordered = [each.scores.sort(dim=2, descending=True).values for each in views]
        padded = [torch.nn.functional.pad(part, (0, longest - part.shape[2]), value=-torch.inf) for part in ordered]
        heads = torch.cat(padded, dim=1)
        if not self.structured:
            return heads
        return heads.amax(dim=1, keepdim=True) if self.agg_head == "max" else heads.mean(dim=1, keepdim=True)
