# SPDX-License-Identifier: Apache-2.0
"""CritiPrefill: neighbouring queries read the same blocks of keys, chosen by bounds of both."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.core.checks import Count, Size
from kvpress.core.pattern import Pattern, Prompt
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.tiling import IN_CHUNKS, PatternPress, Places

NEW = 0.75
"""Share of a layer's own scores; the rest are those of the layer before."""
STATE = "critiprefill"
"""Where the scores of the layer before are, by the rows that they are of."""


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

    With q the middle between the largest and the smallest of every channel of a segment's queries, and k_max, k_min those
    bounds of a block's keys,

        s = softmax over blocks of  mean over the query heads of a group of  max(q . k_max, q . k_min)

    ranks the blocks before a segment, mixed with what ranked them in the layer before: 3/4 s, and 1/4 of that. Of its own keys
    a segment reads all that are not of the future. Segments that begin within the first `dense` tokens, the last segment of a
    prompt, and the first `skip_layers` layers read everything. `block` must divide `segment`; budgets are rounded up to blocks.

    Paper: Lv et al., CritiPrefill: A Segment-wise Criticality-based Approach for Prefilling Acceleration in LLMs, 2024,
    arXiv:2409.12490.
    Differs from the paper: chosen blocks are read where they lie, none is copied; any number of rows.
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

    def tiles(self, layer: int, prompt: Prompt) -> Tiles:
        places, per = Places.of(prompt, self.block), self.segment // self.block
        # Key blocks before that of a segment's first query; a segment is so many blocks of queries.
        before = places.at < places.own[::per]
        scores = self._scores(prompt, before)
        said: dict[str, tuple[int, Tensor]] = prompt.shared.setdefault(STATE, {})
        last = said.pop(str(prompt.rows), None)
        if last is not None and last[0] < layer and last[1].shape == scores.shape:
            scores = NEW * scores + (1 - NEW) * last[1]
        if not prompt.final:
            said[str(prompt.rows)] = layer, scores
        elif not said:
            del prompt.shared[STATE]
        count = min(-(-self.budget // self.block), scores.shape[-1])
        best = scores.masked_fill(~before, -torch.inf).topk(count, dim=-1).indices
        best = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        start = torch.arange(prompt.total - prompt.new, prompt.total, self.segment, device=before.device)[:, None]
        whole = start < self.dense
        whole[-1] = True
        chosen = (best | whole | ~before).repeat_interleave(per, dim=2)[:, :, : len(places.own)]
        return Tiles((chosen & places.past).repeat_interleave(prompt.group, dim=1), self.block)

    def _scores(self, prompt: Prompt, before: Tensor) -> Tensor:
        """Scores of the blocks before each segment, float32 `[b, H, segments, nk]`; 0 for others."""
        high, low = bounds(prompt.queries, self.segment)
        middle = ((high + low) / 2).unflatten(1, (-1, prompt.group))
        products = [middle @ bound[:, :, None].transpose(3, 4) for bound in bounds(prompt.keys, self.block)]
        found = torch.maximum(*products).mean(dim=2)
        return found.masked_fill(~before, -torch.inf).softmax(dim=-1).nan_to_num()


def bounds(vectors: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Largest and smallest of every channel of parts of `vectors [..., n, D]`, the last one over what it has; float32."""
    parts = pad(vectors.float(), (0, 0, 0, -vectors.shape[-2] % size), value=torch.nan).unflatten(-2, (-1, size))
    missing = parts.isnan()
    return (
        parts.masked_fill(missing, -torch.inf).amax(dim=-2),
        parts.masked_fill(missing, torch.inf).amin(dim=-2),
    )
