"""Heavy hitters: attention accumulated through the prompt and generation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from kvpress.checks import check_count
from kvpress.context import LayerCall, View
from kvpress.observe import ColumnMass
from kvpress.presses.base import Observers, ScorerPress, view_of
from kvpress.presses.evict import evict, top
from kvpress.registry import register


@register("h2o", "evict", "Zhang et al., 2023, arXiv:2306.14048")
@dataclass
class H2OPress(ScorerPress):
    """Keep the pairs with the most accumulated attention and the most recent ones, at a constant budget.

        score[b, h, t] = sum over all queries so far of softmax(q_i . k)[t], summed over the group

    After the prompt the budget is fixed; while tokens are generated the sums go on and every `interval` tokens the
    surplus is evicted. `recent_ratio` of the budget goes to the newest tokens. `normalize="count"` divides by the number
    of queries that saw the token.

    Paper: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, 2023, arXiv:2306.14048.
    Differs from the paper: query heads of a group share keys, so their sums are added; the prompt is read with full
    attention before the first eviction, as in the authors' code.
    """

    recent_ratio: float = 0.5
    interval: int = 1
    normalize: Literal["none", "count"] = "none"

    acts_in_decoding: ClassVar[bool] = True

    def validate(self) -> None:
        super().validate()
        check_count("interval", self.interval)
        if not 0 <= self.recent_ratio <= 1:
            raise ValueError(f"recent_ratio must be in [0, 1], got {self.recent_ratio}")
        if self.normalize not in ("none", "count"):
            raise ValueError(f"normalize must be 'none' or 'count', got {self.normalize!r}")

    @property
    def protected(self) -> int:
        return 1

    def observers(self) -> Observers:
        return {**super().observers(), "mass": partial(ColumnMass)}

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict,
    ) -> Tensor:  # fmt: skip
        """Return accumulated attention `[b, h, n]`."""
        view = view_of(kwargs)
        mass = view.side["mass"]
        return mass if self.normalize == "none" else mass / view.observing_queries()

    def keep(self, group: list[View], kept: int) -> list[Tensor]:
        recent = round(kept * self.recent_ratio)
        masks = []
        for view in group:
            scores = self.scores(view).clone()
            scores[..., view.length - min(recent, view.length) :] = torch.inf
            masks.append(top(scores, min(kept, view.length)))
        return masks

    def after_decode(self, call: LayerCall) -> None:
        store = call.store
        if store.since_eviction < self.interval or (self.budget is None and self.compression_ratio == 0):
            return
        fixed = store.targets
        if self.budget is not None or fixed is not None:
            evict(call, self, lambda view: self.budget or fixed[view.rows[0]])  # type: ignore[index]
