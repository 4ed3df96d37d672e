# SPDX-License-Identifier: Apache-2.0
"""Larger budgets for lower layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from kvpress.core.amount import Amount
from kvpress.core.checks import Count
from kvpress.core.helpers import helper, override_of
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
    """SnapKV with a budget that falls linearly from the first layer to the last; the mean over layers stays.

    With m pairs on average, the last layer keeps m / `beta`, and the first layer 2 m - m / `beta`: the larger `beta`, the
    steeper. The first layer leaves out at least as many pairs as the window w has: where 2 m - m / beta is more than n - w of
    a prompt of n tokens, it keeps n - w, and the last layer 2 m - (n - w). Where the last layer would keep less than the
    window, all layers keep m.

    Paper: Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, 2024,
    arXiv:2406.02069.
    Differs from the paper: budgets are those of NVIDIA kvpress, which shares out all pairs that stay; the paper shares out
    those outside the window, so that its pyramid is flatter (at 4096 tokens, ratio 0.5 and 32 layers, the last one keeps 163
    there and 102 here). Short prompts are compressed too, as the ratio asks. In later turns a layer that holds fewer pairs
    than its share keeps what it holds.
    """

    beta: Count = 20

    @property
    def allocator(self) -> Allocator:
        return Pyramid(self.window_size, self.beta, self.amount, override_of(self, "get_layer_budget"))

    @helper
    def get_layer_budget(self, module: nn.Module, q_len: int) -> int:
        """Return how many of `q_len` pairs per head the layer of an attention module keeps, all its layers counted."""
        pyramid, depths = Pyramid(self.window_size, self.beta, self.amount), module.config.num_hidden_layers  # type: ignore[union-attr]
        return pyramid.of_layer(int(module.layer_idx), int(depths), self.amount.of(q_len), q_len)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pyramid(Allocator):
    """Gives the layers that grow budgets that fall from the first to the last; see `PyramidKVPress`.

    `amount` is that of the press: shares of pairs count in the slope.
    """

    window_size: int
    beta: int
    amount: Amount
    ask: Callable[[nn.Module, int], int] | None = None

    by_layer = True

    def keeps_all(self, lengths: Sequence[int], mean: int) -> bool:
        return False  # upper layers keep less than the mean

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        # Of the pairs that stay in any case, such as protected ones, there is no choice in any layer.
        calls = [(each.view.call, each.view.available - each.view.target + mean) for each in scored]
        if self.ask is not None:
            return [self.ask(call.layer.module, held) for call, held in calls]
        return [self.of_layer(call.layer.depth, call.layer.depths, mean, held) for call, held in calls]

    def of_layer(self, depth: int, depths: int, mean: int, held: int) -> int:
        """Return how many of `held` pairs one of `depths` layers keeps, where they keep `mean` on average."""
        by_ratio = self.amount.budget is None and self.amount.of(held) == mean
        exact = held * (1 - self.amount.ratio) if by_ratio else float(mean)
        least, most = exact / self.beta, 2 * exact - exact / self.beta
        if most >= held - self.window_size:
            most = held - self.window_size
            least = 2 * exact - most
        if depths < 2 or mean >= held or not most >= least >= self.window_size:
            return mean
        step = (most - least) / (depths - 1)
        return round(most - depth * step)
