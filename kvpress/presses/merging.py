# SPDX-License-Identifier: Apache-2.0
"""Evicted values are blended into the pairs whose keys are most alike."""

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
    """Fold the value of every pair that another press evicts into the kept pair of its head with the most similar key.

        j(e)  = the kept pair of the largest cosine s(e) of its key with that of the evicted pair e
        w(e)  = s(e) ||v_e|| / (||v_e|| + ||v_j||),   0 where s(e) < similarity_threshold
        v_j  <- (v_j + sum over e of w(e) v_e) / (1 + sum over e of w(e))

    Keys stay as they are, and so do positions. `similarity_threshold` is the least cosine at which values are merged, and
    `merge_fraction` the share of a head's evicted pairs that are, those of the largest cosines first.

    Paper: none; after Bolya et al., Token Merging, 2022, arXiv:2210.09461, and Wan et al., D2O, 2024, arXiv:2406.13035.
    Differs from the paper: as in NVIDIA kvpress, values alone are merged, weighted by their norms; similarities are worked out
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
        """Return `keys [B, H, n, D]`, and `values` with all that are not at `indices [B, H, m]` merged into those that are."""
        kept = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device).scatter_(2, indices, True)
        return keys, merged(keys, values, kept, self.similarity_threshold, self.merge_fraction)


def merged(keys: Tensor, values: Tensor, mask: Tensor, threshold: float, fraction: float) -> Tensor:
    """Return `values [b, h, n, Dv]` with those that are not in `mask [b, h, n]` merged into those that are."""
    found = values.clone()
    for row, head in torch.cartesian_prod(torch.arange(mask.shape[0]), torch.arange(mask.shape[1])).tolist():
        kept, gone = mask[row, head].nonzero().flatten(), (~mask[row, head]).nonzero().flatten()
        if len(kept) and len(gone):
            vectors = values[row, head].float()
            cosine, target = _nearest(normalize(keys[row, head].float(), dim=1), kept, gone)
            merges = cosine >= threshold
            if fraction < 1:
                first = cosine.argsort(descending=True, stable=True)[: round(fraction * len(gone))]
                merges &= torch.zeros_like(merges).index_fill_(0, first, True)
            found[row, head, kept] = _blended(vectors, kept, gone, target, cosine.clamp_min(0) * merges).to(
                values.dtype
            )
    return found


def _nearest(keys: Tensor, kept: Tensor, gone: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest cosine of each evicted key with a kept one, and which of these that is."""
    block = max(1, attention.BLOCK_BYTES // (4 * len(kept)))
    parts = [(keys[some] @ keys[kept].T).max(dim=1) for some in gone.split(block)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


def _blended(values: Tensor, kept: Tensor, gone: Tensor, target: Tensor, similarity: Tensor) -> Tensor:
    """Return the values of the kept pairs, with the evicted ones in."""
    own, given = values[kept], values[gone]
    size, other = given.norm(dim=1), own.norm(dim=1)[target]
    weights = similarity * size / (size + other).clamp_min(torch.finfo(torch.float32).tiny)
    total = torch.zeros_like(own).index_add_(0, target, given * weights[:, None])
    return (own + total) / (1 + weights.new_zeros(len(kept)).index_add_(0, target, weights))[:, None]
