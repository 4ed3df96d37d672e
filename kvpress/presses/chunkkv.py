"""Whole chunks instead of single tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.checks import check_count
from kvpress.context import View
from kvpress.presses.base import ScorerPress
from kvpress.presses.evict import top
from kvpress.presses.wrapper import WrapperPress
from kvpress.registry import register


@register("chunkkv", "evict", "Liu et al., 2025, arXiv:2502.00299")
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

    by_scores: ClassVar[bool] = True

    press: ScorerPress
    chunk_length: int = 20

    def validate(self) -> None:
        super().validate()
        check_count("chunk_length", self.chunk_length)

    def keep(self, group: list[View], kept: int) -> list[Tensor]:
        scores = [self.press.scores(view) for view in group]
        order = self._order(group, scores)
        masks = []
        for view, score in zip(group, scores, strict=True):
            chunk = order.gather(1, self._chunks(view)).view(score.shape)
            within = ranks(score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).mean(1, keepdim=True))
            masks.append(top((chunk * view.length + within).double(), min(kept, view.length)))
        return masks

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
        return ranks((total / count).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))


def ranks(scores: Tensor) -> Tensor:
    """Rank of each score of the last axis, the smallest first, of equal ones the oldest."""
    return scores.argsort(dim=-1, stable=True).argsort(dim=-1)
