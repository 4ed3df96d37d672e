# SPDX-License-Identifier: Apache-2.0
"""Merge evicted values into the kept pairs with the most similar keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvpress.cache import attention
from kvpress.core.checks import Range, Share
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, WrapperPress
from kvpress.core.recipe import Eviction, Rewritten
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.view import View


@register(
    "merging",
    "evict",
    "after Bolya et al., 2022, arXiv:2210.09461; Wan et al., 2024, arXiv:2406.13035",
    example="merging(knorm:0.5)",
    refuses=(
        Refusal(
            "merging(knorm:0.5) + kivi:bits=4,residual_length=32",
            "values that a codec or selector has sealed cannot be merged into; refused in the second turn",
        ),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE, "values change, so hiding what was evicted is another computation; compared with plain loops"
        ),
    ),
)
@dataclass
class MergingPress(WrapperPress):
    """Merge the value of every pair that another press evicts into the kept pair of its head with the most similar key.

        j(e)  = the kept pair of the largest cosine s(e) of its key with that of the evicted pair e
        w(e)  = s(e) ||v_e|| / (||v_e|| + ||v_j||),   0 where s(e) < similarity_threshold
        v_j  <- (v_j + sum over e of w(e) v_e) / (1 + sum over e of w(e))

    Keys and positions are unchanged. `similarity_threshold` is the minimum cosine at which values are merged, and
    `merge_fraction` the share of a head's evicted pairs that are merged, in order of falling cosine.

    Paper: none; after Bolya et al., Token Merging, 2022, arXiv:2210.09461, and Wan et al., D2O, 2024, arXiv:2406.13035.
    Differs from the paper: as in NVIDIA kvpress, only values are merged, weighted by their norms; similarities are computed
    in blocks, and heads may keep different numbers of pairs.
    """

    press: BasePress
    similarity_threshold: Share = 0.0
    merge_fraction: Annotated[float, Range(0, 1, above=True)] = 1.0

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        return step.rewriting(self._rewrite)

    def _rewrite(self, view: View, mask: Tensor) -> Rewritten:
        return Rewritten(values=merged(view.keys, view.values, mask, self.similarity_threshold, self.merge_fraction))

    def merge(self, keys: Tensor, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return `keys [B, H, n, D]`, and `values` with all pairs outside `indices [B, H, m]` merged into those inside."""
        kept = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device).scatter_(2, indices, True)
        return keys, merged(keys, values, kept, self.similarity_threshold, self.merge_fraction)


def merged(keys: Tensor, values: Tensor, mask: Tensor, threshold: float, fraction: float) -> Tensor:
    """Return `values [b, h, n, Dv]` with pairs outside `mask [b, h, n]` merged into the pairs of the mask."""
    blended = values.clone()
    for row, head in torch.cartesian_prod(torch.arange(mask.shape[0]), torch.arange(mask.shape[1])).tolist():
        kept, evicted = mask[row, head].nonzero().flatten(), (~mask[row, head]).nonzero().flatten()
        if len(kept) and len(evicted):
            vectors = values[row, head].float()
            cosine, target = _nearest(normalize(keys[row, head].float(), dim=1), kept, evicted)
            merges = cosine >= threshold
            if fraction < 1:
                nearest = cosine.argsort(descending=True, stable=True)[: round(fraction * len(evicted))]
                merges &= torch.zeros_like(merges).index_fill_(0, nearest, True)
            blended[row, head, kept] = _blended(vectors, kept, evicted, target, cosine.clamp_min(0) * merges).to(
                values.dtype
            )
    return blended


def _nearest(keys: Tensor, kept: Tensor, evicted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest cosine of each evicted key with a kept one, and the index of that key among the kept ones."""
    block = max(1, attention.BLOCK_BYTES // (4 * len(kept)))
    results = [(keys[indices] @ keys[kept].T).max(dim=1) for indices in evicted.split(block)]
    return torch.cat([result.values for result in results]), torch.cat([result.indices for result in results])


def _blended(values: Tensor, kept: Tensor, evicted: Tensor, target: Tensor, similarity: Tensor) -> Tensor:
    """Return the values of the kept pairs, with the evicted values merged in."""
    kept_values, evicted_values = values[kept], values[evicted]
    evicted_norms, kept_norms = evicted_values.norm(dim=1), kept_values.norm(dim=1)[target]
    tiny = torch.finfo(torch.float32).tiny
    weights: Tensor = similarity * evicted_norms / (evicted_norms + kept_norms).clamp_min(tiny)
    total = torch.zeros_like(kept_values).index_add_(0, target, evicted_values * weights[:, None])
    return (kept_values + total) / (1 + weights.new_zeros(len(kept)).index_add_(0, target, weights))[:, None]
