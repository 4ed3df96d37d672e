# SPDX-License-Identifier: Apache-2.0
"""Presses that take only a cache size, and derive from it the number of pairs per layer and their bits."""

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
from kvpress.presses.adakv import Competition
from kvpress.presses.cake import share_out
from kvpress.presses.leverage_score import LeverageScorePress
from kvpress.presses.sample import SamplePress
from kvpress.quant.bit_allocation import ByPrice, check_price
from kvpress.quant.errors import MOST, QUERIES, ROUNDING, error
from kvpress.quant.widths import GROUP, FittingCodec, Sized, SizeLimit

SMALLER = 10.0
"""Default compression factor, used if neither `smaller` nor `bytes` is set."""


ENCODES = (
    Exemption(
        "mask oracle",
        "kept pairs are encoded; `sample(x)` and `rotated`, which it consists of, are compared separately",
    ),
    Exemption("pairs per layer", "layers share pairs by the error of losing them, which separate tests measure"),
)
Smaller = Annotated[float, Range(1, above=True)]


class OfSize(Wrapping):
    """Base of presses that fit a cache into a size, given by `smaller` or `bytes`; see `BudgetedPress`."""

    smaller: Smaller | None
    bytes: str | int | None
    per_pair: bool
    by_channel: bool

    def validate(self) -> None:
        super().validate()
        if self.by_channel and (self.per_pair or self.bytes is not None):
            option = "per_pair=true" if self.per_pair else f"bytes={self.bytes}"
            raise ValueError(f"by_channel=true works with `smaller` alone: leave out {option}")
        if self.bytes is None:
            return
        if self.smaller is not None:
            raise ValueError(
                f"smaller={self.smaller} and bytes={self.bytes} both set the size of the cache: leave out one of them"
            )
        if isinstance(self.bytes, bool) or not isinstance(self.bytes, (str, int)):
            raise TypeError(f"bytes must be a size such as 4GB, 512MiB or 300000, got {self.bytes!r}")
        if parse_bytes(str(self.bytes), "bytes") < 1:
            raise ValueError(f"bytes must be >= 1, got {self.bytes}")

    @property
    def assumed_size(self) -> str:
        return f"smaller={SMALLER:g}" if self.smaller is None and self.bytes is None else ""

    def room(self, model: ModelFacts | None, weighs: bool = False) -> SizeLimit:
        """Return the size limit of the cache."""
        if self.bytes is None:
            return SizeLimit(
                model,
                smaller=SMALLER if self.smaller is None else self.smaller,
                weighs=weighs,
                by_channel=self.by_channel,
            )
        return SizeLimit(model, bytes=parse_bytes(str(self.bytes), "bytes"), weighs=weighs)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        room = self.room(model)
        if self.by_channel and model is not None:
            check_channel_groups(room)
        # A compression factor gives the same width for every prompt length, so one codec serves all prompts.
        fixed = room.smaller is not None and not self.per_pair
        codec = room.codec(room.bits(1)) if fixed else FittingCodec(room, per_pair=self.per_pair)
        return replace(super().recipe(model), codec=lambda layer: codec)

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        name, inner = type(self.inner).__name__, step.allocator
        if not step.amount.keeps_all:
            size = f"smaller={self.room(model).smaller}" if self.bytes is None else f"bytes={self.bytes}"
            raise ValueError(f"{size} sets how many pairs stay: leave out the ratio or budget of {name}")
        compete = inner.scope == "cache" and isinstance(inner, Competition)
        if (inner.scope == "cache" and not compete) or inner.by_layer or inner.decides or not step.schedule.prompt:
            raise TypeError(
                f"{type(self).__name__} shares out the pairs of a prompt among layers, and {name} has its own rule for that"
            )
        room = self.room(model, step.weighs)
        allocator: Allocator = inner if compete else ByError(inner, scope="cache")
        watches = step.watches if compete else (*step.watches, QUERIES)
        if self.per_pair:
            check_price(step, name)
            allocator, watches = ByPrice(room=room, scope="cache"), (*step.watches, QUERIES)
        if self.by_channel:
            allocator = InGroups(allocator, scope="cache")
        return replace(step, amount=Sized(room=room), allocator=allocator, watches=watches)


