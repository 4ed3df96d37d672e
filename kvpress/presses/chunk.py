# SPDX-License-Identifier: Apache-2.0
"""The same share of every stretch of the prompt."""

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
    """Let another press choose within each chunk of stored pairs on its own.

    The n pairs of a head are cut into as few chunks of equal size as `chunk_length` allows. Of `kept` in all, the chunk from
    a to b keeps floor(kept * b / n) - floor(kept * a / n): every chunk the same share, up to rounding, and the total
    exactly. Scores that compare pairs with each other compare those of the chunk.

    Paper: after Corallo & Papotti, FINCH: Prompt-guided Key-Value Cache Compression, 2024, arXiv:2408.00167.
    Differs from the paper: the prompt is read at once; FINCH reads a chunk after the other on what it kept of those before.
    """

    press: BasePress
    chunk_length: Count = 1024

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_even(step)
        return replace(step, scorer=InChunks(step.scorer, self.chunk_length))


@dataclass(frozen=True)
class InChunks(ScorerAround):
    """Lets the inner scorer choose the same share of every chunk."""

    chunk_length: int

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
