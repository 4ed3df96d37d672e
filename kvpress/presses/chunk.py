# SPDX-License-Identifier: Apache-2.0
"""Eviction of the same share of every chunk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.core.checks import Count
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, ScorerAround, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import Scored
from kvpress.observe.view import View


@register(
    "chunk",
    "budget",
    "Corallo & Papotti, 2024, arXiv:2408.00167",
    example="chunk(snapkv:0.5)",
    cases=("chunk(snapkv:0.5,window_size=2):chunk_length=8",),
    refuses=(
        Refusal("chunk(adakv(snapkv:0.5))", "it keeps equally many pairs in every head, and the inner press does not"),
    ),
)
@dataclass
class ChunkPress(WrapperPress):
    """Evict the same share of every chunk of stored pairs, by the scores of another press.

    The n pairs of a head are split into the smallest number of equal chunks of at most `chunk_length`. Of `kept` pairs in
    total, the chunk from a to b keeps floor(kept * b / n) - floor(kept * a / n): the same share of each chunk up to rounding,
    and the exact total. Scores that depend on other pairs depend on those of the same chunk only. The window of newest tokens
    that presses such as SnapKV keep is in the last chunks only.

    Paper: after Corallo & Papotti, FINCH: Prompt-guided Key-Value Cache Compression, 2024, arXiv:2408.00167.
    Differs from the paper: the prompt is read in one pass; FINCH reads chunk after chunk, each with the pairs kept so far.
    """

    press: BasePress
    chunk_length: Count = 1024

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_even(step)
        return replace(step, scorer=InChunks(step.scorer, self.chunk_length))


@dataclass(frozen=True)
class InChunks(ScorerAround):
    """Scorer that keeps the same share of every chunk, by the inner scores."""

    chunk_length: int
    """Largest number of pairs of a chunk."""

    ranks: ClassVar[bool] = True

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        assert isinstance(counts, int)  # noqa: S101 - heads that differ are refused
        view, length, masks = scored.view, scored.view.length, []
        chunks = -(-length // self.chunk_length)
        edges = [length * i // chunks for i in range(chunks + 1)]
        for start, stop in itertools.pairwise(edges):
            index = torch.arange(start, stop, device=view.positions.device).expand(*view.shape[:2], -1)
            share = counts * stop // length - counts * start // length
            masks.append(Scored(view.pairs(index), self.inner).choose(share))
        return torch.cat(masks, dim=2)

    def scores(self, view: View) -> Tensor:
        raise NotImplementedError("pairs are compared within chunks only, so there are no scores of all of them")
