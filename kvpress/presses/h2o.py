"""Heavy hitters: attention accumulated through the prompt and generation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from kvpress.checks import check_count
from kvpress.context import LayerCall, View
from kvpress.observe import ColumnMass, DecayedMass
from kvpress.presses.base import Observers, ScorerPress, view_of
from kvpress.presses.evict import evict, top
from kvpress.registry import register


@register("h2o", "evict", "Zhang et al., 2023, arXiv:2306.14048")
@dataclass
class H2OPress(ScorerPress):
    """Keep the pairs with the most accumulated attention and the most recent ones, at a constant budget.

        score[b, h, t] = sum over all queries so far of softmax(q_i . k)[t], summed over the group

    After the prompt the budget is fixed; while tokens are generated the sums go on and every `interval` tokens the
    surplus is evicted. `recent_ratio` of the budget goes to the newest tokens. A plain sum favours old tokens, which more
    queries saw: `normalize="count"` divides by the number of queries that saw the token, `normalize="decay"` counts a query
    decay ** (number of later queries), so that sums fade by `decay`, in (0, 1], with every token that is read.

    Paper: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, 2023, arXiv:2306.14048.
    Differs from the paper: query heads of a group share keys, so their sums are added; the prompt is read with full
    attention before the first eviction, as in the authors' code.
    """

    recent_ratio: float = 0.5
    interval: int = 1
    normalize: Literal["none", "count", "decay"] = "none"
    decay: float | None = None

    acts_in_decoding: ClassVar[bool] = True

    def validate(self) -> None:
        super().validate()
        check_count("interval", self.interval)
        if not 0 <= self.recent_ratio <= 1:
            raise ValueError(f"recent_ratio must be in [0, 1], got {self.recent_ratio}")
        if self.normalize not in ("none", "count", "decay"):
            raise ValueError(f"normalize must be 'none', 'count' or 'decay', got {self.normalize!r}")
        if (self.normalize == "decay") != (self.decay is not None):
            raise ValueError(
                f"decay goes with normalize='decay', and with that only; got normalize={self.normalize!r}, decay={self.decay}"
            )
        if self.decay is not None and not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")

    @property
    def protected(self) -> int:
        return 1

    def observers(self) -> Observers:
        mass = {"mass": partial(ColumnMass)} if self.decay is None else {"decayed": partial(DecayedMass, self.decay)}
        return {**super().observers(), **mass}

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict,
    ) -> Tensor:  # fmt: skip
        """Return accumulated attention `[b, h, n]`."""
        return self.scores(view_of(kwargs))

    def scores(self, view: View) -> Tensor:
        """Return accumulated attention; keys and values are not looked at, which would copy them at every token."""
        mass = view.side["mass" if self.decay is None else "decayed_mass"]
        return mass / view.observing_queries() if self.normalize == "count" else mass

    def keep(self, group: list[View], kept: int) -> list[Tensor]:
        recent = round(kept * self.recent_ratio)
        masks = []
        for view in group:
            scores = self.scores(view).clone()
            scores[..., view.length - min(recent, view.length) :] = torch.inf
            masks.append(top(scores, min(kept, view.length)))
        return masks

    def after_decode(self, call: LayerCall) -> None:
        unlimited = self.budget is None and self.compression_ratio == 0
        if call.store.since_eviction >= self.interval and not unlimited:
            evict(call, self, self._target)

    def _target(self, view: View) -> int:
        """Pairs to keep while tokens are generated: the budget, or what was kept of the prompt."""
        store = view.call.store
        if self.budget is not None:
            return self.budget
        if store.targets is not None:
            return store.targets[view.rows[0]]
        return self.kept_of(view.seen - store.since_eviction)
