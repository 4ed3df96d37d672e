# SPDX-License-Identifier: Apache-2.0
"""SimLayerKV: only sinks and recent tokens for lazy layers, whose newest queries attend to little else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.checks import Count, Share, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, removed
from kvpress.core.recipe import Allocator, Eviction, Recipe
from kvpress.core.registry import Exemption, register
from kvpress.core.scoring import Scored
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.observe.view import View
from kvpress.presses.streaming_heads import SinksAndNewest


@register(
    "simlayerkv",
    "budget",
    "Zhang et al., 2024, arXiv:2410.13846",
    example="simlayerkv:0.9,n_recent=128",
    cases=("simlayerkv:0.4,n_recent=12", "simlayerkv:0.3,n_last=3,n_recent=12,n_initial=2"),
    exempt=(Exemption("pairs per layer", "what a layer keeps depends on its attention; replayed from eager weights"),),
)
@dataclass
class SimLayerKVPress(BasePress):
    """Cut lazy layers down to the first `n_initial` and the newest `n_recent` tokens; the other layers keep everything.

        lazy = mean over the last n_last queries i of all heads of sum over these tokens t of softmax(q_i . k)[t] > threshold

    A layer is lazy above `lazy_threshold`; with 1, no layer is. `n_initial` is the number of first tokens that a lazy layer
    keeps, and `n_recent` is the number of its newest ones. `n_last` is the number of queries that decide, after a prompt.

    Paper: Zhang et al., SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction, 2024, arXiv:2410.13846.
    Differs from the paper: every row of a batch decides for itself, instead of one mean for all; the last queries of the
    prompt decide, where the authors' code waits for the first generated token.
    """

    lazy_threshold: Share = 1.0
    n_last: Count = 1
    n_recent: Count = 1024
    n_initial: Size = 4

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        queries = Wanted(RecentQueries, self.n_last)
        layers = LazyLayers(self.lazy_threshold, self.n_recent, queries)
        sinks = SinksAndNewest(self.n_initial, (queries,))
        return Recipe((Eviction(sinks, allocator=layers, fixed=True),))

    @property
    def compression_ratio(self) -> float:
        """Fraction of the pairs that was evicted from the last cache; see `last_cache`."""
        return removed(self)


@dataclass(frozen=True)
class LazyLayers(Allocator):
    """Keep sinks (as `SinksAndNewest` scores them) and `recent` tokens in lazy layers, everything in the other layers."""

    threshold: float
    """Attention to sinks and recent tokens above which a layer is lazy."""
    recent: int
    """Newest tokens that a lazy layer keeps."""
    queries: Wanted
    """Observer of the queries that decide."""

    decides = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        windows = [item.scores >= item.view.seen - self.recent for item in scored]
        attention_weights = [item.share(self._attention) for item in scored]
        is_lazy = torch.cat(attention_weights, dim=1).mean(dim=1).clamp_max(1) > self.threshold
        return [torch.where(is_lazy[:, None], in_window.sum(dim=2), in_window.shape[2]) for in_window in windows]

    def _attention(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Return the attention `[b, h]` to sinks and recent tokens."""
        del counts
        return attention_on(scored.whole, self.queries, self._in_window(scored))

    def _in_window(self, scored: Scored) -> Tensor:
        """Mark sinks and recent tokens among all pairs `[b, h, n]`."""
        return scored.scorer.scores(scored.whole) >= scored.whole.seen - self.recent


def attention_on(view: View, queries: Wanted, mask: Tensor) -> Tensor:
    """Return the attention `[b, h]` of the newest queries to the pairs marked in `mask [b, h, n]`, at most 1."""
    weights = view.attention(view.newest_queries(queries))
    return (weights * mask[:, :, None, None]).sum(dim=-1).mean(dim=(2, 3))
