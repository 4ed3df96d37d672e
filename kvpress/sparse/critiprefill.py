# SPDX-License-Identifier: Apache-2.0
"""CritiPrefill: neighbouring queries read the same blocks of keys, chosen by bounds of both."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.core.checks import Count, Size
from kvpress.core.pattern import Pattern, PromptTensors
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.tiling import IN_CHUNKS, BlockGrid, PatternPress

NEW = 0.75
"""Weight of a layer's scores; the scores of the layer before have the remaining weight."""
STATE = "critiprefill"
"""Key in `PromptTensors.shared` of the scores of the layer before, by rows."""


@register(
    "critiprefill",
    "prefill",
    "Lv et al., 2024, arXiv:2409.12490",
    example="critiprefill:budget=2048",
    cases=("critiprefill:budget=16,segment=16,dense=16,skip_layers=0,block=8",),
    exempt=(IN_CHUNKS,),
)
@dataclass
class CritiPrefillPress(PatternPress):
    """Read, for each segment of `segment` queries and each kv head, the best blocks of keys before it, `budget` tokens in all.

    With q the middle between the maximum and the minimum of every channel of a segment's queries, and k_max, k_min the maximum
    and minimum of a block's keys,

        s = softmax over blocks of  mean over the query heads of a group of  max(q . k_max, q . k_min)

    scores the blocks before a segment. A layer ranks them by 3/4 s plus 1/4 of the scores of the layer before. Queries of a
    segment read the keys of that segment causally. `budget` is the number of key tokens before its segment that a query reads,
    for any length of the prompt. Segments that begin within the first `dense` tokens, the last segment of a prompt, and the
    first `skip_layers` layers read everything. `block` must divide `segment`; budgets are rounded up to blocks.

    Paper: Lv et al., CritiPrefill: A Segment-wise Criticality-based Approach for Prefilling Acceleration in LLMs, 2024,
    arXiv:2409.12490.
    Differs from the paper: chosen blocks are read in place, not copied; any number of rows.
    """

    budget: Count = 2048
    segment: Count = 512
    dense: Size = 4096
    skip_layers: Size = 1
    block: Count = field(default=32, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if self.segment % self.block:
            raise ValueError(f"segment must be a multiple of the {self.block} tokens of a block, got {self.segment}")

    def pattern_at(self, layer: int) -> Pattern | None:
        return None if layer < self.skip_layers else super().pattern_at(layer)

    def tiles(self, layer: int, prompt: PromptTensors) -> Tiles:
        grid, per = BlockGrid.of(prompt, self.block), self.segment // self.block
        # Key blocks before a segment's first query; a segment has `per` blocks of queries.
        before = grid.keys < grid.first[::per]
        scores = self._scores(prompt, before)
        state: dict[str, tuple[int, Tensor]] = prompt.shared.setdefault(STATE, {})
        previous = state.pop(str(prompt.rows), None)
        if previous is not None and previous[0] < layer and previous[1].shape == scores.shape:
            scores = NEW * scores + (1 - NEW) * previous[1]
        if not prompt.final:
            state[str(prompt.rows)] = layer, scores
        elif not state:
            del prompt.shared[STATE]
        count = min(-(-self.budget // self.block), scores.shape[-1])
        best = scores.masked_fill(~before, -torch.inf).topk(count, dim=-1).indices
        best = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        start = torch.arange(prompt.total - prompt.new, prompt.total, self.segment, device=before.device)[:, None]
        is_dense = start < self.dense
        is_dense[-1] = True
        chosen = (best | is_dense | ~before).repeat_interleave(per, dim=2)[:, :, : len(grid.first)]
        return Tiles((chosen & grid.causal).repeat_interleave(prompt.group, dim=1), self.block)

    def _scores(self, prompt: PromptTensors, before: Tensor) -> Tensor:
        """Return the scores of the blocks before each segment, float32 `[b, H, segments, nk]`; 0 for other blocks."""
        high, low = bounds(prompt.queries, self.segment)
        middle = ((high + low) / 2).unflatten(1, (-1, prompt.group))
        products = [middle @ bound[:, :, None].transpose(3, 4) for bound in bounds(prompt.keys, self.block)]
        scores = torch.maximum(*products).mean(dim=2)
        return scores.masked_fill(~before, -torch.inf).softmax(dim=-1).nan_to_num()


def bounds(vectors: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return channel-wise maxima and minima, float32, of runs of `size` of `vectors [..., n, D]`; the last run may be short."""
    runs = pad(vectors.float(), (0, 0, 0, -vectors.shape[-2] % size), value=torch.nan).unflatten(-2, (-1, size))
    missing = runs.isnan()
    return (
        runs.masked_fill(missing, -torch.inf).amax(dim=-2),
        runs.masked_fill(missing, torch.inf).amin(dim=-2),
    )
