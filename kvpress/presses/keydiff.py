# SPDX-License-Identifier: Apache-2.0
"""Scores by the distance of a key from the mean direction of all keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.view import View


@register("keydiff", "evict", "Park et al., 2025, arXiv:2504.15364", example="keydiff:0.5", cases=("keydiff:0.5",))
@dataclass
class KeyDiffPress(ScorerPress):
    """Score a pair by minus the cosine between its key and the mean direction of all keys of the head.

        a[b, h]        = mean over t of k[b, h, t] / ||k[b, h, t]||
        score[b, h, t] = -cos(k[b, h, t], a[b, h])

    No queries are needed, so the choice does not depend on the question.

    Paper: Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments, 2025, arXiv:2504.15364.
    Differs from the paper: all keys of the prompt are compared at once; the paper reads the prompt in blocks and evicts
    after each, which is `BlockPress(KeyDiffPress(...))`.
    """

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        keys = view.keys.float()
        anchor = normalize(keys, dim=-1).mean(dim=2, keepdim=True)
        return -cosine_similarity(keys, anchor, dim=-1)