def check_channel_groups(room: SizeLimit) -> None:
    """Refuse a model with values that groups of channels do not divide; shorter values are one group."""
    dims = {layer.pair_dim - layer.head_dim for layer in room.layers}
    if wrong := sorted(dim for dim in dims if dim > GROUP and dim % GROUP):
        raise ValueError(
            f"by_channel=true stores values in groups of {GROUP} channels, which do not divide the head dim {wrong[0]} of the "
            "model: leave it out"
        )


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
        Refusal("budgeted(snapkv:0.5)", "the size sets how many pairs stay"),
        Refusal("budgeted(pyramidkv)", "both would share out pairs among layers"),
        Refusal("budgeted(knorm) + kivi:bits=4", "the size sets how pairs are stored"),
        Refusal(
            "budgeted(knorm):smaller=4,per_pair=true,by_channel=true", "by_channel=true works with `smaller` alone"
        ),
        Refusal("budgeted(adakv(knorm)):per_pair=true", "both would share out pairs among heads"),
        Refusal("budgeted(chunkkv(knorm)):per_pair=true", "scores that only order pairs have no price"),
    ),
    exempt=ENCODES,
    status="recommended",
)
@dataclass
class BudgetedPress(OfSize):
    """Make the cache of a prompt `smaller` times smaller, or fit it into `bytes`; the inner press scores the pairs.

        bits   by the bits r available per uncompressed number, 16 / smaller in a 16-bit model:
               8 if r >= 8.6, 4 if r >= 2.6, 3 if r >= 0.53, else 2
        pairs  as many as fit in these bits, all scales and indexes counted; all pairs if they fit
        layer  pairs ~ sqrt(e),   e = mean |o' - o|^2 / mean |o|^2 over the newest 64 tokens and all heads

    Here o is the attention output of one of the newest tokens, which are at most a quarter of the prompt. o' is the output
    without the pairs that the inner press evicts at the mean budget; the newest tokens themselves stay, as those of a
    question would. If the error of a layer falls as 1 / pairs, these shares give the least sum of errors. No layer gets more
    than twice the mean or less than half of it. Pairs are stored as by `RotatedPress`, without a dense tail; generated tokens
    stay dense until 32 of them are encoded together. A prompt keeps at least 16 pairs per head.

    `smaller` defaults to 10. `bytes`, such as 512MiB, 4GB or 300000, is the size of all layers of one row of a batch after its
    prompt, including sliding windows. Each row is compressed as it would be alone, so B rows take B times as much. The bits
    are chosen for each row once the length of its prompt is known; a prompt that fits uncompressed stays uncompressed. The
    cache never exceeds the size, and is normally smaller by at most 1% or one pair of every head. It is smaller by more if all
    pairs fit into some width but not into the next wider one, or if layers keep all their pairs, which then need no indexes.
    Where keys have a large bias (`QuantisingPress`), it and its tables of angles come on top. Bytes that do not hold 16 pairs
    per head in 2 bits are refused. Generated tokens are added to the size, in the bits of the prompt. A further turn of several
    tokens is cut to the size together with all earlier pairs, and encoded to its last pair. With `smaller`, the size then
    refers to all tokens seen, so the cache grows with them; with `bytes`, it stays the same.

    With `per_pair`, each pair gets its own bits. Of 0 (dropped), 2, 3, 4, 8 and 16 bits, each pair takes those with the least

        g s l(bits) + price * bytes(bits)

    Here s is the score of the pair over the mean score of its head. The weight g is the error e of its layer over the mean of
    all layers, limited to [1/2, 2]. The loss l is 1 for a dropped pair, else the relative squared errors of Gaussian keys and
    values added up: 0.238, 0.075, 0.023, 0.0002 and 0. The price is the lowest one at which all bytes fit, including indexes,
    scales and weights of pairs and the means of each width, so heads and layers compete. Pairs of different widths share one
    segment; in a batch, every head stores means for each width that some row uses. Tokens after the prompt take the bits
    given above; encoded pairs keep their bits.

    An inner press whose heads and layers compete, such as `kvzip`, shares out the pairs itself. With `by_channel`, pairs are
    stored as by `KiviPress` with groups of 32: 8 bits for up to 1.6 times smaller, else 4. Every head keeps a multiple of 32
    pairs, at least 32, so that no pair stays dense, and newer pairs wait for a group of 32.

    Paper: none; `per_pair` is similar to RDKV, 2026 (arXiv 2605.08317).
    Differs from the paper: unlike RDKV, any scorer can rate the pairs, layers are weighed by their error, all stored bytes are
    counted, and keys and values of a pair have the same bits in all channels.
    """

    press: BasePress
    smaller: Smaller | None = None
    bytes: str | int | None = None
    per_pair: bool = False
    by_channel: bool = False

    @property
    def inner(self) -> BasePress:
        return self.press


