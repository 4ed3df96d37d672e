# SPDX-License-Identifier: Apache-2.0
"""Heavy hitters: attention accumulated through the prompt and generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from torch import Tensor

from kvpress.core.amount import Schedule
from kvpress.core.checks import Count, Range, Share
from kvpress.core.model import ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Exemption, register
from kvpress.observe.mass import AttentionMass
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View


@register(
    "h2o",
    "evict",
    "Zhang et al., 2023, arXiv:2306.14048",
    example="h2o:0.5,interval=32",
    cases=("h2o:0.5,interval=1000", "h2o:0.5,interval=1000,normalize=decay,decay=0.9"),
    exempt=(
        Exemption(
            "mask oracle",
            "evicts at every token, while the oracle hides what one eviction removed; replayed query by query",
            "`interval=1`",
        ),
    ),
)
@dataclass
class H2OPress(ScorerPress):
    """Keep the pairs with the most accumulated attention and the most recent ones, at a constant budget.

        score[b, h, t] = sum over all queries so far of softmax(q_i . k)[t], summed over the GQA group

    The prompt sets the budget. While tokens are generated, the sums continue, and every `interval` tokens the pairs above the
    budget are evicted. `recent_ratio` of the budget goes to the newest tokens. A plain sum favours old tokens, which more
    queries attended to: `normalize="count"` divides by the number of these queries, and `normalize="decay"` multiplies the sums
    by `decay`, in (0, 1], with every token that is read.

    Paper: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, 2023, arXiv:2306.14048.
    Differs from the paper: query heads of a group share keys, so their sums are added; the prompt is read with full
    attention before the first eviction, as in the authors' code.
    """

    recent_ratio: Share = 0.5
    interval: Count = 1
    normalize: Literal["none", "count", "decay"] = "none"
    decay: Annotated[float, Range(0, 1, above=True)] | None = None

    def validate(self) -> None:
        super().validate()
        if (self.normalize == "decay") != (self.decay is not None):
            raise ValueError(
                f"decay must be set if and only if normalize='decay'; got normalize={self.normalize!r}, decay={self.decay}"
            )

    @property
    def protected(self) -> int:
        return 1

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(AttentionMass) if self.decay is None else Wanted(AttentionMass, self.decay),)

    @property
    def schedule(self) -> Schedule:
        return Schedule(every=self.interval)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        (step,) = super().recipe(model).evictions
        return Recipe((replace(step, recent=self.recent_ratio),))

    def scores(self, view: View) -> Tensor:
        """Return the accumulated attention `[b, h, n]`, without reading keys and values: a read would copy them every token."""
        (observer,) = self.wants
        mass = view.recorded(observer)
        return mass / view.observing_queries(observer) if self.normalize == "count" else mass
