# SPDX-License-Identifier: Apache-2.0
"""Presses that take only a cache size, and derive from it the number of pairs per layer and their bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated, Literal

import torch
from torch import Tensor

from kvpress.cache.report import parse_bytes
from kvpress.cache.segment import WEIGHT
from kvpress.core.checks import Range
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, Wrapping
from kvpress.core.recipe import Allocator, Eviction, Recipe
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.scoring import Scored
from kvpress.presses.adakv import Competition
from kvpress.presses.cake import share_out
from kvpress.presses.compactor import CompactorPress
from kvpress.presses.criticalkv import has_output
from kvpress.presses.fastkvzip import FastKVzipPress
from kvpress.presses.kvgrad import KVgradPress
from kvpress.presses.kvzip import KVzipPress
from kvpress.presses.refit import LEAST_RIDGE, RefitPress
from kvpress.quant.errors import MOST, QUERIES, ROUNDING, error
from kvpress.quant.widths import FEWEST, FittingCodec, Sized, SizeLimit

SMALLER = 10.0
"""Default compression factor, used if neither `smaller` nor `bytes` is set."""
RECORDED = 4
"""Bytes of a number that an observer records with each pair."""
CHUNK = 256
"""Tokens of a prompt that `FrontierPress` reads again in one pass."""
QUERIES_OF_PROMPT, QUERIES_READ = 128, 512
"""Most queries of each query head that values are fitted to: of a single reading, and of the second one.

