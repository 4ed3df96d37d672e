# SPDX-License-Identifier: Apache-2.0
"""Prefill in bounded memory: compress a prompt while it is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpress.core.checks import Count
from kvpress.core.model import ModelFacts
from kvpress.core.press import WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Refusal, register


@register(
    "bounded",
    "schedule",
    "Xiao et al., 2023, arXiv:2309.17453; Park et al., 2025, arXiv:2504.15364",
    example="bounded(keydiff:0.9):chunk=2048",
    refuses=(
        Refusal("bounded(kvzip:0.5)", "it scores by reading the whole prompt a second time"),
        Refusal("bounded(cake:0.5)", "it shares a budget among all layers after the whole prompt"),
        Refusal("bounded(decoding(snapkv))", "it does not evict from prompts"),
    ),
    status="recommended",
)
@dataclass
class BoundedPress(WrapperPress):
    """Read a prompt in chunks of at most `chunk` tokens, and evict by another press after each chunk.

        for each chunk:   read it with attention to the kept pairs;   keep the best pairs of both, as many as the budget

    No layer stores more than the budget and one chunk. Other presses store a whole prompt in at least one layer, and in all
    layers when the prompt is read in chunks. The budget is that of the whole prompt from the first chunk on. The first chunk
    of a prompt is shorter if the length is not a multiple of `chunk`; padding and `prefill_chunk_size` do not matter. A prompt
    that fits in one chunk gives the result of the inner press. For longer prompts results differ, because later chunks attend
    to the kept pairs of earlier ones. A direct call of the decoder (`model.model`) is not split.

    Paper: Xiao et al., StreamingLLM, 2023, arXiv:2309.17453, and Park et al., KeyDiff, 2025, arXiv:2504.15364, read prompts in
    such chunks.
    Differs from the paper: any scorer may be used that needs only the part of a prompt read so far.
    """

    chunk: Count = 2048

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        name = type(self.press).__name__
        reasons = {
            "it does not evict from prompts": not step.schedule.prompt,
            "it scores by reading a whole prompt again": step.prepare is not None,
            "it shares a budget among all layers after the whole prompt": step.allocator.scope == "cache",
            "its `score` reads hidden states of the whole prompt": step.reads_hidden_states,
        }
        for reason, holds in reasons.items():
            if holds:
                raise TypeError(f"BoundedPress cannot evict while a prompt is read by {name}: {reason}")
        return replace(step, schedule=replace(step.schedule, chunk=self.chunk))
