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
    """Mark the `count` largest scores of the last axis, which hold no NaN; of equal ones the newest.

    As a tensor, `count` has the shape of `scores` without the last axis.
    """
    length = scores.shape[-1]
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(length, device=scores.device) < (count if isinstance(count, int) else count[..., None])
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, length - 1 - order, first.expand_as(order))


def class_name(scorer: Any) -> str:
    """Return the name of the class that a user knows: that of the press where `scorer` calls its `score`."""
    return type(getattr(scorer, "press", scorer)).__name__


def check_scores(scores: Any, scorer: Any, view: View) -> None:
    """Refuse scores of another shape than `[b, h, n]`, and NaN among them. Infinite scores are allowed.

    Raises:
        TypeError: `scores` is not a tensor.
        ValueError: its shape is another than that of the pairs of the view.
        FloatingPointError: it holds NaN; the message names the layer, the row, the head and the first such position.
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
    """Refuse NaN in an array `[b, h, n]` of a view.

    Raises:
        FloatingPointError: the message names the layer, the row, the head and the first position.
    """
    bad = scores.isnan()
    if not bool(bad.any()):
        return
    row, head, slot = bad.nonzero()[0].tolist()
    first = view.heads.indices(view.call.store.heads)[0]
    raise FloatingPointError(
        f"NaN in {name}, layer {view.layer}, row {view.rows[row]}, head {first + head}, position "
        f"{int(view.positions[row, head, slot])}: return -inf for pairs that should go first"
    )


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
        check_scores(scores, self.scorer, self.whole)
        return scores.float() if self.among is None else scores.float().gather(2, self._index)

    def choose(self, counts: int | Tensor) -> Tensor:
        """Return the scorer's mask `[b, h, n]` of `counts` pairs of every head, a number or `[b, h]`.

        Raises:
            TypeError, ValueError: the scorer's `choose` returned anything but a mask of that shape.
        """
        mask = self.scorer.choose(self, counts)
        name, shape = class_name(self.scorer), tuple(self.view.shape)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"{name}.choose must return a mask, torch.bool {shape}, got {kind}")
        if tuple(mask.shape) != shape:
            raise ValueError(f"{name}.choose must return a mask of shape {shape}, got {tuple(mask.shape)}")
        return mask

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