Pairs that a single reading scores lose more than more queries bring back (docs/frontier.md)."""

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

    def validate(self) -> None:
        super().validate()
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

    def room(self, model: ModelFacts | None, beside_pair: int = 0) -> SizeLimit:
        """Return the size limit of a cache whose pairs take `beside_pair` bytes besides their codes and indexes."""
        if self.bytes is None:
            return SizeLimit(model, smaller=SMALLER if self.smaller is None else self.smaller, beside_pair=beside_pair)
        return SizeLimit(model, bytes=parse_bytes(str(self.bytes), "bytes"), beside_pair=beside_pair)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        room = self.room(model)
        # A compression factor gives the same width for every prompt length, so one codec serves all prompts.
        codec = FittingCodec(room) if room.smaller is None else room.codec(room.fitting(1))
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
        if self.bytes is not None:
            step = replace(step, scorer=step.scorer.for_fixed_size())
        if not compete:
            step = replace(step, prompt_watches=(*step.prompt_watches, QUERIES))
        shared: Allocator = inner if compete else ByError(inner, scope="cache")
        step = replace(step, amount=Sized(room=self.room(model)), allocator=shared)
        return replace(step, amount=Sized(room=self.room(model, recorded_bytes(step))))


@register(
    "budgeted",
    "budget",
    example="budgeted(snapkv):smaller=10",
    cases=("budgeted(snapkv:window_size=4):smaller=20", "budgeted(adakv(knorm)):smaller=20"),
    refuses=(
        Refusal("budgeted(snapkv:0.5)", "the size sets how many pairs stay"),
        Refusal("budgeted(pyramidkv)", "both would share out pairs among layers"),
        Refusal("budgeted(knorm) + kivi:bits=4", "the size sets how pairs are stored"),
    ),
    exempt=ENCODES,
    status="recommended",
)
@dataclass
class BudgetedPress(OfSize):
    """Make the cache of a prompt `smaller` times smaller, or fit it into `bytes`; the inner press scores the pairs.

        bits   by the bits r available per uncompressed number, 16 / smaller in a 16-bit model, of keys and of values:
               8 and 8 if r >= 8.6, 8 and 4 if r >= 2.6, 4 and 4 if r >= 1.3, else 4 and 3
        pairs  as many as fit in these bits, all scales and indexes counted; all pairs if they fit
        layer  pairs ~ sqrt(e),   e = mean |o' - o|^2 / mean |o|^2 over the newest 64 tokens and all heads

    Here o is the attention output of one of the newest tokens, which are at most a quarter of the prompt. o' is the output
    without the pairs that the inner press evicts at the mean budget; the newest tokens themselves stay, as those of a
    question would. If the error of a layer falls as 1 / pairs, these shares give the least sum of errors. No layer gets more
    than twice the mean or less than half of it. An inner press whose heads and layers compete, such as `kvzip`, shares out the
    pairs itself. Pairs are stored as by `RotatedPress`, the first one of a head dense, without a dense tail; generated tokens
    stay dense until 32 of them are encoded together. A prompt keeps at least 16 pairs per head.

    `smaller` defaults to 10. `bytes`, such as 512MiB, 4GB or 300000, is the size of all layers of one row of a batch after its
    prompt, including sliding windows. Each row is compressed as it would be alone, so B rows take B times as much. The bits
    are chosen for each row once the length of its prompt is known; a prompt that fits uncompressed stays uncompressed until
    the next turn. The cache never exceeds the size, and is normally smaller by at most 1% or one pair of every head. It is
    smaller by more if all pairs fit into some width but not into the next wider one, or if layers keep all their pairs, which
    then need no indexes. Where keys have a large bias (`QuantisingPress`), it and its tables of angles come on top. Bytes that
    do not hold 16 pairs per head in the fewest bits are refused. Generated tokens are added to the size, in the bits of the
    prompt. A further turn of several tokens is cut to the size together with all earlier pairs, and encoded to its last pair.
    With `smaller`, the size then refers to all tokens seen, so the cache grows with them; with `bytes`, it stays the same.

    Paper: none.
    Differs from the paper: nothing.
    """

    press: BasePress
    smaller: Smaller | None = None
    bytes: str | int | None = None

    @property
    def inner(self) -> BasePress:
        return self.press


@register(
    "frontier",
    "budget",
    example="frontier:smaller=20",
    cases=(
        "frontier:bytes=12KB",
        "frontier:smaller=10,chunk=64",
        "frontier:smaller=10,passes=1",
        "frontier:smaller=10,passes=3",
        "frontier:smaller=10,reads=chunk",
    ),
    refuses=(
        Refusal("frontier:smaller=10,passes=1,reads=chunk", "nothing is read a second time"),
        Refusal("frontier:smaller=10,gates=gates.safetensors", "gates score the pairs of a single reading"),
        Refusal("frontier:smaller=10,passes=3,reads=chunk", "a differentiated reading attends to the whole prompt"),
    ),
    exempt=ENCODES,
    status="recommended",
)
@dataclass
class FrontierPress(OfSize):
    """Make the cache of a prompt `smaller` times smaller with the most accurate combination measured; set nothing else.

    `BudgetedPress` around `RefitPress` around `KVzipPress`: the model reads its prompt a second time, in chunks of 256 tokens;
    the pairs with the most attention from it stay, weighted by the output of the value, for which heads and layers compete;
    their values and log-weights are solved for with 128 to 512 queries of each head from the second reading; and they are
    stored in 4 bits, rounded for the same queries. In a 16-bit model, keys have 8 bits where a cache is at most 6 times
    smaller, and values 3 bits from 12.4 times on. `smaller` is the factor from the size of the dense cache to that of the
    compressed one, 10 by default. `bytes`, such as 512MiB, sets the size instead. The prompt takes at least twice as long to
    read, and is uncompressed in memory until then. Where the model has no output projections that can be read, the attention
    itself is the score.

    `reads=chunk` makes the second reading cheaper: each chunk of 256 tokens attends only to itself, to its first reading and to
    the first 4 tokens of the prompt, so that its cost grows in proportion to the prompt. It loses a little more.

    `passes=1` does not read the prompt a second time: `CompactorPress` scores the pairs, layers share them by their errors as
    in `BudgetedPress`, and values and log-weights are solved for with 128 queries of each head from the prompt. It loses more.
    With `gates`, a file of `kvpress calibrate fastkvzip` for the model, `FastKVzipPress` scores the pairs instead, and loses
    less.

    `passes=3` also differentiates the second reading: `KVgradPress` scores the pairs, by how much the last hidden states depend
    on them. It loses less from about 20 times smaller on. The prompt takes longer to read, and the activations of 256 tokens in
    all layers are in memory at a time. Models must be differentiable and have output projections that can be read.

    With `chunk`, the prompt is compressed while it is read, and the peak is that of the compressed cache and of `chunk` tokens:
    each chunk is a turn of its own, whose pairs are read again, chosen and encoded before the next chunk is read. Later chunks
    attend to the compressed ones. With `bytes`, keys then have 4 bits and values 3.

    Paper: none; see `KVzipPress`, `RefitPress` and `RotatedPress` for the papers of its components.
    Differs from the paper: the second reading has no instruction to repeat the prompt, so that no tokenizer is needed.
    """

    smaller: Smaller | None = None
    bytes: str | int | None = None
    chunk: Annotated[int, Range(FEWEST, whole=True)] | None = None
    passes: Literal[1, 2, 3] = 2
    reads: Literal["prompt", "chunk"] = "prompt"
    gates: str | None = field(default=None, kw_only=True)
    has_outputs: bool = field(init=False, default=True, repr=False, compare=False)

    def validate(self) -> None:
        super().validate()
        if self.gates is not None and self.passes != 1:
            raise ValueError(
                f"gates={self.gates!r} score the pairs of a single reading, and passes={self.passes} reads the prompt again: "
                "set passes=1, or leave out gates"
            )
        if self.passes != 2 and self.reads == "chunk":
            reason = (
                "reads nothing a second time" if self.passes == 1 else "differentiates readings of the whole prompt"
            )
            raise ValueError(f"passes={self.passes} {reason}, so reads=chunk has no effect: leave out one of them")

    @property
    def inner(self) -> BasePress:
        if self.passes == 1:
            scorer = CompactorPress() if self.gates is None else FastKVzipPress(gates=self.gates)
            return RefitPress(scorer, queries="prefill", ridge=LEAST_RIDGE, tokens=QUERIES_OF_PROMPT, weights=True)
        repetition = (
            KVgradPress(repeat_prompt="", chunk_size=CHUNK)
            if self.passes == 3
            else KVzipPress(
                repeat_prompt="", chunk_size=CHUNK, kvzip_plus_normalization=self.has_outputs, reads=self.reads
            )
        )
        return RefitPress(repetition, queries="repeat", ridge=LEAST_RIDGE, tokens=QUERIES_READ, weights=True)

    def room(self, model: ModelFacts | None, beside_pair: int = 0) -> SizeLimit:
        room = super().room(model, beside_pair)
        return room if self.chunk is None else replace(room, narrowest=room.bytes is not None)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is None or all(layer.module is None or has_output(layer) for layer in model.layers):
            return super().recipe(model)
        plain = replace(self)
        plain.has_outputs = False
        return OfSize.recipe(plain, model)

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        step = super().wrap(step, model)
        if self.chunk is None:
            return step
        return replace(step, schedule=replace(step.schedule, chunk=self.chunk, as_turns=True))


def recorded_bytes(step: Eviction) -> int:
    """Return the bytes of log-weights and recorded numbers that an eviction stores with each pair."""
    held = [request for request in step.wants if request.lasts or step.acts_in("decode")]
    recorded = {name for request in held for name in request.make().sides}
    return WEIGHT * step.weighs + RECORDED * len(recorded)


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
        room = torch.tensor([_mean_length(layer) for layer in layers])
        if scored[0].view.call.phase == "decode":  # the shares of the prompt stay
            weights = room.double()
        else:
            weights = torch.tensor([error(layer, mean) for layer in layers], dtype=torch.float64)
            weights = (weights + ROUNDING).sqrt()
            weights = (weights / weights.mean()).clamp(1 / MOST, MOST)
        shares = share_out(mean * len(layers), weights, room)
        return [count for layer, share in zip(layers, shares, strict=True) for count in self.inner.counts(layer, share)]

    def within_layers(self) -> Allocator:
        return self.inner


def _mean_length(layer: Sequence[Scored]) -> int:
    """Return the mean number of pairs per head of a layer: after an earlier turn, competing heads have different lengths."""
    lengths = [entry.view.length for entry in layer for _ in range(entry.view.shape[1])]
    return sum(lengths) // len(lengths)
