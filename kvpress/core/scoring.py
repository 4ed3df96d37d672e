# SPDX-License-Identifier: Apache-2.0
"""What pairs are worth, and which of them a head keeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvpress.observe.observer import Wanted
from kvpress.observe.view import View


def top(scores: Tensor, count: int | Tensor) -> Tensor:
    """Mark the `count` largest scores of the last axis; of equal ones the newest. NaN counts as smallest.

    As a tensor, `count` has the shape of `scores` without the last axis.
    """
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    length = scores.shape[-1]
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(length, device=scores.device) < (count if isinstance(count, int) else count[..., None])
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, length - 1 - order, first.expand_as(order))


class Scorer(Protocol):
    """What is each pair worth?"""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        """Observers that the scores are read from."""

    def scores(self, view: View) -> Tensor:
        """Return the worth of every pair of a view, `[b, h, n]`; the largest are kept, infinite ones first."""

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Mark `counts` pairs of every head, a number or `[b, h]`, as a mask `[b, h, n]`."""

    def without_values(self) -> Scorer:
        """Return the scorer that leaves the size of values out, for wrappers that weigh them themselves."""

    @property
    def ranks(self) -> bool:
        """Whether scores only order the pairs of a head, so that they can be neither weighed nor compared between heads."""

    @property
    def weighs(self) -> bool:
        """Whether `choose` gives the pairs that stay logit weights."""


@dataclass
class Scored:
    """A view, and what its pairs are worth, worked out when first asked for.

    A scorer that weighs leaves the `log_weight [b, h, n]` here that its choice adds to those of the pairs. An allocator that
    also decides how pairs are stored leaves their bits, `width [b, h, n]`, for the codec (`WIDTH`). Where the view shows some
    pairs of another one, `among`, they are worth what they are there.
    """

    view: View
    scorer: Scorer
    log_weight: Tensor | None = None
    among: View | None = None
    width: Tensor | None = None

    @property
    def whole(self) -> View:
        """All pairs of the heads: what allocators measure."""
        return self.view if self.among is None else self.among

    @cached_property
    def scores(self) -> Tensor:
        """Scores `[b, h, n]`, float32."""
        scores = self.scorer.scores(self.whole)
        if scores.shape != self.whole.shape:
            name = type(self.scorer).__name__
            raise ValueError(f"{name}.score returned {tuple(scores.shape)}, not {tuple(self.whole.shape)}")
        return scores.float() if self.among is None else scores.float().gather(2, self._index)

    def put(self, array: Tensor, whole: Tensor) -> Tensor:
        """Set those of `whole [b, h, m]` that the view shows, the oldest ones or some `among` all, to `array [b, h, n]`."""
        if self.among is None:
            whole[..., : self.view.length] = array
            return whole
        return whole.scatter_(2, self._index, array)

    @property
    def _index(self) -> Tensor:
        assert self.view.index is not None  # noqa: S101 - a view of some pairs
        return self.view.index


class ByScore:
    """A scorer whose best pairs are kept; scorers derive from it and give `scores`."""

    ranks: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    @property
    def wants(self) -> tuple[Wanted, ...]:
        """Observers that the scores are read from."""
        return ()

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Mark the pairs with the largest scores."""
        return top(scored.scores, counts)

    def without_values(self) -> Any:
        """Return the scorer that leaves the size of values out: this one, where it does so anyway."""
        return self
