"""What a press scored while a model read, view by view."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpress.context import View


def scored(model: Any, press: Any, ids: Tensor, mask: Tensor | None = None, **settings: Any) -> dict[int, list[Any]]:
    """Run a prompt through `press`; return `(view, scores [b, h, n])` of every view, by layer."""
    found: dict[int, list[tuple[View, Tensor]]] = {}
    own = press.keep

    def keep(group: list[View], kept: int) -> list[Tensor]:
        found.setdefault(group[0].call.layer, []).extend((view, press.scores(view)) for view in group)
        return own(group, kept)

    press.keep = keep
    try:
        with press(model):
            model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, **settings)
    finally:
        del press.keep
    return found


def one_view(model: Any, press: Any, ids: Tensor, layer: int = 0) -> tuple[View, Tensor]:
    """Return the only view of a layer and its scores."""
    ((view, scores),) = scored(model, press, ids)[layer]
    return view, scores


def marked(scores: Tensor, count: int) -> list[int]:
    """Indexes of the `count` largest of a vector, ascending."""
    return sorted(torch.argsort(scores, descending=True)[:count].tolist())
