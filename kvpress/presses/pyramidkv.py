# SPDX-License-Identifier: Apache-2.0
"""PyramidKV: larger budgets for lower layers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvpress.core.amount import Amount
from kvpress.core.checks import Count
from kvpress.core.recipe import Allocator
from kvpress.core.registry import Exemption, register
from kvpress.core.scoring import Scored
from kvpress.presses.snapkv import SnapKVPress


@register(
    "pyramidkv",
    "budget",
    "Cai et al., 2024, arXiv:2406.02069",
    example="pyramidkv:0.5",
    cases=("pyramidkv:0.5,window_size=4",),
    exempt=(Exemption("pairs per layer", "lower layers get more; budgets and their mean have tests of their own"),),
)
@dataclass
class PyramidKVPress(SnapKVPress):
    """Run SnapKV with a budget that falls linearly from the first layer to the last, at the same mean over layers.

    With m pairs on average, the last layer keeps m / `beta`, and the first layer 2 m - m / `beta`: a larger `beta` makes
    the slope steeper. The first layer evicts at least as many pairs as the window w has: where 2 m - m / beta is more than
    n - w of a prompt of n tokens, the first layer keeps n - w, and the last layer 2 m - (n - w). Where the last layer would
    keep less than the window, all layers keep m as with SnapKV, with a RuntimeWarning.

    Paper: Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, 2024,
    arXiv:2406.02069.
    Differs from the paper: budgets are those of NVIDIA kvpress, which distributes all kept pairs; the paper distributes
    those outside the window, which makes its pyramid flatter (at 4096 tokens, ratio 0.5 and 32 layers, the last layer keeps
    163 pairs in the paper and 102 here). Short prompts are compressed too, by the same ratio. In later turns a layer with
    fewer pairs than its budget evicts nothing.
    """

    beta: Count = 20

    @property
    def allocator(self) -> Allocator:
        return Pyramid(self.window_size, self.beta, self.amount)


@dataclass(frozen=True)
class Pyramid(Allocator):
    """Distribute budgets that fall linearly over the growing layers; see `PyramidKVPress`."""

    window_size: int
    """Newest pairs that every layer keeps."""
    beta: int
    """Steepness: the last layer keeps 1 / `beta` of the mean."""
    amount: Amount
    """Ratio or budget of the press; a ratio gives budgets before rounding."""

    by_layer = True

    def keeps_all(self, lengths: Sequence[int], mean: int) -> bool:
        return False  # upper layers keep less than the mean

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        # Pairs that are always kept, such as protected ones, are left out of every layer's budget.
        lengths = [(item.view.call, item.view.available - item.view.target + mean) for item in scored]
        sloped = [length for call, length in lengths if call.layer.depths > 1 and mean <= length - self.window_size]
        if any(self._slope(mean, length) is None for length in sloped):
            warnings.warn(
                f"pyramidkv keeps as many pairs in every layer as snapkv does: with beta={self.beta} the last layer would keep "
                f"fewer than its window of {self.window_size}; lower beta or window_size, or keep more pairs",
                RuntimeWarning,
                stacklevel=2,
            )
        return [self.of_layer(call.layer.depth, call.layer.depths, mean, length) for call, length in lengths]

    def of_layer(self, depth: int, depths: int, mean: int, length: int) -> int:
        """Return how many of `length` pairs the layer at `depth` of `depths` keeps, where layers keep `mean` on average."""
        slope = None if depths < 2 or mean >= length else self._slope(mean, length)
        if slope is None:
            return mean
        first, last = slope
        step = (first - last) / (depths - 1)
        return round(first - depth * step)

    def _slope(self, mean: int, length: int) -> tuple[float, float] | None:
        """Return the pairs of the first and the last layer, of `length`; None where all layers keep `mean`."""
        by_ratio = self.amount.budget is None and self.amount.of(length) == mean
        exact = length * (1 - self.amount.ratio) if by_ratio else float(mean)
        last, first = exact / self.beta, 2 * exact - exact / self.beta
        if first >= length - self.window_size:
            first = length - self.window_size
            last = 2 * exact - first
        return (first, last) if first >= last >= self.window_size else None
