# SPDX-License-Identifier: Apache-2.0
"""TriShape: sinks, a local window, and full attention for the end of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from kvpress.core.checks import Size
from kvpress.core.pattern import PromptTensors
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.tiling import IN_CHUNKS, BlockGrid, PatternPress


@register(
    "tri_shape",
    "prefill",
    "Li et al., 2024, arXiv:2412.10319",
    example="tri_shape:local=1024",
    cases=("tri_shape:sinks=8,local=8,last=8,block=8",),
    exempt=(IN_CHUNKS,),
)
@dataclass
class TriShapePress(PatternPress):
    """Read the first `sinks` tokens and the newest `local` ones of a prompt, and everything for its `last` tokens.

    Numbers of tokens are rounded up to blocks of `block` tokens; `local` includes the block of the query. `sinks` is the number
    of first tokens that every query reads. The end of a prompt, with the question, reads all of it, so that the shape is the
    same for every head and needs no estimate. If a prompt comes in chunks, each chunk has its `last` tokens.

    Paper: Li et al., SCBench: A KV Cache-Centric Analysis of Long-Context Methods, 2024, arXiv:2412.10319.
    Differs from the paper: default sizes are ours.
    """

    sinks: Size = 128
    local: Size = 1024
    last: Size = 128

    def tiles(self, layer: int, prompt: PromptTensors) -> Tiles:
        del layer
        grid = BlockGrid.of(prompt, self.block)
        sinks, local = (-(-size // self.block) for size in (self.sinks, self.local))
        read = (grid.keys < sinks) | (grid.keys > grid.first - local)
        if self.last:
            read[max(0, prompt.new - self.last) // self.block :] = True
        return Tiles(read.expand(prompt.shape(self.block)), self.block)
