# SPDX-License-Identifier: Apache-2.0
"""ShotKV: eviction of whole examples of a few-shot prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvpress.core.amount import Amount, Schedule
from kvpress.core.checks import Count, Ratio
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.protection import new_spans
from kvpress.core.recipe import Allocator, Eviction, Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.core.scoring import ByScore, Scored
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.observe.spans import SPANS, Mark, Piece, PositionRanges, Span, SpanRule
from kvpress.observe.view import View
from kvpress.presses.protect import ranges_in, unknown, vocabulary_of

SHOTS = "kept shots"
"""Key of the mask of kept pairs in the memo of a view, beside the first head of the view."""


@register(
    "shotkv",
    "evict",
    "after Liu et al., 2025, arXiv:2502.01941",
    example="shotkv:0.5,separator=Question:",
    refuses=(
        Refusal("shotkv:0.5", "neither separator nor shots is given"),
        Refusal("shotkv:0.5,shots=0:8 8:100000", "a shot ends after the prompt"),
        Refusal("decoding(shotkv:shots=0:8)", "it has a schedule of its own"),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE, "it evicts from shots only; its own tests run the oracle, padding, chunks, turns, codecs"
        ),
        Exemption("fuzz", "random ids hold no separators"),
    ),
)
@dataclass
class ShotKVPress(BasePress):
    """Keep the whole examples of a few-shot prompt with the most attention, the same ones in all layers and heads.

        score[shot] = mean over its tokens t, all layers and heads of mean over the last w queries i of softmax(q_i . k)[t]

    Shots are taken in order of falling score while they fit into the budget, which is `compression_ratio` less than the
    tokens of all shots; a shot that does not fit is skipped, and the best one is always kept. Tokens outside shots are
    always kept. `separator` is the text that begins a shot; the shot ends where the next one begins. Tokens behind the last
    separator, the question, are therefore no shot. The separator is located in the ids of all tokens with `tokenizer`, by
    default the one in the folder of the model. `shots` lists ranges of positions in the first prompt instead, padding not
    counted: `12:80 80:164`. `window_size` is w. A shot is scored once, together with the other shots of its prompt or turn.

    Paper: after Liu et al., Can LLMs Maintain Fundamental Abilities under KV Cache Compression?, 2025, arXiv:2502.01941.
    Differs from the paper: only its method for prompts is here, and generated tokens are kept, unless a press for them is
    composed with it, such as `shotkv:0.5,... + scope`; attention is that of the last w queries instead of all.
    """

    compression_ratio: Ratio = 0.0
    separator: str = ""
    shots: str = ""
    window_size: Count = 32
    tokenizer: Any = field(default=None, kw_only=True, compare=False, repr=False)

    def validate(self) -> None:
        super().validate()
        for name in ("separator", "shots"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be text, got {getattr(self, name)!r}")
        if bool(self.separator) == bool(self.shots):
            raise ValueError(
                "shotkv needs the places where shots begin: give either separator='Question:' or shots='12:80 80:164', got "
                f"separator={self.separator!r}, shots={self.shots!r}"
            )
        self.recipe()

    def rule(self, model: ModelFacts | None) -> SpanRule:
        """Return the rule that finds the shots of a prompt."""
        if self.shots:
            return PositionRanges(ranges_in(self.shots, "shots"))
        vocabulary = vocabulary_of(self.tokenizer, model, "shotkv")
        if vocabulary is not None:
            vocabulary.check(self.separator)
        return Separated(self.separator, vocabulary or unknown)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        rule = self.rule(model)
        step = Eviction(
            WindowAttention(self.window_size),
            Amount(self.compression_ratio),
            BestShots(rule, scope="cache"),
            Schedule(False, closing=True),
            among=rule,
            fixed=True,
        )
        return Recipe(() if self.compression_ratio == 0 else (step,), observers=(SPANS,))


@dataclass(frozen=True)
class Separated(SpanRule):
    """Spans from one `separator` to the next, each with the separator that begins it."""

    separator: str
    """Text that begins a span."""
    piece: Piece = field(compare=False, repr=False)
    """Returns the text of a token."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.separator,)

    @property
    def text_of(self) -> Piece:
        return self.piece

    def within(self, marks: Sequence[Mark], seen: int) -> list[Span]:
        del seen
        return [span for span in pairwise(mark.start for mark in marks) if span[0] < span[1]]


@dataclass(frozen=True)
class WindowAttention(ByScore):
    """Score a pair by the attention of the newest `size` queries; keep the mask that the allocator stored in the memo."""

    size: int
    """Number of newest queries."""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(RecentQueries, self.size),)

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`."""
        heads = view.per_head()
        attention_weights = [head.attention(head.newest_queries(*self.wants)).mean(dim=(2, 3)) for head in heads]
        return torch.cat(attention_weights, dim=1)

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        kept: Tensor = scored.view.memo[SHOTS, scored.view.heads.start]
        return kept


@dataclass(frozen=True)
class BestShots(Allocator):
    """Keep the pairs of the best shots of a row in all layers; see `ShotKVPress`."""

    rule: SpanRule
    """Rule that finds the shots."""

    decides = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        call, (row,) = scored[0].view.call, scored[0].view.rows
        starts = torch.tensor([start for start, _ in new_spans(self.rule, call)[row]])
        if not len(starts):
            return [item.view.length for item in scored]
        shots = [shots_of(item.view, starts) for item in scored]
        totals, sizes = torch.zeros(2, len(starts), dtype=torch.float64)
        for item, shot in zip(scored, shots, strict=True):
            totals.index_add_(0, shot.flatten().cpu(), item.scores.flatten().double().cpu())
            sizes.index_add_(0, shot.flatten().cpu(), torch.ones(shot.numel(), dtype=torch.float64))
        kept = best_that_fit(totals / sizes.clamp_min(1), sizes, mean * sum(item.view.shape[1] for item in scored))

        def mark(own: Scored, _: int | Tensor) -> Tensor:
            """Store the mask of the pairs of kept shots for `choose`; return their number in each head."""
            view = own.view
            mask = kept.to(view.device)[shots_of(view, starts)]
            view.memo[SHOTS, view.heads.start] = mask
            return mask.sum(dim=2)

        return [item.share(mark) for item in scored]


def shots_of(view: View, starts: Tensor) -> Tensor:
    """Return the number of the shot of each pair of a view, `[b, h, n]`; shots begin at the positions `starts`."""
    return torch.bucketize(view.positions, starts.to(view.device), right=True) - 1


def best_that_fit(scores: Tensor, sizes: Tensor, room: float) -> Tensor:
    """Mark the largest `scores [n]` whose `sizes [n]` fit into `room` together; the best one is always marked."""
    kept = torch.zeros(len(scores), dtype=torch.bool)
    for index in scores.argsort(descending=True, stable=True).tolist():
        if not bool(kept.any()) or float(sizes[kept].sum() + sizes[index]) <= room:
            kept[index] = True
    return kept
