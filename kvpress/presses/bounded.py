# SPDX-License-Identifier: Apache-2.0
"""Bounded reading: compress a prompt while it is read."""

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
        Refusal("bounded(cake:0.5)", "it shares pairs out among all layers, once all of the prompt is read"),
        Refusal("bounded(decoding(snapkv))", "it does not evict from prompts"),
    ),
)
@dataclass
class BoundedPress(WrapperPress):
    """Read a prompt in chunks of at most `chunk` tokens, and let another press evict after each of them.

        for each chunk:   read it with attention to what is kept;   keep the budget's best pairs of both

    So no layer ever holds more than the budget and one chunk, where other presses hold a whole prompt in one layer at least,
    and in all layers while it comes in chunks. The budget is that of the whole prompt from the first chunk on. Prompts are
    split into whole chunks at their end and a shorter first one, whatever the padding and `prefill_chunk_size`; one that fits
    in a chunk is compressed as by the inner press. Later chunks attend to what was kept of earlier ones, so results differ
    from those of the inner press otherwise. A decoder that is called without its model is not split.

    Paper: Xiao et al., StreamingLLM, 2023, arXiv:2309.17453, and Park et al., KeyDiff, 2025, arXiv:2504.15364, read in such
    chunks.
    Differs from the paper: any scorer that can judge a part of a prompt by what was read so far.
    """

    chunk: Count = 2048

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        name = type(self.press).__name__
        reasons = {
            "it does not evict from prompts": not step.schedule.prompt,
            "it scores by looking at a whole prompt again": step.prepare is not None,
            "it shares pairs out among all layers, once all of the prompt is read": step.allocator.scope == "cache",
            "its `score` reads hidden states of the whole prompt": step.reads_hidden_states,
        }
        for reason, holds in reasons.items():
            if holds:
                raise TypeError(f"BoundedPress cannot evict while a prompt is read by {name}: {reason}")
        return replace(step, schedule=replace(step.schedule, chunk=self.chunk))
