# SPDX-License-Identifier: Apache-2.0
"""Attention Matching: a subset of the keys, with fitted logit weights and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvpress.cache.attention import attend
from kvpress.core.checks import Count, NotNegative
from kvpress.core.least_squares import Design
from kvpress.core.model import ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Recipe, Refit, Weights
from kvpress.core.refit import observed_queries, refitting
from kvpress.core.registry import Exemption, register
from kvpress.core.scoring import Scored, top
from kvpress.observe.observer import Wanted
from kvpress.observe.view import LOG_WEIGHT, View

AT_ONCE, EVERY = 4, 2
"""Number of keys that a step of the pursuit adds, and number of steps between fits of all weights."""
SMALLEST = 1e-12
"""Lower bound of a weight in the pursuit."""


@register(
    "attention_matching",
    "evict",
    "Zweiger et al., 2026, arXiv:2602.16284",
    example="attention_matching:0.9",
    cases=(
        "attention_matching:0.5,tokens=32",
        "attention_matching:0.6,keys=pursuit,queries=prefill,tokens=16",
    ),
    exempt=(
        Exemption(
            "mask oracle",
            "values change, so hiding the evicted pairs is another computation; keys, weights and values are compared with "
            "naive ones",
        ),
    ),
)
@dataclass
class AttentionMatchingPress(ScorerPress):
    """Keep some keys, and fit logit weights b and values W to the attention mass and output of all pairs.

        attention  score[t] = sqrt(mean over i of softmax(q_i . k)[t]^2), and the best stay
        pursuit    adds the keys with the largest sum over i of r_i e_i[t],   r = 1 - sum over the chosen keys of w e_i
        b          w = argmin sum over i of (sum_j w_j e_i[j] - 1)^2,   w in [e^-3, e^3],   b = log w
        W          argmin sum over i of |sum_j softmax_j(q_i . k + b) W_j - softmax(q_i . k) V|^2

    e_i[t] is the attention weight of pair t for query i among all pairs, before the eviction. `keys` is the method of choosing
    keys: `attention`, or orthogonal matching `pursuit`, which adds 4 keys a step, fits w again every second step, and bounds it
    by e^-7 and e^7. With `attention`, two steps of projected gradient descent follow the clamped least squares. `queries` are
    those of a second reading of the prompt after it (`repeat`), or those of the prompt, rotated to the next positions
    (`prefill`). `tokens` is the largest number of queries per query head, spread evenly. Use ten times as many queries, over
    all heads of a GQA group, as pairs stay. `ridge` is that of `RefitPress`; with 0, directions that the queries do not
    determine are left unchanged, and those that they hardly determine may grow: at `0.75` on SmolLM2, KL is 10.7, with
    `ridge=1` 0.83. With a codec, b and W are fitted to the decoded keys, as in `RefitPress`.

    Paper: Zweiger et al., Fast KV Compaction via Attention Matching, 2026, arXiv:2602.16284; written from notes on the
    authors' code, without the text of the paper.
    Differs from the paper: every query has the same weight in the fit of w, where the paper weighs it by its mass after the
    largest logit is subtracted; the prompt is repeated without an instruction, and there are no self-study queries; all layers
    are compacted from one reading, not one after another; heads get the same number of pairs unless wrapped in `adakv`; the
    prompt is one block, and none of its tokens is exempt.
    """

    keys: Literal["attention", "pursuit"] = "attention"
    queries: Literal["prefill", "repeat"] = "repeat"
    tokens: Count = 1024
    ridge: NotNegative = 0.0

    @property
    def ranks(self) -> bool:  # type: ignore[override]
        """Whether keys are chosen one after another, so that pairs have no comparable scores."""
        return self.keys == "pursuit"

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (self.solved.queries,)

    @property
    def solved(self) -> Refit:
        """Settings of the fit of weights and values."""
        down, up, steps = (3, 3, 2) if self.keys == "attention" else (7, 7, 0)
        return Refit(self.tokens, self.queries == "repeat", self.ridge, Weights(down, up, steps, self.ridge))

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        return replace(recipe, evictions=tuple(refitting(step, self.solved) for step in recipe.evictions))

    def scores(self, view: View) -> Tensor:
        """Return the root mean square of the attention on each pair, `[b, h, n]`."""
        streams = []
        for design in self.designs(view):
            squares = [shares.square().mean(dim=0) for _, shares in design.by_pairs()]
            streams.append(torch.cat(squares).sqrt())
        return torch.stack(streams).view(view.shape)

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        if self.keys == "attention":
            return super().choose(scored, counts)
        view = scored.view
        stream_counts = torch.as_tensor(counts).expand(view.shape[:2]).flatten().tolist()
        masks = [pursued(design, count) for design, count in zip(self.designs(view), stream_counts, strict=True)]
        return torch.stack(masks).view(view.shape)

    def designs(self, view: View) -> Iterator[Design]:
        """Yield the least-squares design of each stream of a view: the sampled queries against all pairs."""
        weight, logits = view.side.get(LOG_WEIGHT), view.call.logits
        weights = None if weight is None else weight.flatten(0, 1)
        for n, (queries, _) in enumerate(observed_queries(view, self.wants[0])):
            keys, log_weight = view.keys.flatten(0, 1)[n].float(), None if weights is None else weights[n]
            _, lse = attend(
                queries[None],
                keys[None],
                keys[None, :, :1],
                logits,
                log_weight=None if log_weight is None else log_weight[None],
            )
            yield Design(queries, keys, logits, lse[0], log_weight)


def pursued(design: Design, count: int) -> Tensor:
    """Return a mask `[t]` of `count` keys of a design, by orthogonal matching pursuit of a mass of 1 for every query."""
    marked = torch.zeros(len(design.keys), dtype=torch.bool, device=design.keys.device)
    residual = torch.ones(len(design.queries), 1, device=design.keys.device)
    target, index = residual, torch.empty(0, dtype=torch.int64)
    step = 0
    while int(marked.sum()) < count:
        gain = design.back(residual)[:, 0].masked_fill(marked, -torch.inf)
        marked |= top(gain, min(AT_ONCE, count - int(marked.sum())))
        step += 1
        if step % EVERY == 0:
            index = marked.nonzero().flatten()
            weight = None if design.log_weight is None else design.log_weight[index]
            subset = replace(design, keys=design.keys[index], log_weight=weight)
            weights = subset.solve(target.double(), 0).clamp_min(SMALLEST)
            residual = target - subset.apply(weights.float())
    return marked
