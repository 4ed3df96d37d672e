# SPDX-License-Identifier: Apache-2.0
"""Whole chunks instead of single tokens."""

from __future__ import annotations

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
    "chunkkv",
    "evict",
    "Liu et al., 2025, arXiv:2502.00299",
    example="chunkkv(snapkv:0.5)",
    cases=("chunkkv(snapkv:0.5,window_size=4):chunk_length=5",),
    refuses=(Refusal("chunkkv(adakv(snapkv:0.5))", "both would choose the pairs to keep"),),
)
@dataclass
class ChunkKVPress(WrapperPress):
    """Keep the chunks of `chunk_length` tokens that another press scores best, so that phrases stay whole.

        score[c] = mean over the pairs of chunk c, in all heads, of score[h, t]

    Chunks are those of the row's own tokens and the same in every head. The budget is met exactly: of the last chunk that
    fits only in part, the pairs with the best mean score over the heads stay. A chunk with a protected pair, such as a
    sink, comes first.

    Paper: Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference, 2025,
    arXiv:2502.00299.
    Differs from the paper: any scorer may be used; layers do not share their choice.
    """

    press: BasePress
    chunk_length: Count = 20

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_choice(step)
        return replace(step, scorer=WholeChunks(step.scorer, self.chunk_length))


@dataclass(frozen=True)
class WholeChunks(ScorerAround):
    """Ranks pairs by their chunk, and within it by their mean inner score over the heads of a view."""

    chunk_length: int

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        memo = view.memo
        if "scores" not in memo:
            memo["scores"] = {id(part): Scored(part, self.inner).scores for part in view.group or [view]}
            memo["order"] = self._order(view.group or [view], list(memo["scores"].values()))
        score = memo["scores"][id(view)]
        chunk = memo["order"].gather(1, self._chunks(view)).view(score.shape)
        within = ranks(_worst_if_opposed(score.mean(1, keepdim=True)))
        # Places among all pairs, which float32 holds exactly.
        return ranks((chunk * view.length + within).double()).float()

    def _chunks(self, view: View) -> Tensor:
        """Chunk of every pair, `[b, h * n]`."""
        return view.positions.flatten(1) // self.chunk_length

    def _order(self, group: list[View], scores: list[Tensor]) -> Tensor:
        """Rank of every chunk `[b, chunks]`, the best one last."""
        rows, chunks = len(group[0].rows), -(-group[0].seen // self.chunk_length)
        total = torch.zeros(rows, chunks, dtype=torch.float64, device=scores[0].device)
        count = torch.zeros_like(total)
        for view, score in zip(group, scores, strict=True):
            chunk = self._chunks(view)
            total.scatter_add_(1, chunk, score.flatten(1).double())
            count.scatter_add_(1, chunk, torch.ones_like(chunk, dtype=count.dtype))
        return ranks(_worst_if_opposed(total / count))  # of chunks without pairs, too


def _worst_if_opposed(means: Tensor) -> Tensor:
    """Return means in which -inf stands where scores of both infinities, or none, were averaged."""
    return means.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def ranks(scores: Tensor) -> Tensor:
    """Rank of each score of the last axis, the smallest first, of equal ones the oldest."""
    return scores.argsort(dim=-1, stable=True).argsort(dim=-1)