@register(
    "frontier",
    "budget",
    example="frontier:smaller=20",
    cases=("frontier:bytes=12KB", "frontier:smaller=14,per_pair=true"),
    exempt=ENCODES,
    status="recommended",
)
@dataclass
class FrontierPress(OfSize):
    """Make the cache of a prompt `smaller` times smaller with the most accurate combination measured; set nothing else.

    `BudgetedPress` around `SamplePress` around `LeverageScorePress`: three quarters of the kept pairs are the first four tokens
    and the pairs whose keys are hardest to express by other keys; one quarter is sampled from all other pairs and weighed.
    Layers share pairs by the error of losing them, and kept pairs take 2, 3 or 4 bits per channel. `bytes`, such as 512MiB,
    sets the size instead. With `per_pair`, every pair has its own bits, and with `by_channel`, keys are coded by channel; see
    `BudgetedPress`.

    Paper: none; see `LeverageScorePress`, `SamplePress` and `RotatedPress` for the papers of its components.
    Differs from the paper: nothing.
    """

    smaller: Smaller | None = None
    bytes: str | int | None = None
    per_pair: bool = False
    by_channel: bool = False

    @property
    def inner(self) -> BasePress:
        return SamplePress(LeverageScorePress(sketch_dimension=1024, ridge=0.1, n_sink=4))


@dataclass(frozen=True)
class ByError(Allocator):
    """Allocator that shares pairs out among layers by their errors at the mean budget; see `BudgetedPress`.

    `inner` shares out the pairs within a layer.
    """

    inner: Allocator = field(default_factory=Allocator)

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return self.inner.ragged

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        layers = [list(group) for _, group in groupby(scored, key=lambda entry: entry.view.layer)]
        weights = torch.tensor([error(layer, mean) for layer in layers], dtype=torch.float64)
        weights = (weights + ROUNDING).sqrt()
        weights = (weights / weights.mean()).clamp(1 / MOST, MOST)
        room = torch.tensor([_mean_length(layer) for layer in layers])
        shares = share_out(mean * len(layers), weights, room)
        return [count for layer, share in zip(layers, shares, strict=True) for count in self.inner.counts(layer, share)]

    def within_layers(self) -> Allocator:
        return self.inner


@dataclass(frozen=True)
class InGroups(Allocator):
    """Allocator that rounds the pairs of every head to groups that share the scales of a key's channels, one at least.

    The number of groups follows the counts of `inner` by largest remainder, so that their sum does not grow.
    """

    inner: Allocator = field(default_factory=Allocator)
    group: int = GROUP

    ragged = True
    fills_groups = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        sizes = [item.scores.shape[:2] for item in scored]
        counts = torch.cat(
            [
                torch.full(size, count) if isinstance(count, int) else count.cpu()
                for count, size in zip(self.inner.counts(scored, mean), sizes, strict=True)
            ],
            dim=1,
        )
        lengths = torch.tensor(
            [item.view.length for item, size in zip(scored, sizes, strict=True) for _ in range(size[1])]
        )
        rounded = torch.stack([self._rounded(row, lengths) for row in counts])
        return list(rounded.to(scored[0].scores.device).split([size[1] for size in sizes], dim=1))

    def _rounded(self, counts: Tensor, lengths: Tensor) -> Tensor:
        """Return the rounded counts `[heads]` of one row; a head shorter than a group keeps all its pairs."""
        limits = lengths // self.group
        first = limits.clamp_max(1)
        groups = max(0, int(counts.sum()) // self.group - int(first.sum()))
        weights = (counts - self.group).clamp_min(0).double()
        shares = torch.tensor(share_out(groups, weights, limits - first)) if groups else torch.zeros_like(first)
        return torch.where(limits > 0, (first + shares) * self.group, lengths)


def _mean_length(layer: Sequence[Scored]) -> int:
    """Return the mean number of pairs per head of a layer: after an earlier turn, competing heads have different lengths."""
    lengths = [entry.view.length for entry in layer for _ in range(entry.view.shape[1])]
    return sum(lengths) // len(lengths)
