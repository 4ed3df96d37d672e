# SPDX-License-Identifier: Apache-2.0
"""Attention Matching: some keys, with logit weights and values that are solved for, in the place of all pairs."""

from __future__ import annotations

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
from kvpress.core.refit import asked, refitting
from kvpress.core.registry import Exemption, register
from kvpress.core.scoring import Scored, top
from kvpress.observe.observer import Wanted
from kvpress.observe.view import LOG_WEIGHT, View

AT_ONCE, EVERY = 4, 2
"""Keys that a step of the pursuit takes, and steps after which all weights are fitted anew."""
SMALLEST = 1e-12


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
            "plain computations",
        ),
    ),
)
@dataclass
class AttentionMatchingPress(ScorerPress):
    """Keep some keys, and solve for logit weights b and values W with which they have the mass and output of all pairs.

        attention  score[t] = sqrt(mean over i of softmax(q_i . k)[t]^2), and the best stay
        pursuit    adds the keys with the largest sum over i of r_i e_i[t],   r = 1 - sum over those chosen of w e_i
        b          w = argmin sum over i of (sum_j w_j e_i[j] - 1)^2,   w in [e^-3, e^3],   b = log w
        W          argmin sum over i of |sum_j softmax_j(q_i . k + b) W_j - softmax(q_i . k) V|^2

    e_i[t] is the weight of pair t for query i among all pairs, before anything is evicted. `keys` is how keys are chosen: by
    `attention`, or by orthogonal matching `pursuit`, which takes 4 keys a step, fits w anew every second step, and bounds it by
    e^-7 and e^7. After `attention`, two steps of projected gradient descent follow the clamped least squares. `queries` are
    those with which the model reads its prompt again behind it (`repeat`), or those of the prompt, turned to the positions that
    come next (`prefill`). `tokens` is how many each query head gives at most, spread evenly; take ten times as many, heads of
    a group together, as pairs stay, or a `ridge`, which is as for `RefitPress`. 0 is none, and what queries leave open stays.
    Composed with a codec, b and W are solved for with the keys that it leaves, as by `RefitPress`.

    Paper: Zweiger et al., Fast KV Compaction via Attention Matching, 2026, arXiv:2602.16284; after its authors' code, from
    notes: the text was not at hand.
    Differs from the paper: every query counts the same in the fit of w, where the paper weighs it by its mass after the largest
    logit is subtracted; the prompt is repeated without words that ask for it, and queries of self-study are left out; all
    layers are compacted from one reading, not each after those before it; heads get the same number of pairs unless `adakv`
    is put around it; the whole prompt is one block, and none of its tokens is exempt.
    """

    keys: Literal["attention", "pursuit"] = "attention"
    queries: Literal["prefill", "repeat"] = "repeat"
    tokens: Count = 1024
    ridge: NotNegative = 0.0

    @property
    def ranks(self) -> bool:  # type: ignore[override]
        """Whether keys are chosen one after another, so that no score says what each is worth."""
        return self.keys == "pursuit"

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (self.solved.queries,)

    @property
    def solved(self) -> Refit:
        """What is solved for once keys are chosen."""
        down, up, steps = (3, 3, 2) if self.keys == "attention" else (7, 7, 0)
        return Refit(self.tokens, self.queries == "repeat", self.ridge, Weights(down, up, steps, self.ridge))

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        found = super().recipe(model)
        return replace(found, evictions=tuple(refitting(step, self.solved) for step in found.evictions))

    def scores(self, view: View) -> Tensor:
        """Return the root mean square of the attention that every pair gets, `[b, h, n]`."""
        found = []
        for design in self.designs(view):
            squares = [shares.square().mean(dim=0) for _, shares in design.by_pairs()]
            found.append(torch.cat(squares).sqrt())
        return torch.stack(found).view(view.shape)

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        if self.keys == "attention":
            return super().choose(scored, counts)
        view = scored.view
        each = torch.as_tensor(counts).expand(view.shape[:2]).flatten().tolist()
        chosen = [pursued(design, count) for design, count in zip(self.designs(view), each, strict=True)]
        return torch.stack(chosen).view(view.shape)

    def designs(self, view: View) -> list[Design]:
        """Return what the sampled queries pay to all pairs of every stream of a view."""
        weight, logits = view.side.get(LOG_WEIGHT), view.call.logits
        weights = None if weight is None else weight.flatten(0, 1)
        found = []
        for n, (queries, _) in enumerate(asked(view, *self.wants)):
            keys, own = view.keys.flatten(0, 1)[n].float(), None if weights is None else weights[n]
            _, lse = attend(
                queries[None], keys[None], keys[None, :, :1], logits, log_weight=None if own is None else own[None]
            )
            found.append(Design(queries, keys, logits, lse[0], own))
        return found


def pursued(design: Design, count: int) -> Tensor:
    """Mark `count` keys `[t]` of a design by orthogonal matching pursuit of a mass of 1 for every query."""
    marked = torch.zeros(len(design.keys), dtype=torch.bool, device=design.keys.device)
    left = torch.ones(len(design.queries), 1, device=design.keys.device)
    fitted, at = left, torch.empty(0, dtype=torch.int64)
    step = 0
    while int(marked.sum()) < count:
        gain = design.back(left)[:, 0].masked_fill(marked, -torch.inf)
        marked |= top(gain, min(AT_ONCE, count - int(marked.sum())))
        step += 1
        if step % EVERY == 0:
            at = marked.nonzero().flatten()
            weight = None if design.log_weight is None else design.log_weight[at]
            part = replace(design, keys=design.keys[at], log_weight=weight)
            weights = part.solve(fitted.double(), 0).clamp_min(SMALLEST)
            left = fitted - part.apply(weights.float())
    return marked
