# SPDX-License-Identifier: Apache-2.0
"""Error that the choice of a scorer causes in the attention output of a layer, for the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.core.scoring import Scored
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries

QUERIES = Wanted(RecentQueries, 64)
"""Newest queries, used as an estimate of future queries."""
ROUNDING = 1e-6
"""Added to relative squared errors, so that layers do not differ by rounding alone."""
MOST = 2.0
"""Largest weight or share of a layer, relative to the mean; the smallest is the inverse."""


@torch.no_grad()
def error(layer: Sequence[Scored], count: int) -> float:
    """Return the relative squared error of a layer's output for the newest tokens, if `count` pairs per head stay."""
    lost, total = torch.cat([scored.share(squares, count) for scored in layer], dim=1).sum(dim=(0, 1)).tolist()
    return float(lost / max(total, 1e-30))


def squares(scored: Scored, count: int | Tensor) -> Tensor:
    """Return the squared sizes of the error and of the output of every head, `[b, h, 2]`, float64 on the host."""
    mask = scored.choose(min(int(count), scored.view.length))
    weight = torch.zeros(mask.shape, device=mask.device) if scored.log_weight is None else scored.log_weight.float()
    sizes = torch.zeros(*mask.shape[:2], 2, dtype=torch.float64)
    for h, head in enumerate(scored.view.per_head()):
        queries = head.newest_queries(QUERIES)[:, :, -max(1, head.seen // 4) :]
        newest = head.positions[:, 0] >= head.seen - queries.shape[2]
        factor = torch.where(newest, 1.0, mask[:, h] * weight[:, h].exp())
        attention, values = head.attention(queries)[:, 0], head.values.float()
        kept, output = attention * factor[:, None, None], attention @ values
        # The attention that a learned sink takes belongs to no pair, and stays in the denominator.
        total = kept.sum(dim=-1, keepdim=True) + (1 - attention.sum(dim=-1, keepdim=True)).clamp_min(0)
        differences = kept @ values / total.clamp_min(1e-30) - output
        sizes[:, h] = torch.stack([x.square().sum(dim=(1, 2, 3)[: x.dim() - 1]) for x in (differences, output)], dim=1)
    return sizes
