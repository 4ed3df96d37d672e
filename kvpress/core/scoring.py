# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs, and the choice of the pairs that a head keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvpress.observe.observer import Wanted
from kvpress.observe.view import View


def top(scores: Tensor, count: int | Tensor) -> Tensor:
    """Return the mask of the `count` largest scores of the last axis; of equal scores, the newest pair wins.

    `scores` must hold no NaN. A tensor `count` has the shape of `scores` without the last axis.
    """
    length = scores.shape[-1]
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(length, device=scores.device) < (count if isinstance(count, int) else count[..., None])
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, length - 1 - order, first.expand_as(order))


def best_beside(scores: Tensor, counts: int | Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the mask `[b, h, n]` of the best pairs, and the number of other pairs that get the rest of the budget, `[b, h]`.

    `counts` is the budget, a number or `[b, h]`, of which the other pairs get `share`. Pairs with infinite `scores [b, h, n]`
    come first, and are subtracted from the budget before it is shared.
    """
    budget = torch.as_tensor(counts, device=scores.device).expand(scores.shape[:2])
    shared = (budget - (scores == torch.inf).sum(dim=2)).clamp_min(0)
    num_others = (shared * share).round().long()
    return top(scores, budget - num_others), num_others


def class_name(scorer: Any) -> str:
    """Return the class name for messages: that of the press if `scorer` calls the `score` of a press."""
    return type(getattr(scorer, "press", scorer)).__name__


def check_scores(scores: Any, scorer: Any, view: View) -> None:
    """Check that scores are a tensor `[b, h, n]` without NaN; infinite scores are allowed.

    Raises:
        TypeError: `scores` is not a tensor.
        ValueError: the shape is not that of the pairs of the view.
        FloatingPointError: a score is NaN; the message names the layer, the row, the head and the first such position.
    """
    name = class_name(scorer)
    if not isinstance(scores, Tensor):
        raise TypeError(f"{name} must return scores as a tensor {tuple(view.shape)}, got {type(scores).__name__}")
    if tuple(scores.shape) != tuple(view.shape):
        raise ValueError(
            f"{name} must return one score for each pair, of shape {tuple(view.shape)} (rows, heads, pairs), in layer "
            f"{view.layer}, got {tuple(scores.shape)}"
        )
    check_numbers(scores, f"the scores of {name}", view)


def check_numbers(scores: Tensor, name: str, view: View) -> None:
    """Check that an array `[b, h, n]` of a view holds no NaN.

    Raises:
        FloatingPointError: a number is NaN; the message names the layer, the row, the head and the first position.
    """
    is_nan = scores.isnan()
    if not bool(is_nan.any()):
        return
    row, head, slot = is_nan.nonzero()[0].tolist()
    first = view.model_heads.start
    raise FloatingPointError(
        f"NaN in {name}, layer {view.layer}, row {view.rows[row]}, head {first + head}, position "
        f"{int(view.positions[row, head, slot])}: return -inf for pairs that should go first"
    )


class Scorer(Protocol):
    """Computes the worth of each pair, and chooses the pairs that stay."""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        """Observers that the scores are read from."""

    def scores(self, view: View) -> Tensor:
        """Return the worth of every pair of a view, `[b, h, n]`; the pairs with the largest are kept, +inf first."""

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Mark `counts` pairs of every head, a number or `[b, h]`, as a mask `[b, h, n]`."""

    def without_values(self) -> Scorer:
        """Return the scorer without the factor for the norm of values, for wrappers that multiply by it themselves."""

    def for_fixed_size(self) -> Scorer:
        """Return the scorer for a cache whose turns share one size, so that pairs of earlier turns compete with new ones."""

    @property
    def ranks(self) -> bool:
        """Whether scores only order the pairs of a head; they can be neither weighted nor compared between heads."""

    @property
    def weighs(self) -> bool:
        """Whether `choose` gives kept pairs log-weights."""


@dataclass
class Scored:
    """A view with the scores of its pairs, computed at first use."""

    view: View
    """Pairs that can be evicted."""
    scorer: Scorer
    """Computes the scores."""
    log_weight: Tensor | None = None
    """Log-weights `[b, h, n]` that the choice adds to those of the pairs; set by scorers that weigh."""
    among: View | None = None
    """Larger view that `view` takes its pairs from; scores are computed over all of its pairs. None for `view` itself."""

    @property
    def whole(self) -> View:
        """View of all pairs of the heads, for allocators that measure them."""
        return self.view if self.among is None else self.among

    @cached_property
    def scores(self) -> Tensor:
        """Scores `[b, h, n]`, float32."""
        scores = self.scorer.scores(self.whole)
        check_scores(scores, self.scorer, self.whole)
        return scores.float() if self.among is None else scores.float().gather(2, self._index)

    def choose(self, counts: int | Tensor) -> Tensor:
        """Return the mask `[b, h, n]` of the `counts` pairs (a number, or `[b, h]`) that the scorer keeps in every head.

        Raises:
            TypeError: the scorer returned no boolean tensor.
            ValueError: the mask has another shape.
        """
        mask = self.scorer.choose(self, counts)
        name, shape = class_name(self.scorer), tuple(self.view.shape)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"{name}.choose must return a mask, torch.bool {shape}, got {kind}")
        if tuple(mask.shape) != shape:
            raise ValueError(f"{name}.choose must return a mask of shape {shape}, got {tuple(mask.shape)}")
        return mask

    def share(self, measure: Callable[[Scored, int | Tensor], Tensor], counts: int | Tensor = 0, /) -> Tensor:
        """Return `measure(self, counts)`, numbers `[b, h, ...]` about heads.

        Allocators measure through this function, because heads may be on other ranks (`kvpress.core.gathered`).
        """
        return measure(self, counts)

    def put(self, array: Tensor, target: Tensor) -> Tensor:
        """Write `array [b, h, n]`, a number for each pair of `view`, into `target [b, h, m]`, which covers all pairs.

        The pairs of `view` are the oldest n, or those that its index takes from `among`.
        """
        if self.among is None:
            target[..., : self.view.length] = array
            return target
        return target.scatter_(2, self._index, array)

    @property
    def _index(self) -> Tensor:
        assert self.view.index is not None  # noqa: S101 - a view of some pairs
        return self.view.index


class ByScore:
    """Base of scorers that keep the pairs with the largest scores; subclasses implement `scores`."""

    ranks: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    @property
    def wants(self) -> tuple[Wanted, ...]:
        """Observers that the scores are read from."""
        return ()

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Return the mask of the pairs with the largest scores."""
        return top(scored.scores, counts)

    def without_values(self) -> Any:
        """Return the scorer without the factor for the norm of values; itself if it has none."""
        return self

    def for_fixed_size(self) -> Any:
        """Return the scorer for a cache whose turns share one size; itself if it scores pairs of all turns alike."""
        return self
