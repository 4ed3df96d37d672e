# SPDX-License-Identifier: Apache-2.0
"""Runs of neighbours with similar keys, each merged into one pair."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvpress.core.checks import Count, Share
from kvpress.core.model import ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Recipe, Rewritten
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.core.scoring import top
from kvpress.observe.view import View
from kvpress.presses.clusters import pooled
from kvpress.presses.window import NewestWindow


@register(
    "kvmerger",
    "evict",
    "after Wang et al., 2024, arXiv:2407.08454",
    example="kvmerger:0.5",
    refuses=(
        Refusal("sample(kvmerger:0.5)", "both would set the weights of kept pairs"),
        Refusal(
            "kvmerger:0.5 + kivi:bits=4,residual_length=32",
            "pairs that a codec has sealed cannot be merged; refused in the second turn",
        ),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE, "keys, values and weights change, so hiding evicted pairs is not the same; compared with loops"
        ),
    ),
)
@dataclass
class KVMergerPress(NewestWindow, ScorerPress):
    """Merge runs of neighbours whose keys are similar, each into one pair with the weight of all.

        a run begins where cos(k[t], k[t - 1]) is small: the budget is the number of runs
        g[t] = exp(-||k[t] - k[p]||^2 / (2 s^2))      p: the pair of the run with the most attention of the newest tokens,
        k, v = sum over the run of g[t] k[t], v[t] / sum of g[t]              s^2: the mean of these squared distances
        logit += log(length of the run)

    The newest `window_size` pairs are not merged, nor are the pairs that get the most attention of the newest tokens, the share
    `heavy` of the budget. Neighbours are adjacent among all other pairs. A merged pair has the position of the oldest of its
    run.

    Paper: after Wang et al., Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks, 2024,
    arXiv:2407.08454.
    Differs from the paper: the budget sets the number of runs, where the paper merges above a similarity; attention is that of
    the newest tokens, not of all tokens; the log-weight of a merged pair counts the pairs of its run.
    """

    window_size: Count = 32
    heavy: Share = 0.25

    weighs: ClassVar[bool] = True

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        return replace(recipe, evictions=tuple(step.rewriting(self.merge) for step in recipe.evictions))

    def scores(self, view: View) -> Tensor:
        """Return minus the cosine of each key with its older neighbour, `[b, h, n]`; infinite for unmerged pairs."""
        mergeable = ~self.unmerged(view, self.attention(view))
        scores = torch.full(view.shape, torch.inf, device=mergeable.device)
        for row, head in torch.cartesian_prod(*map(torch.arange, view.shape[:2])).tolist():
            ranks = mergeable[row, head].nonzero()[:, 0]
            keys = normalize(view.keys[row, head, ranks].float(), dim=1)
            scores[row, head, ranks[1:]] = -(keys[1:] * keys[:-1]).sum(dim=1)
        return scores

    def attention(self, view: View) -> Tensor:
        """Return the mean attention of the newest tokens on each pair, `[b, h, n]`."""
        heads = [head.attention(head.newest_queries(*self.wants)).mean(dim=(2, 3)) for head in view.per_head()]
        return torch.cat(heads, dim=1)

    def unmerged(self, view: View, attention: Tensor) -> Tensor:
        """Return a mask `[b, h, n]` of unmerged pairs: the newest ones, and older ones with the most `attention`."""
        newest = torch.arange(view.length, device=attention.device) >= view.length - self.window_size
        count = max(0, min(int(self.heavy * view.target), view.target - self.window_size))
        return top(attention.masked_fill(newest, -torch.inf), count) | newest

    def merge(self, view: View, mask: Tensor) -> Rewritten:
        """Merge each pair outside `mask [b, h, n]` into the nearest older pair that begins a run."""
        attention = self.attention(view)
        begins, ranks = mask & ~self.unmerged(view, attention), torch.arange(view.length, device=mask.device)
        run = torch.where(begins, ranks, -1).cummax(dim=2).values
        owner = torch.where(mask & ~begins, ranks, run).where(mask | (run >= 0), view.length)
        largest = per_run(attention, owner, "amax")
        pivot = per_run(torch.where(attention == largest, ranks, view.length - 1), owner, "amin")
        index = pivot[..., None].expand_as(view.keys)
        distances = (view.keys.float() - view.keys.float().gather(2, index)).square().sum(dim=3)
        variance = per_run(distances, owner, "mean").clamp_min(torch.finfo(torch.float32).tiny)
        return pooled(view, owner, torch.exp(-distances / (2 * variance)), keys=True)


def per_run(array: Tensor, owner: Tensor, how: str) -> Tensor:
    """Reduce `array [b, h, n]` over each run by `how`, "amax", "amin" or "mean", and return the result for every pair."""
    reduced = array.new_zeros(*array.shape[:2], array.shape[2] + 1)
    return reduced.scatter_reduce(2, owner, array, how, include_self=False).gather(2, owner)
