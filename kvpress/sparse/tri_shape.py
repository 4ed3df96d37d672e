# SPDX-License-Identifier: Apache-2.0
"""TriShape: first tokens, neighbours, and a last part of the prompt that reads everything."""

from __future__ import annotations

from dataclasses import dataclass

from kvpress.core.checks import Size
from kvpress.core.pattern import Prompt
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.tiling import IN_CHUNKS, PatternPress, Places


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

    Numbers of tokens are rounded up to blocks of `block` tokens; `local` counts the block of the query itself. The end of a
    prompt, which asks the question, reads all of it, so the shape is the same for every head and costs no estimate. Where a
    prompt comes in chunks, each of them has its own last tokens.

    Paper: Li et al., SCBench: A KV Cache-Centric Analysis of Long-Context Methods, 2024, arXiv:2412.10319.
    Differs from the paper: default sizes are ours.
    """

    sinks: Size = 128
    local: Size = 1024
    last: Size = 128

    def tiles(self, layer: int, prompt: Prompt) -> Tiles:
        del layer
        places = Places.of(prompt, self.block)
        sinks, local = (-(-size // self.block) for size in (self.sinks, self.local))
        read = (places.at < sinks) | (places.at > places.own - local)
        if self.last:
            read[max(0, prompt.new - self.last) // self.block :] = True
        return Tiles(read.expand(prompt.shape(self.block)), self.block)
