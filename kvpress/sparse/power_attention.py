# SPDX-License-Identifier: Apache-2.0
"""PowerAttention: blocks at distances that are powers of two."""

from __future__ import annotations

from dataclasses import dataclass

from kvpress.core.checks import Size
from kvpress.core.pattern import PromptTensors
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.tiling import IN_CHUNKS, BlockGrid, PatternPress


@register(
    "power_attention",
    "prefill",
    "Chen et al., 2025, arXiv:2503.03588",
    example="power_attention:window=256",
    cases=("power_attention:sinks=8,window=8,block=8",),
    exempt=(IN_CHUNKS,),
)
@dataclass
class PowerAttentionPress(PatternPress):
    """Read blocks at distances of 1, 2, 4, 8, ... blocks, the first `sinks` and the newest `window` tokens.

    The receptive field of a token doubles with every layer, for a number of blocks that grows with the logarithm of the
    length. `sinks` is the number of first tokens that every query reads. Sizes are rounded up to blocks of `block`
    tokens; `window` includes the block of the query.

    Paper: Chen et al., PowerAttention: Exponentially Scaling of Receptive Fields for Effective Sparse Attention, 2025,
    arXiv:2503.03588.
    Differs from the paper: it trains models with the pattern, while here models are not trained for it and lose the tokens in
    between; generated tokens read everything; sizes are ours.
    """

    sinks: Size = 64
    window: Size = 256

    def tiles(self, layer: int, prompt: PromptTensors) -> Tiles:
        del layer
        grid = BlockGrid.of(prompt, self.block)
        sinks, window = (-(-size // self.block) for size in (self.sinks, self.window))
        distance = grid.first - grid.keys
        power = (distance > 0) & ((distance & (distance - 1)) == 0)
        read = (grid.keys < sinks) | (distance < window) | power
        return Tiles(read.expand(prompt.shape(self.block)), self.block)
