# SPDX-License-Identifier: Apache-2.0
"""MInference: every head reads a few vertical and slash lines, found from the newest queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpress.core.checks import Count
from kvpress.core.pattern import Prompt
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.lines import newest_attention, slash_scores
from kvpress.sparse.tiling import IN_CHUNKS, EstimatedPress, Places, capped

SINKS, LOCAL = 30, 100
"""Columns and diagonals that are always among the lines."""


@register(
    "minference",
    "prefill",
    "Jiang et al., 2024, arXiv:2407.02490",
    example="minference:vertical=1000,slash=6096",
    cases=("minference:vertical=6,slash=12,last=8,block=8",),
    exempt=(IN_CHUNKS,),
)
@dataclass
class MInferencePress(EstimatedPress):
    """Read, for each head, the `vertical` keys and the `slash` diagonals that the `last` newest queries attend to most.

    The softmax of these queries over all keys is exact, and summed along columns and along diagonals of equal distance. The
    first 30 keys and the nearest 100 distances are always among the lines. Tiles that a chosen diagonal crosses are read whole,
    chosen keys outside of them one by one. With `max_density`, single keys are at most a quarter of that share of the prompt,
    which for its first blocks of queries can be more than their share, and tiles, ranked by what their diagonals get, take what
    single keys leave.

    Paper: Jiang et al., MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention, 2024,
    arXiv:2407.02490.
    Differs from the paper: every head is vertical-slash, which nearly all heads of the published configurations are, and there
    is no search for a pattern of each head; `max_density` is ours.
    """

    vertical: Count = 1000
    slash: Count = 6096
    last: Count = 64

    def tiles(self, layer: int, prompt: Prompt) -> Tiles:
        del layer
        places, total = Places.of(prompt, self.block), prompt.total
        columns, diagonals = newest_attention(prompt, self.last)
        columns[..., :SINKS] = torch.inf
        most = total if self.max_density >= 1 else max(1, int(self.max_density * total / 4))
        best = columns.topk(min(self.vertical, most, total), dim=-1).indices
        single = torch.zeros_like(columns, dtype=torch.bool).scatter(-1, best, True)
        worth = diagonals.clone()
        diagonals[..., :LOCAL] = torch.inf
        lines = diagonals.topk(min(self.slash, total), dim=-1).indices
        taken = torch.zeros_like(diagonals).scatter(-1, lines, 1.0)
        crossed = (slash_scores(prompt, taken, self.block) > 0) & places.past
        scores = slash_scores(prompt, worth * taken, self.block)
        chosen = capped(crossed, scores, places, self.max_density, single)
        return Tiles(chosen, self.block, single)
