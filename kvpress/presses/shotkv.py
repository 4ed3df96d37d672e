# SPDX-License-Identifier: Apache-2.0
"""Whole examples of a few-shot prompt stay or go."""

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
from kvpress.observe.spans import SPANS, Mark, Piece, Ranges, Span, Spans
from kvpress.observe.view import View
from kvpress.presses.protect import ranges_in, unknown, vocabulary_of


@register(
    "shotkv",
    "evict",
    "Liu et al., 2025, arXiv:2502.01941",
    example="shotkv:0.5,separator=Question:",
    refuses=(
        Refusal("shotkv:0.5", "nothing says where shots begin"),
        Refusal("shotkv:0.5,shots=0:8 8:100000", "a shot ends behind the prompt"),
        Refusal("decoding(shotkv:shots=0:8)", "it says itself when it acts"),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE, "it takes from shots alone; its own tests run the oracle, padding, chunks, turns, codecs"
        ),
        Exemption("fuzz", "random ids hold no separators"),
    ),
)
@dataclass
class ShotKVPress(BasePress):
    """Keep the examples of a few-shot prompt that get the most attention, whole, the same ones in all layers and heads.

        score[shot] = mean over its tokens t, all layers and heads of mean over the last w queries i of softmax(q_i . k)[t]

    Shots are taken by falling score while they fit into `compression_ratio` less of the tokens of all shots; one that does
    not fit is skipped, and the best one stays in any case. What is no part of a shot always stays. `separator` is the text
    that begins a shot, which ends where the next one begins, so that what follows the last separator, the question, is
    none; it is found in the ids of all tokens by the `tokenizer`, that beside the model where none is given. `shots` lists
    ranges of positions in the first prompt instead, padding not counted: `12:80 80:164`. `window_size` is w. A shot is
    judged once, together with the others of its prompt or turn.

    Paper: Liu et al., Can LLMs Maintain Fundamental Abilities under KV Cache Compression?, 2025, arXiv:2502.01941.
    Differs from the paper: attention is that of the last w queries instead of all; generated tokens are kept, unless a
    press for them stands beside it, such as `shotkv:0.5,... + scope`.
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
                "shotkv needs to know where shots begin: give either separator='Question:' or shots='12:80 80:164', got "
                f"separator={self.separator!r}, shots={self.shots!r}"
            )
        self.recipe()

    def rule(self, model: ModelFacts | None) -> Spans:
        """Return which tokens are a shot each."""
        if self.shots:
            return Ranges(ranges_in(self.shots, "shots"))
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
class Separated(Spans):
    """What lies between one `separator` and the next, each span with the separator that begins it."""

    separator: str
    piece: Piece = field(compare=False, repr=False)

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
    """Scores a pair by the attention of the newest `size` queries; what stays of it is what an allocator left in the memo."""

    size: int

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(RecentQueries, self.size),)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        heads = view.per_head()
        paid = [head.attention(head.newest_queries(*self.wants)).mean(dim=(2, 3)) for head in heads]
        return torch.cat(paid, dim=1)

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        kept: Tensor = scored.view.memo[id(scored.view)]
        return kept


@dataclass(frozen=True)
class BestShots(Allocator):
    """Keeps the pairs of the best shots of a row in all layers; see `ShotKVPress`."""

    rule: Spans

    decides = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        call, (row,) = scored[0].view.call, scored[0].view.rows
        starts = torch.tensor([start for start, _ in new_spans(self.rule, call)[row]])
        if not len(starts):
            return [each.view.length for each in scored]
        shots = [
            torch.bucketize(each.view.positions, starts.to(each.view.positions.device), right=True) - 1
            for each in scored
        ]
        paid, held = torch.zeros(2, len(starts), dtype=torch.float64)
        for each, shot in zip(scored, shots, strict=True):
            paid.index_add_(0, shot.flatten().cpu(), each.scores.flatten().double().cpu())
            held.index_add_(0, shot.flatten().cpu(), torch.ones(shot.numel(), dtype=torch.float64))
        kept = best_that_fit(paid / held.clamp_min(1), held, mean * sum(each.view.shape[1] for each in scored))
        for each, shot in zip(scored, shots, strict=True):
            each.view.memo[id(each.view)] = kept.to(shot.device)[shot]
        return [each.view.memo[id(each.view)].sum(dim=2) for each in scored]


def best_that_fit(scores: Tensor, sizes: Tensor, room: float) -> Tensor:
    """Mark those with the largest `scores [n]` that fit into the `room` together, at least the best one."""
    kept = torch.zeros(len(scores), dtype=torch.bool)
    for place in scores.argsort(descending=True, stable=True).tolist():
        if not bool(kept.any()) or float(sizes[kept].sum() + sizes[place]) <= room:
            kept[place] = True
    return kept
