# SPDX-License-Identifier: Apache-2.0
"""NACL: eviction by the attention of proxy tokens, with a share of the budget drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.core.checks import Count, Positive, Share, Size
from kvpress.core.press import ScorerPress
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import Scored, best_beside, top
from kvpress.observe.view import View
from kvpress.presses.window import NewestWindow


@register(
    "nacl",
    "evict",
    "Chen et al., 2024, arXiv:2408.03675",
    example="nacl:0.5",
    cases=(
        "nacl:0.5,window_size=4,n_sink=2",
        "nacl:0.6,window_size=6,random_share=0.3,temperature=0.05,seed=2",
    ),
    refuses=(
        Refusal("adakv(nacl:0.5)", "both would choose the pairs to keep"),
        Refusal("chunkkv(nacl:0.5)", "both would choose the pairs to keep"),
    ),
)
@dataclass
class NACLPress(NewestWindow, ScorerPress):
    """Keep the pairs with the most attention of the last tokens, and draw a share of the budget randomly by that attention.

        F[h, t] = sum over the last w queries i of softmax(q_i . k)[t], mean over the query heads of the group
        of k pairs that stay beside window and sinks:   the k - m with the largest F, and m = round(random_share k) drawn
                                                        without replacement, by softmax(F[h] / temperature), from the others

    `window_size` is w, the number of newest tokens that score all others and always stay. `n_sink` is the number of first
    tokens that always stay. `random_share` is the share of the other pairs that is drawn; 0 keeps the best ones, without the
    smoothing of `SnapKVPress`, and the default is that of the authors' code, 7 of 19 percent. A low `temperature` draws nearly
    the best, a high one evenly. Draws depend only on `seed`, layer, length, head and position, so that they are reproducible,
    and differ between heads and layers.

    Raises `TypeError` inside wrappers that choose the pairs themselves, such as `AdaKVPress`.

    Paper: Chen et al., NACL: A General and Effective KV Cache Eviction Framework for LLMs at Inference Time, 2024,
    arXiv:2408.03675.
    Differs from the paper: written from its abstract and the authors' public code. Window and sinks are numbers of tokens, not
    shares of the length, so that short prompts have them too; all tokens that score others stay, and see no later tokens;
    query heads of a group share one choice, by the mean of their attention, because they share keys; there are 4 sinks in the
    place of 256; `temperature` is 1 in the authors' code; draws have a seed.
    """

    window_size: Count = 64
    n_sink: Size = 4
    random_share: Share = 0.37
    temperature: Positive = 1.0
    seed: Size = 0

    ranks: ClassVar[bool] = True

    @property
    def protected(self) -> int:
        return self.window_size + self.n_sink

    def scores(self, view: View) -> Tensor:
        """Return F `[b, h, n]`, infinite for the window and the sinks."""
        attention = [
            head.attention(head.newest_queries(*self.wants)).sum(dim=3).mean(dim=2) for head in view.per_head()
        ]
        always = (view.positions < self.n_sink) | (view.positions >= view.seen - self.window_size)
        return torch.cat(attention, dim=1).masked_fill(always, torch.inf)

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Return the mask `[b, h, n]` of the best pairs and the drawn ones."""
        best, num_drawn = best_beside(scored.scores, counts, self.random_share)
        # The largest sums of log-weight and Gumbel noise are a draw without replacement.
        uniform = scored.view.numbers(self.seed).double().clamp_min(1e-12)
        draws = scored.scores.double() / self.temperature - (-uniform.log()).log()
        return best | top(draws.masked_fill(best, -torch.inf), num_drawn)
