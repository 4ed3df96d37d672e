# SPDX-License-Identifier: Apache-2.0
"""ShotKV: eviction of whole examples of a few-shot prompt, and of single generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvpress.core.amount import Amount, Schedule
from kvpress.core.checks import Count, Ratio, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.protection import new_spans
from kvpress.core.recipe import Allocator, Eviction, Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.core.scoring import ByScore, Scored, top
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.observe.spans import SPANS, Mark, Piece, PositionRanges, Span, SpanRule
from kvpress.observe.view import View
from kvpress.presses.protect import ranges_in, unknown, vocabulary_of
from kvpress.presses.scope import END

KEPT = "kept pairs"
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
        Refusal(
            "shotkv:0.5,shots=0:8 + scope", "both would evict generated tokens; `decode_ratio=0` leaves them to scope"
        ),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE,
            "it evicts from shots and generated tokens; its own tests run the oracle, padding, chunks, turns, codecs",
        ),
        Exemption("fuzz", "random ids hold no separators"),
    ),
)
@dataclass
class ShotKVPress(BasePress):
    """Keep the examples of a few-shot prompt and the generated tokens with the most attention, in all layers and heads alike.

        score[t]    = sum over all layers and heads of mean over the last w queries i of softmax(q_i . k)[t]
        score[shot] = mean over its tokens t of score[t]

    Prompt: shots are taken whole, in order of falling score, while they fit into the budget, which is `compression_ratio`
    less than the tokens of all shots; a shot that does not fit is skipped, and the best one is always kept. Tokens outside
    shots are always kept. `separator` is the text that begins a shot; the shot ends where the next one begins. Tokens
    behind the last separator, the question, are therefore no shot. The separator is located in the ids of all tokens with
    `tokenizer`, by default the one in the folder of the model. `shots` lists ranges of positions in the first prompt
    instead, padding not counted: `12:80 80:164`. `window_size` is w. A shot is scored once, together with the other shots
    of its prompt or turn.

    Generated tokens: every `interval` tokens, the tokens generated since the newest prompt or turn are cut down to those
    with the best scores, `decode_ratio` less than were generated, the `recent` newest among them. `decode_ratio` is that of
    the prompt if None; 0 keeps generated tokens. Each cut scores with the attention of that time; an evicted token cannot
    come back. A later turn is a prompt, and generated tokens from before it are kept.

    Paper: after Liu et al., Can LLMs Maintain Fundamental Abilities under KV Cache Compression?, 2025, arXiv:2502.01941.
    Differs from the paper: attention is that of the last w queries instead of all; `recent` and `interval` are choices of
    this project, and the paper ranks generated tokens without a number of newest ones that stay.
    """

    compression_ratio: Ratio = 0.0
    separator: str = ""
    shots: str = ""
    window_size: Count = 32
    decode_ratio: Ratio | None = None
    interval: Count = 64
    recent: Size = 32
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
        rule, steps = self.rule(model), []
        if self.compression_ratio:
            steps.append(
                Eviction(
                    WindowAttention(self.window_size),
                    Amount(self.compression_ratio),
                    BestShots(rule, scope="cache"),
                    Schedule(False, closing=True),
                    among=rule,
                    fixed=True,
                )
            )
        if decode_ratio := self.compression_ratio if self.decode_ratio is None else self.decode_ratio:
            steps.append(
                Eviction(
                    WindowAttention(self.window_size, (END,)),
                    allocator=BestGenerated(Amount(decode_ratio), self.recent, scope="cache"),
                    schedule=Schedule(False, self.interval),
                    fixed=True,
                )
            )
        return Recipe(tuple(steps), observers=(SPANS,))


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
    others: tuple[Wanted, ...] = ()
    """Observers that the allocator reads."""

    @property
    def queries(self) -> Wanted:
        """Observer of the newest queries."""
        return Wanted(RecentQueries, self.size)

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (self.queries, *self.others)

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`."""
        heads = view.per_head()
        attention_weights = [head.attention(head.newest_queries(self.queries)).mean(dim=(2, 3)) for head in heads]
        return torch.cat(attention_weights, dim=1)

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        kept: Tensor = scored.view.memo[KEPT, scored.view.heads.start]
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
            view.memo[KEPT, view.heads.start] = mask
            return mask.sum(dim=2)

        return [item.share(mark) for item in scored]


@dataclass(frozen=True)
class BestGenerated(Allocator):
    """Keep the pairs of the generated tokens of a row with the most attention in all layers and heads; see `ShotKVPress`."""

    amount: Amount
    """Share of the generated tokens that is evicted."""
    recent: int
    """Newest generated tokens that are always kept."""

    decides = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        del mean
        view = scored[0].view
        (row,) = view.rows
        end = int(view.call.store.observers[END].tokens[row])
        num_generated = view.seen - end
        count = max(self.recent, self.amount.of(num_generated))
        if count >= num_generated:
            return [item.view.length for item in scored]

        def fixed(own: Scored, _: int | Tensor) -> Tensor:
            """Return the number of generated pairs of each head that cannot be evicted, `[b, h]`."""
            whole, free = own.whole.positions >= end, own.view.positions >= end
            return whole.sum(dim=2) - free.sum(dim=2)

        count -= max(int(item.share(fixed).amax()) for item in scored)
        scores = torch.zeros(num_generated, dtype=torch.float64)
        is_stored = torch.zeros(num_generated, dtype=torch.bool)
        for item in scored:
            index = item.view.positions.flatten().cpu() - end
            scores.index_add_(0, index[index >= 0], item.scores.flatten().double().cpu()[index >= 0])
            is_stored[index[index >= 0]] = True
        scores[num_generated - self.recent :] = torch.inf
        kept = top(scores.masked_fill(~is_stored, -torch.inf), max(0, count)) & is_stored

        def mark(own: Scored, _: int | Tensor) -> Tensor:
            """Store the mask of all pairs but those of evicted tokens for `choose`; return their number in each head."""
            view = own.view
            index = view.positions - end
            mask = (index < 0) | kept.to(view.device)[index.clamp_min(0)]
            view.memo[KEPT, view.heads.start] = mask
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
