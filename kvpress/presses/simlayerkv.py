# SPDX-License-Identifier: Apache-2.0
"""SimLayerKV: only sinks and recent tokens for lazy layers, whose newest queries attend to little else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvpress.core.checks import Count, Share, Size
from kvpress.core.helpers import arguments_of, helper, override_of
from kvpress.core.host import host
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

    A layer is lazy above `lazy_threshold`; with 1, no layer is. `n_last` is the number of queries that decide, after a prompt.

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
        is_lazy = override_of(self, "is_lazy")
        layers = LazyLayers(self.lazy_threshold, self.n_recent, queries, is_lazy)
        sinks = SinksAndNewest(self.n_initial, (queries,))
        return Recipe((Eviction(sinks, allocator=layers, fixed=True, reads_hidden_states=is_lazy is not None),))

    @property
    def compression_ratio(self) -> float:
        """Fraction of the pairs that was evicted from the last cache; see `last_cache`."""
        return removed(self)

    @helper
    def is_lazy(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> bool:
        """Return whether a layer is lazy, by the mean over rows: `hidden_states [B, n, hidden]`, `keys [B, H, n, D]`."""
        queries = Wanted(RecentQueries, self.n_last)
        kwargs = {"position_embeddings": position_embeddings}
        view = host().view_by_hand((queries,), module, hidden_states, keys, keys, kwargs)
        in_window = SinksAndNewest(self.n_initial).scores(view) >= view.seen - self.n_recent
        return bool(attention_on(view, queries, in_window).mean() > self.lazy_threshold)


@dataclass(frozen=True)
class LazyLayers(Allocator):
    """Keep sinks (as `SinksAndNewest` scores them) and `recent` tokens in lazy layers, everything in the other layers."""

    threshold: float
    """Attention to sinks and recent tokens above which a layer is lazy."""
    recent: int
    """Newest tokens that a lazy layer keeps."""
    queries: Wanted
    """Observer of the queries that decide."""
    custom_is_lazy: Callable[..., bool] | None = None
    """User-defined `is_lazy`, or None."""

    decides = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        windows = [item.scores >= item.view.seen - self.recent for item in scored]
        if self.custom_is_lazy is None:
            attention_weights = [attention_on(item.whole, self.queries, self._in_window(item)) for item in scored]
            is_lazy = torch.cat(attention_weights, dim=1).mean(dim=1).clamp_max(1) > self.threshold
        else:
            is_lazy = torch.tensor([self.custom_is_lazy(*arguments_of(scored[0].whole))], device=windows[0].device)
        return [torch.where(is_lazy[:, None], in_window.sum(dim=2), in_window.shape[2]) for in_window in windows]

    def _in_window(self, scored: Scored) -> Tensor:
        """Mark sinks and recent tokens among all pairs `[b, h, n]`."""
        return scored.scorer.scores(scored.whole) >= scored.whole.seen - self.recent


def attention_on(view: View, queries: Wanted, mask: Tensor) -> Tensor:
    """Return the attention `[b, h]` of the newest queries to the pairs marked in `mask [b, h, n]`, at most 1."""
    weights = view.attention(view.newest_queries(queries))
    return (weights * mask[:, :, None, None]).sum(dim=-1).mean(dim=(2, 3))
