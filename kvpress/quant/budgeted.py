# SPDX-License-Identifier: Apache-2.0
"""From a size to everything else: how many pairs, of which layers, in how many bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.report import parse_bytes
from kvpress.core.checks import Range
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, Wrapping
from kvpress.core.recipe import Allocator, Eviction, Recipe
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.scoring import Scored
from kvpress.presses.cake import share_out
from kvpress.presses.leverage_score import LeverageScorePress
from kvpress.presses.sample import SamplePress
from kvpress.quant.errors import MOST, QUERIES, ROUNDING, error
from kvpress.quant.priced import ByPrice, check_price
from kvpress.quant.widths import FittingCodec, Room, Sized, of_width

SMALLER = 10.0
"""How many times smaller a cache gets where no size is given."""


ENCODES = (
    Exemption("mask oracle", "what stays is encoded; its parts, `sample(x)` and `rotated`, are compared on their own"),
    Exemption("pairs per layer", "layers share pairs by what losing them costs, which its own tests measure"),
)
Smaller = Annotated[float, Range(1, above=True)]


class OfSize(Wrapping):
    """What follows from how many times `smaller` a cache shall be, or how many `bytes`; see `BudgetedPress`."""

    smaller: Smaller | None
    bytes: str | int | None
    per_pair: bool

    def validate(self) -> None:
        super().validate()
        if self.bytes is None:
            return
        if self.smaller is not None:
            raise ValueError(
                f"smaller={self.smaller} and bytes={self.bytes} both say the size of the cache: leave out one of them"
            )
        if isinstance(self.bytes, bool) or not isinstance(self.bytes, (str, int)):
            raise TypeError(f"bytes must be a size such as 4GB, 512MiB or 300000, got {self.bytes!r}")
        if parse_bytes(str(self.bytes), "bytes") < 1:
            raise ValueError(f"bytes must be >= 1, got {self.bytes}")

    def room(self, model: ModelFacts | None, weighs: bool = False) -> Room:
        """Return what the cache may hold."""
        if self.bytes is None:
            return Room(model, smaller=SMALLER if self.smaller is None else self.smaller, weighs=weighs)
        return Room(model, bytes=parse_bytes(str(self.bytes), "bytes"), weighs=weighs)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        room = self.room(model)
        # A factor is the same at every length, so that its width is known before any.
        fixed = room.smaller is not None and not self.per_pair
        codec = of_width(room.bits(1)) if fixed else FittingCodec(room, per_pair=self.per_pair)
        return replace(super().recipe(model), codec=lambda layer: codec)

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        name, inner = type(self.inner).__name__, step.allocator
        if not step.amount.keeps_all:
            size = f"smaller={self.room(model).smaller}" if self.bytes is None else f"bytes={self.bytes}"
            raise ValueError(f"{size} says how many pairs stay: leave out the ratio or budget of {name}")
        if inner.scope == "cache" or inner.by_layer or inner.decides or not step.schedule.prompt:
            raise TypeError(
                f"{type(self).__name__} shares out the pairs of a prompt among layers, and {name} decides about them itself"
            )
        room = self.room(model, step.weighs)
        allocator: Allocator = ByError(inner, scope="cache")
        if self.per_pair:
            check_price(step, name)
            allocator = ByPrice(room=room, scope="cache")
        return replace(step, amount=Sized(room=room), allocator=allocator, watches=(*step.watches, QUERIES))


@register(
    "budgeted",
    "budget",
    example="budgeted(snapkv):smaller=10",
    cases=(
        "budgeted(snapkv:window_size=4):smaller=20",
        "budgeted(adakv(knorm)):smaller=20",
        "budgeted(snapkv:window_size=4):smaller=12,per_pair=true",
    ),
    refuses=(
        Refusal("budgeted(snapkv:0.5)", "the size says how many pairs stay"),
        Refusal("budgeted(pyramidkv)", "both would share out pairs among layers"),
        Refusal("budgeted(knorm) + kivi:bits=4", "the size decides how pairs are stored"),
        Refusal("budgeted(adakv(knorm)):per_pair=true", "both would share out pairs among heads"),
        Refusal("budgeted(chunkkv(knorm)):per_pair=true", "scores that only order pairs have no price"),
    ),
    exempt=ENCODES,
)
@dataclass
class BudgetedPress(OfSize):
    """Make the cache of a prompt `smaller` times smaller, or no larger than `bytes`: another press scores, the rest follows.

        bits   by the room r that is left for a number, 16 / smaller in a model of 16 bits:
               8 where r >= 8.6, 4 where r >= 2.6, 3 where r >= 0.53, 2 below
        pairs  as many as fit in that many bits, all that is held beside the codes counted; all where they fit
        layer  pairs ~ sqrt(e),   e = mean |o' - o|^2 / mean |o|^2 over the newest 64 tokens and all heads

    o is the attention output of one of the newest tokens, at most a quarter of the prompt, and o' that with the pairs evicted
    that the inner press leaves out at the mean budget; the newest tokens themselves stay whole, as those of a question would.
    If the error of a layer falls as 1 / pairs, this shares pairs out with the least sum of errors. No layer gets more than
    twice the mean or less than half of it. Pairs are stored as by `RotatedPress`, without a dense tail; generated tokens
    stay dense until 32 of them are encoded together. A prompt keeps 16 pairs a head at least.

    `smaller` is 10 where no size is given. `bytes`, such as 512MiB, 4GB or 300000, are those of all layers of one row of a
    batch, sliding windows among them, after its prompt: a row is compressed as it would be alone, so that B rows take B times
    as much. The bits are chosen once the prompt's length is known, for each row by itself; a prompt that fits as it is stays
    so. What is held is at most that, and less by 1% or a pair of every head; by more where all pairs fit into some bits and
    not into the next more, or where layers keep all their pairs, which need no places then. Bytes that do not hold 16 pairs a
    head in 2 bits are refused. Generated tokens come on top, in the bits of the prompt, until a further turn of several
    tokens: this is cut to the size together with all before it, and encoded to its last pair. With `smaller`, that is the size
    of all tokens seen by then, so that the cache grows with them; with `bytes`, it is the same as before.

    With `per_pair`, pairs and bits are one choice: of 0 (dropped), 2, 3, 4, 8 and 16 bits, each pair takes those with the least

        g s l(bits) + price * bytes(bits)

    s is its score over the mean score of its head, g the error e of its layer over the mean of all layers, between a half and
    two, l is 1 where the pair is dropped, and else the shares of squares that Gaussian keys and values lose, added up: 0.238,
    0.075, 0.023, 0.0002 and 0. The price is the lowest one at which all bytes fit, places, scales and weights of pairs and the
    means of each width among them, so heads and layers compete. Pairs of different widths are parts of one segment; in a
    batch, every head holds means for each width that some row uses. Tokens that follow the prompt take the bits given above;
    pairs that are encoded keep theirs.

    Paper: none; `per_pair` is of the kind of RDKV, 2026 (arXiv 2605.08317).
    Differs from the paper: from RDKV, any scorer says what pairs are worth, layers are weighed by their error, all that is held
    is paid for, and keys and values of a pair have the same bits in all channels.
    """

    press: BasePress
    smaller: Smaller | None = None
    bytes: str | int | None = None
    per_pair: bool = False

    @property
    def inner(self) -> BasePress:
        return self.press


@register(
    "frontier",
    "budget",
    example="frontier:smaller=20",
    cases=("frontier:bytes=12KB", "frontier:smaller=14,per_pair=true"),
    exempt=ENCODES,
)
@dataclass
class FrontierPress(OfSize):
    """Make the cache of a prompt `smaller` times smaller by what was found to lose least; nothing else to set.

    `BudgetedPress` around `SamplePress` around `LeverageScorePress`: three quarters of the pairs are those whose keys the
    others cannot stand in for, and the first four tokens; one quarter is drawn from the rest and weighed. Layers share pairs
    by what losing them costs, and what stays takes 2, 3 or 4 bits a channel. `bytes` say the size instead, such as 512MiB, and
    with `per_pair` every pair has bits of its own; see `BudgetedPress`.

    Paper: none; those of the parts are named by `LeverageScorePress`, `SamplePress` and `RotatedPress`.
    Differs from the paper: nothing.
    """

    smaller: Smaller | None = None
    bytes: str | int | None = None
    per_pair: bool = False

    @property
    def inner(self) -> BasePress:
        return SamplePress(LeverageScorePress(sketch_dimension=1024, ridge=0.1, n_sink=4))


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
        room = torch.tensor([_mean_length(layer) for layer in layers])
        shares = share_out(mean * len(layers), wanted, room)
        return [count for layer, share in zip(layers, shares, strict=True) for count in self.inner.counts(layer, share)]

    def within_layers(self) -> Allocator:
        return self.inner


def _mean_length(layer: Sequence[Scored]) -> int:
    """Return the pairs per head that a layer holds on average: heads that compete differ after an earlier turn."""
    lengths = [each.view.length for each in layer for _ in range(each.view.shape[1])]
    return sum(lengths) // len(lengths)
