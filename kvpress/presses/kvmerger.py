# SPDX-License-Identifier: Apache-2.0
"""Neighbours with similar keys, merged into one pair that weighs as many."""

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
        Refusal("sample(kvmerger:0.5)", "both would weigh what stays"),
        Refusal(
            "kvmerger:0.5 + kivi:bits=4,residual_length=32",
            "pairs that a codec has sealed cannot be merged; refused in the second turn",
        ),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE, "keys, values and weights change, so hiding what goes is another thing; compared with loops"
        ),
    ),
)
@dataclass
class KVMergerPress(NewestWindow, ScorerPress):
    """Merge runs of neighbours whose keys are similar, each into one pair with the weight of all.

        a run begins where cos(k[t], k[t - 1]) is small: the budget says how many runs there are
        g[t] = exp(-||k[t] - k[p]||^2 / (2 s^2))      p: the pair of the run that the newest tokens look at most,
        k, v = sum over the run of g[t] k[t], v[t] / sum of g[t]              s^2: the mean of these squared distances
        logit += log(length of the run)

    The newest `window_size` pairs stay as they are, and so do those that they look at most, the share `heavy` of the budget;
    neighbours are what is left when these are taken out. A merged pair has the position of the oldest of its run.

    Paper: after Wang et al., Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks, 2024,
    arXiv:2407.08454.
    Differs from the paper: runs are as many as a budget says, where the paper merges above a similarity; attention is that of
    the newest tokens and not of all; the merged pair weighs as many as it stands for.
    """

    window_size: Count = 32
    heavy: Share = 0.25

    weighs: ClassVar[bool] = True

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        found = super().recipe(model)
        return replace(found, evictions=tuple(step.rewriting(self.merge) for step in found.evictions))

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`: minus the cosine with the pair before, infinite for what stays as it is."""
        loose = ~self.whole(view, self.attention(view))
        scores = torch.full(view.shape, torch.inf, device=loose.device)
        for row, head in torch.cartesian_prod(*map(torch.arange, view.shape[:2])).tolist():
            at = loose[row, head].nonzero()[:, 0]
            keys = normalize(view.keys[row, head, at].float(), dim=1)
            scores[row, head, at[1:]] = -(keys[1:] * keys[:-1]).sum(dim=1)
        return scores

    def attention(self, view: View) -> Tensor:
        """Return how much attention the newest tokens pay every pair, `[b, h, n]`."""
        heads = [head.attention(head.newest_queries(*self.wants)).mean(dim=(2, 3)) for head in view.per_head()]
        return torch.cat(heads, dim=1)

    def whole(self, view: View, attention: Tensor) -> Tensor:
        """Mark what is not merged, `[b, h, n]`: the newest pairs, and older ones with much `attention`."""
        newest = torch.arange(view.length, device=attention.device) >= view.length - self.window_size
        few = max(0, min(int(self.heavy * view.target), view.target - self.window_size))
        return top(attention.masked_fill(newest, -torch.inf), few) | newest

    def merge(self, view: View, mask: Tensor) -> Rewritten:
        """Merge what is not marked into the marked pair before it that is not to stay as it is."""
        attention = self.attention(view)
        begins, at = mask & ~self.whole(view, attention), torch.arange(view.length, device=mask.device)
        run = torch.where(begins, at, -1).cummax(dim=2).values
        owner = torch.where(mask & ~begins, at, run).where(mask | (run >= 0), view.length)
        most = per_run(attention, owner, "amax")
        pivot = per_run(torch.where(attention == most, at, view.length - 1), owner, "amin")
        index = pivot[..., None].expand_as(view.keys)
        apart = (view.keys.float() - view.keys.float().gather(2, index)).square().sum(dim=3)
        spread = per_run(apart, owner, "mean").clamp_min(torch.finfo(torch.float32).tiny)
        return pooled(view, owner, torch.exp(-apart / (2 * spread)), keys=True)


def per_run(array: Tensor, owner: Tensor, how: str) -> Tensor:
    """Return for every pair what the numbers `[b, h, n]` of its run come to: "amax", "amin" or "mean"."""
    whole = array.new_zeros(*array.shape[:2], array.shape[2] + 1)
    return whole.scatter_reduce(2, owner, array, how, include_self=False).gather(2, owner)
