# SPDX-License-Identifier: Apache-2.0
"""Scores by the norms of keys and values, relative to a local window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.core.checks import Count, Size
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.view import View

SKETCH = 20
"""Number of columns of the random projection."""


@register(
    "cur",
    "evict",
    "Sengupta et al., 2025, arXiv:2509.15038",
    example="cur:0.5",
    cases=("cur:0.5,local_window_size=4", "cur:0.5,num_sinks=2,leverage_type=kv_avg,use_random_leverage=true"),
)
@dataclass
class CURPress(ScorerPress):
    """Score a pair by the squared norms of its key and value, an estimate of their leverages in a CUR decomposition.

        a[t] = ||k[t]||^2 / sum of ||k||^2 over the window of t,   b[t] the same of values
        kv_product: a b      kv_avg: (a + b) / 2      key: a      value: b

    A window is `local_window_size` consecutive pairs of a head; without `use_local_approximation`, it is all pairs of the
    head. `leverage_type` selects one of the four formulas. Scores are divided by their sum over the head. The first
    `num_sinks` tokens always stay. `use_random_leverage` first projects keys and values onto 20 random directions, the same
    in every layer and call.

    Paper: Sengupta et al., Value-Guided KV Compression for LLMs via Approximated CUR Decomposition, 2025, arXiv:2509.15038.
    Differs from the paper: as in NVIDIA kvpress, norms within a window replace leverages by singular vectors.
    """

    num_sinks: Size = 4
    leverage_type: Literal["key", "value", "kv_avg", "kv_product"] = "kv_product"
    use_random_leverage: bool = False
    use_local_approximation: bool = True
    local_window_size: Count = 16

    @property
    def protected(self) -> int:
        return self.num_sinks

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`, infinite for sinks."""
        is_combined = self.leverage_type in ("kv_avg", "kv_product")
        keys = self._leverage(view.keys) if is_combined or self.leverage_type == "key" else None
        values = self._leverage(view.values) if is_combined or self.leverage_type == "value" else None
        if keys is None or values is None:
            (scores,) = (leverage for leverage in (keys, values) if leverage is not None)
        else:
            scores = keys * values if self.leverage_type == "kv_product" else (keys + values) / 2
        scores = scores / _positive(scores.sum(dim=-1, keepdim=True))
        return scores.masked_fill(view.positions < self.num_sinks, torch.inf)

    def _leverage(self, vectors: Tensor) -> Tensor:
        """Return the squared norm of `vectors [b, h, n, D]` as a share of the sum over their window, `[b, h, n]`."""
        if self.use_random_leverage:
            normal = torch.randn(vectors.shape[-1], SKETCH, generator=torch.Generator().manual_seed(0))
            vectors = vectors.float() @ (normal / SKETCH**0.5).to(vectors.device)
        size: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32).square()
        if not self.use_local_approximation:
            return size / _positive(size.sum(dim=-1, keepdim=True))
        length, width = size.shape[-1], self.local_window_size
        windows: Tensor = pad(size, (0, -length % width)).unflatten(-1, (-1, width))
        return (windows / _positive(windows.sum(dim=-1, keepdim=True))).flatten(2)[..., :length]


def _positive(sums: Tensor) -> Tensor:
    return sums.clamp_min(torch.finfo(torch.float32).tiny)
