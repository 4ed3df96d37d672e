# SPDX-License-Identifier: Apache-2.0
"""Eviction of chunks of tokens instead of single tokens."""

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
    """Keep the chunks of `chunk_length` tokens with the best mean score of another press, so that phrases are not split.

        score[c] = mean over the pairs of chunk c, in all heads, of score[h, t]

    `chunk_length` is the number of consecutive tokens that are kept or evicted together. Chunks count the tokens of a row
    without padding, and are the same in every head. The budget is met exactly: if the last chunk does not fit, its pairs
    with the best mean score over the heads stay. Chunks with a protected pair, such as a sink, come first.

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
    """Scorer that ranks pairs by their chunk, and within a chunk by their mean inner score over the heads of a view."""

    chunk_length: int
    """Number of tokens of a chunk."""

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        memo = view.memo
        if "scores" not in memo:
            memo["scores"] = {id(member): Scored(member, self.inner).scores for member in view.group or [view]}
            memo["order"] = self._order(view.group or [view], list(memo["scores"].values()))
        score = memo["scores"][id(view)]
        chunk = memo["order"].gather(1, self._chunks(view)).view(score.shape)
        within = ranks(_worst_if_opposed(view.mean_of_heads(score)))
        # Ranks instead of scores, since float32 represents them exactly.
        return ranks((chunk * view.length + within).double()).float()

    def _chunks(self, view: View) -> Tensor:
        """Return the index of each pair's chunk, `[b, h * n]`."""
        return view.positions.flatten(1) // self.chunk_length

    def _order(self, group: list[View], scores: list[Tensor]) -> Tensor:
        """Return the rank of each chunk, `[b, chunks]`, highest for the best."""
        rows, chunks = len(group[0].rows), -(-group[0].seen // self.chunk_length)
        total = torch.zeros(rows, chunks, dtype=torch.float64, device=scores[0].device)
        count = torch.zeros_like(total)
        for view, score in zip(group, scores, strict=True):
            chunk = self._chunks(view)
            total.scatter_add_(1, chunk, score.flatten(1).double())
            count.scatter_add_(1, chunk, torch.ones_like(chunk, dtype=count.dtype))
        total, count = group[0].call.layer.shards.sum(torch.stack([total, count]))
        return ranks(_worst_if_opposed(total / count))  # a chunk without pairs is 0 / 0 and ranks lowest


def _worst_if_opposed(means: Tensor) -> Tensor:
    """Return `means` with -inf in place of NaN, the mean of both infinities or of no score."""
    return means.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def ranks(scores: Tensor) -> Tensor:
    """Return the rank of each score along the last axis, 0 for the smallest; among equal scores the oldest ranks lower."""
    return scores.argsort(dim=-1, stable=True).argsort(dim=-1)
