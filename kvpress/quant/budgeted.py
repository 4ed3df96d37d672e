# SPDX-License-Identifier: Apache-2.0
"""From a size to everything else: how many pairs, of which layers, in how many bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.segment import SLOT, WEIGHT
from kvpress.core.checks import Range
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import BasePress, Wrapping
from kvpress.core.recipe import Allocator, Amount, Eviction, Recipe, Scored
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.presses.cake import share_out
from kvpress.presses.leverage_score import LeverageScorePress
from kvpress.presses.sample import SamplePress
from kvpress.quant.rotated import CentredCodec

QUERIES = Wanted(RecentQueries, 64)
"""The newest tokens, whose attention stands for that of tokens to come."""
OFFSETS = 24
"""Bytes of the place and length of a stream."""
LEAST = 16
"""Pairs of a head that stay whatever the size."""
WIDTHS = {8: 8.6, 4: 2.6, 3: 0.53, 2: 0.0}
"""Bits of a channel, and from how many bits a number may take on average they are used."""
ROUNDING = 1e-6
"""Relative squared errors below this tell layers apart by their rounding."""
MOST = 2.0
"""How many times the mean a layer gets at most; at least it gets one over that."""


ENCODES = (
    Exemption("mask oracle", "what stays is encoded; its parts, `sample(x)` and `rotated`, are compared on their own"),
    Exemption("fuzz", "there is no size at which nothing is encoded; `sample(x)` and `rotated` are drawn"),
    Exemption("pairs per layer", "layers share pairs by what losing them costs, which its own tests measure"),
)
Smaller = Annotated[float, Range(1, above=True)]


class OfSize(Wrapping):
    """What follows from how many times `smaller` a cache shall be; see `BudgetedPress`."""

    smaller: Smaller

    def codec(self, model: ModelFacts | None) -> CentredCodec:
        """Return how pairs are stored."""
        room = 8 * (2 if model is None else model.dtype.itemsize) / self.smaller
        bits = next((bits for bits, least in WIDTHS.items() if room >= least), min(WIDTHS))
        return CentredCodec((bits, bits), 0)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        codec = self.codec(model)
        return replace(super().recipe(model), codec=lambda layer: codec)

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        name, inner = type(self.inner).__name__, step.allocator
        if not step.amount.keeps_all:
            raise ValueError(
                f"smaller={self.smaller} says how many pairs stay: leave out the ratio or budget of {name}"
            )
        if inner.scope == "cache" or inner.by_layer or inner.decides or not step.schedule.prompt:
            raise TypeError(
                f"{type(self).__name__} shares out the pairs of a prompt among layers, and {name} decides about them itself"
            )
        allocator = ByError(inner, scope="cache")
        return replace(
            step, amount=self.sized(model, step.weighs), allocator=allocator, watches=(*step.watches, QUERIES)
        )

    def sized(self, model: ModelFacts | None, weighs: bool) -> Sized:
        """Return how many pairs stay, of a model with heads of 128 numbers in 16 bits where none is given."""
        layers = [LayerFacts(0, 0, "full_attention", 1, 1, 128)] if model is None else list(model.growing)
        size = 2 if model is None else model.dtype.itemsize
        streams = sum(layer.kv_heads for layer in layers)
        codec = self.codec(model)
        pair = sum(layer.kv_heads * codec.pair_bytes(layer.head_dim, torch.float16) for layer in layers) / streams
        once = sum(layer.kv_heads * codec.fixed_bytes(layer.head_dim) for layer in layers) / streams
        full = sum(layer.kv_heads * layer.pair_dim * size for layer in layers) / streams
        return Sized(full=full / self.smaller, pair=pair + SLOT + WEIGHT * weighs, once=once + OFFSETS)


@register(
    "budgeted",
    "budget",
    example="budgeted(snapkv):smaller=10",
    cases=("budgeted(snapkv:window_size=4):smaller=20", "budgeted(adakv(knorm)):smaller=20"),
    refuses=(
        Refusal("budgeted(snapkv:0.5)", "the size says how many pairs stay"),
        Refusal("budgeted(pyramidkv)", "both would share out pairs among layers"),
        Refusal("budgeted(knorm) + kivi:bits=4", "the size decides how pairs are stored"),
    ),
    exempt=ENCODES,
)
@dataclass
class BudgetedPress(OfSize):
    """Make the cache of a prompt `smaller` times smaller: another press scores, all else follows from the size.

        bits   by the room r that is left for a number, 16 / smaller in a model of 16 bits:
               8 where r >= 8.6, 4 where r >= 2.6, 3 where r >= 0.53, 2 below
        pairs  as many as fit in that many bits, all that is held beside the codes counted; all where they fit
        layer  pairs ~ sqrt(e),   e = mean |o' - o|^2 / mean |o|^2 over the newest 64 tokens and all heads

    o is the attention output of one of the newest tokens, at most a quarter of the prompt, and o' that with the pairs evicted
    that the inner press leaves out at the mean budget; the newest tokens themselves stay whole, as those of a question would.
    If the error of a layer falls as 1 / pairs, this shares pairs out with the least sum of errors. No layer gets more than
    twice the mean or less than half of it. Pairs are stored as by `RotatedPress`, without a dense tail; tokens that follow
    the prompt stay dense until 32 of them are encoded together. A prompt keeps 16 pairs a head at least.

    Paper: none.
    Differs from the paper: nothing.
    """

    press: BasePress
    smaller: Smaller = 10.0

    @property
    def inner(self) -> BasePress:
        return self.press


@register("frontier", "budget", example="frontier:smaller=20", cases=("frontier:smaller=20",), exempt=ENCODES)
@dataclass
class FrontierPress(OfSize):
    """Make the cache of a prompt `smaller` times smaller by what was found to lose least; nothing else to set.

    `BudgetedPress` around `SamplePress` around `LeverageScorePress`: three quarters of the pairs are those whose keys the
    others cannot stand in for, and the first four tokens; one quarter is drawn from the rest and weighed. Layers share pairs
    by what losing them costs, and what stays takes 2, 3 or 4 bits a channel.

    Paper: none; those of the parts are named by `LeverageScorePress`, `SamplePress` and `RotatedPress`.
    Differs from the paper: nothing.
    """

    smaller: Smaller = 10.0

    @property
    def inner(self) -> BasePress:
        return SamplePress(LeverageScorePress(sketch_dimension=1024, ridge=0.1, n_sink=4))


@dataclass(frozen=True)
class Sized(Amount):
    """As many pairs of `pair` bytes as fit in `full` bytes a token, after `once` bytes for the head."""

    full: float = field(default=0.0, kw_only=True)
    pair: float = field(default=1.0, kw_only=True)
    once: float = field(default=0.0, kw_only=True)

    @property
    def keeps_all(self) -> bool:
        return False

    def of(self, tokens: int) -> int:
        return min(tokens, max(LEAST, int((tokens * self.full - self.once) / self.pair)))

    def check(self, tokens: int) -> None:
        del tokens


@dataclass(frozen=True)
class ByError(Allocator):
    """Shares pairs out among layers by what the scorer's choice at the mean costs each; the `inner` one, within a layer.

    See `BudgetedPress`.
    """

    inner: Allocator = field(default_factory=Allocator)

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return self.inner.ragged

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        layers = [list(part) for _, part in groupby(scored, key=lambda each: each.view.layer)]
        wanted = torch.tensor([error(layer, mean) for layer in layers], dtype=torch.float64)
        wanted = (wanted + ROUNDING).sqrt()
        wanted = (wanted / wanted.mean()).clamp(1 / MOST, MOST)
        room = torch.tensor([min(each.view.length for each in layer) for layer in layers])
        shares = share_out(mean * len(layers), wanted, room)
        return [count for layer, share in zip(layers, shares, strict=True) for count in self.inner.counts(layer, share)]

    def within_layers(self) -> Allocator:
        return self.inner


def error(layer: Sequence[Scored], count: int) -> float:
    """Return the relative squared error of a layer's output for the newest tokens, if `count` pairs of a head stay."""
    lost = whole = 0.0
    for scored in layer:
        mask = scored.scorer.choose(scored, min(count, scored.view.length))
        weight = torch.zeros(mask.shape, device=mask.device) if scored.log_weight is None else scored.log_weight.float()
        for h, head in enumerate(scored.view.per_head()):
            queries = head.newest_queries(QUERIES)[:, :, -max(1, head.seen // 4) :]
            newest = head.positions[:, 0] >= head.seen - queries.shape[2]
            factor = torch.where(newest, 1.0, mask[:, h] * weight[:, h].exp())
            attention, values = head.attention(queries)[:, 0], head.values.float()
            left, out = attention * factor[:, None, None], attention @ values
            # What an attention sink takes is no pair's, and stays.
            total = left.sum(dim=-1, keepdim=True) + (1 - attention.sum(dim=-1, keepdim=True)).clamp_min(0)
            lost += float((left @ values / total.clamp_min(1e-30) - out).square().sum())
            whole += float(out.square().sum())
    return lost / max(whole, 1e-30)
