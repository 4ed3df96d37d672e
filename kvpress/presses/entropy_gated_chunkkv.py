# SPDX-License-Identifier: Apache-2.0
"""Eviction of chunks of tokens, of which spiky ones keep only their best tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.core.checks import Count
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, ScorerAround
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import Scored
from kvpress.observe.view import View
from kvpress.presses.chunkkv import ChunkKVPress, ranks


@register(
    "entropy_gated_chunkkv",
    "evict",
    "Liu et al., 2025, arXiv:2502.00299",
    example="entropy_gated_chunkkv(snapkv:0.5)",
    cases=("entropy_gated_chunkkv(snapkv:0.5,window_size=4):chunk_length=6,low_entropy_chunk_length=2",),
    refuses=(Refusal("entropy_gated_chunkkv(adakv(snapkv:0.5))", "both would choose the pairs to keep"),),
)
@dataclass
class EntropyGatedChunkKVPress(ChunkKVPress):
    """Keep the best chunks of another press's scores, but only the best tokens of chunks whose scores are spiky.

        s[t] = mean over the heads of score[h, t]
        m[c] = mean over the tokens t of chunk c of s[t]
        p[t] = (s[t] - min(0, smallest s of c)), divided by its sum over c
        e[c] = -sum over t in c of p[t] log p[t] / log(tokens of c)

    A chunk is spiky if m[c] is at least the median of all chunks and e[c] is below the median. Chunks are taken from the best
    m[c] down: of a spiky one its best `low_entropy_chunk_length` tokens, of any other one all of its `chunk_length` tokens, or
    the best of them where the budget ends. Pairs left of the budget go to the best tokens of spiky chunks. All heads keep the
    same tokens, and the budget is met exactly. Tokens with an infinite score, such as a window, come first of all; in m and e
    they count as the largest finite score of their row.

    Paper: Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference, 2025,
    arXiv:2502.00299; the gate by entropy is that of NVIDIA kvpress 0.5.5, and has no paper.
    Differs from the paper: the gate; as in `ChunkKVPress`, any scorer may be used. Differs from NVIDIA kvpress: each row of a
    batch chooses its own tokens, not those of the first row, and padding belongs to no chunk.
    """

    press: BasePress
    chunk_length: Count = 10
    low_entropy_chunk_length: Count = 4

    def validate(self) -> None:
        super().validate()
        if self.low_entropy_chunk_length >= self.chunk_length:
            raise ValueError(
                f"low_entropy_chunk_length must be below chunk_length={self.chunk_length}, got "
                f"{self.low_entropy_chunk_length}: lower it, or raise chunk_length"
            )

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_choice(step)
        if model is not None and model.shards.is_divided:
            raise NotImplementedError(
                f"EntropyGatedChunkKVPress averages scores over all heads, and tensor parallel divides those of "
                f"{model.name} among {model.shards.count} ranks; use chunkkv, or load the model without tp_plan"
            )
        return replace(step, scorer=GatedChunks(step.scorer, self.chunk_length, self.low_entropy_chunk_length))


@dataclass(frozen=True)
class GatedChunks(ScorerAround):
    """Scorer that ranks tokens in the order in which a growing budget takes them, the same in every head of a view."""

    chunk_length: int
    """Number of tokens of a chunk."""
    low_entropy_chunk_length: int
    """Number of tokens of a spiky chunk that come before those of worse chunks."""

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        memo = view.memo
        if "order" not in memo:
            memo["order"] = self._order(view.group or [view])
        of_pairs = memo["order"].gather(1, view.positions.flatten(1)).view(view.shape)
        return ranks(of_pairs).float()  # float32 represents ranks exactly

    def _order(self, group: list[View]) -> Tensor:
        """Return the priority of each token of a row, `[b, tokens]`, highest for the first one that is kept."""
        length, rows = self.chunk_length, len(group[0].rows)
        chunks = -(-group[0].seen // length)
        tokens = chunks * length
        real, finite, stored = (means.view(rows, chunks, length) for means in self._token_means(group, tokens))
        count = stored.sum(dim=2)
        mean = (finite * stored).sum(dim=2) / count  # NaN for chunks without pairs
        entropy = chunk_entropy(finite, stored)
        spiky = (mean >= _median(mean)) & (entropy < _median(entropy))
        of_token = ranks(real.flatten(1)).view_as(real)
        better = ranks(-real)
        in_turn = ~spiky[..., None] | (better < self.low_entropy_chunk_length)
        chunk_rank = ranks(mean.nan_to_num(nan=-torch.inf))[..., None]
        priority = torch.where(in_turn, (1 + chunk_rank) * tokens, 0)
        priority = priority.masked_fill(real == torch.inf, (1 + chunks) * tokens)
        priority = priority.masked_fill(real == -torch.inf, -tokens)
        return (priority + of_token).flatten(1)

    def _token_means(self, group: list[View], tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean score of each token over the heads that store it, `[b, tokens]`, float64.

        The second result has the largest and smallest finite scores of the row in the place of infinite ones; the third marks
        the tokens that any head stores. Other tokens have -inf in the first result and 0 in the second.
        """
        scores = [Scored(view, self.inner).scores.double() for view in group]
        flat = torch.cat([score.flatten(1) for score in scores], dim=1)
        index = torch.cat([view.positions.flatten(1) for view in group], dim=1)
        is_finite = flat.isfinite()
        largest = flat.masked_fill(~is_finite, -torch.inf).amax(dim=1, keepdim=True).nan_to_num(neginf=0.0)
        smallest = flat.masked_fill(~is_finite, torch.inf).amin(dim=1, keepdim=True).nan_to_num(posinf=0.0)
        bounded = flat.clamp(smallest, largest)
        sums = [torch.zeros(len(flat), tokens, dtype=torch.float64, device=flat.device) for _ in range(3)]
        for total, part in zip(sums, (flat, bounded, torch.ones_like(flat)), strict=True):
            total.scatter_add_(1, index, part)
        real, finite, count = sums
        real = (real / count).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return real, finite / count.clamp_min(1), count > 0


def chunk_entropy(scores: Tensor, stored: Tensor) -> Tensor:
    """Return the entropy of the scores `[b, chunks, length]` of each chunk, over its largest value: 0 to 1, `[b, chunks]`.

    Only `stored` tokens count. Chunks of one token or with a sum of 0 get 0, and chunks without tokens NaN.
    """
    lowest = scores.masked_fill(~stored, 0.0).amin(dim=2, keepdim=True).clamp_max(0.0)
    shifted = (scores - lowest) * stored
    share = (shifted / shifted.sum(dim=2, keepdim=True)).nan_to_num(0.0)
    count = stored.sum(dim=2)
    entropy = -torch.xlogy(share, share).sum(dim=2) / count.clamp_min(2).log()
    return entropy.clamp(0.0, 1.0).masked_fill(count == 0, math.nan)


def _median(values: Tensor) -> Tensor:
    """Return the lower median of the numbers of each row, `[b, 1]`; NaN entries do not count."""
    return values.nanmedian(dim=1, keepdim=True).values
