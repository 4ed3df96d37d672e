# SPDX-License-Identifier: Apache-2.0
"""What the choice of a scorer costs a layer, by the attention output of the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpress.core.scoring import Scored
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries

QUERIES = Wanted(RecentQueries, 64)
"""The newest tokens, whose attention stands for that of tokens to come."""
ROUNDING = 1e-6
"""Relative squared errors below this tell layers apart by their rounding."""
MOST = 2.0
"""How many times the mean a layer counts at most, or gets of pairs; at least one over that."""


@torch.no_grad()
def error(layer: Sequence[Scored], count: int) -> float:
    """Return the relative squared error of a layer's output for the newest tokens, if `count` pairs of a head stay."""
    lost = whole = 0.0
    for scored in layer:
        mask = scored.choose(min(count, scored.view.length))
        weight = torch.zeros(mask.shape, device=mask.device) if scored.log_weight is None else scored.log_weight.float()
        for h, head in enumerate(scored.view.per_head()):
            queries = head.newest_queries(QUERIES)[:, :, -max(1, head.seen // 4) :]
            newest = head.positions[:, 0] >= head.seen - queries.shape[2]
            factor = torch.where(newest, 1.0, mask[:, h] * weight[:, h].exp())
            attention, values = head.attention(queries)[:, 0], head.values.float()
            left, out = attention * factor[:, None, None], attention @ values
            # What an attention sink takes is no pair's, and stays.
            total = left.sum(dim=-1, keepdim=True) + (1 - attention.sum(dim=-1, keepdim=True)).clamp_min(0)
            lost += float((left @ values / total.clamp_min(1e-30) - out).square().sum())
            whole += float(out.square().sum())
    return lost / max(whole, 1e-30)
