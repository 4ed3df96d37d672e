# SPDX-License-Identifier: Apache-2.0
"""Record the scores that a press computes while a model reads, view by view."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvpress.core.model import ModelFacts
from kvpress.core.press import ScorerAround, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.scoring import Scored
from kvpress.observe.view import View

Views = list[tuple[View, Tensor]]


@dataclass
class Recorded(WrapperPress):
    """Leave a press as it is, and record the views that it scores with their scores."""

    views: Views = field(default_factory=list)

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        return replace(step, scorer=_Recorder(step.scorer, self.views))


@dataclass(frozen=True)
class _Recorder(ScorerAround):
    views: Views

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        inner = Scored(scored.view, self.inner)
        self.views.append((scored.view, inner.scores))
        return self.inner.choose(inner, counts)


def scored(model: Any, press: Any, ids: Tensor, mask: Tensor | None = None, **settings: Any) -> dict[int, Views]:
    """Run a prompt through `press`; return `(view, scores [b, h, n])` of every view that was cut, by layer."""
    recorded = Recorded(press)
    with recorded(model):
        model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, **settings)
    views_by_layer: dict[int, Views] = {}
    for view, scores in recorded.views:
        views_by_layer.setdefault(view.call.layer.index, []).append((view, scores))
    return views_by_layer


def one_view(model: Any, press: Any, ids: Tensor, layer: int = 0) -> tuple[View, Tensor]:
    """Return the only view of a layer and its scores."""
    ((view, scores),) = scored(model, press, ids)[layer]
    return view, scores


def marked(scores: Tensor, count: int) -> list[int]:
    """Indexes of the `count` largest of a vector, ascending."""
    return sorted(torch.argsort(scores, descending=True)[:count].tolist())
