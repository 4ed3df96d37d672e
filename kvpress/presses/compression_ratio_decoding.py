# SPDX-License-Identifier: Apache-2.0
"""Compression while tokens are generated, to a share of all tokens seen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvpress.core.amount import Amount
from kvpress.core.checks import Count, Ratio
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Refusal, register
from kvpress.presses.decoding import DecodingPress


@register(
    "compression_ratio_decoding",
    "schedule",
    example="compression_ratio_decoding(snapkv):compression_interval=128,target_compression_ratio=0.5",
    refuses=(Refusal("compression_ratio_decoding(kivi)", "a codec has no scores; it acts on generated tokens anyway"),),
    status="reproduction",
)
@dataclass
class CompressionRatioDecodingPress(DecodingPress):
    """Keep the share `1 - target_compression_ratio` of the tokens seen, every `compression_interval` generated tokens.

    Tokens of the prompt count too, so the cache grows with the text, but more slowly. The press is `DecodingPress` with a
    `target_ratio`, under the names of NVIDIA kvpress. `base_press` is any scorer, also one with head budgets.
    `target_compression_ratio` is the share of all tokens seen that is removed; 0.75 removes three quarters.
    `compression_interval` is the number of generated tokens between two evictions; the cache exceeds its target by these.
    The prompt is cut at the end of the first interval of generated tokens. A press that reads hidden states gets the newest
    `hidden_states_buffer_size` of them.

    Paper: none; a schedule.
    Differs from the paper: nothing.
    """

    target_size: Count = field(default=1, init=False)
    target_ratio: Ratio | None = field(default=None, init=False)
    target_compression_ratio: Ratio = 0.5

    def validate(self) -> None:
        super().validate()
        if self.target_size != 1 or self.target_ratio is not None:
            raise ValueError(
                f"target_compression_ratio sets the number of pairs, so target_size={self.target_size} and "
                f"target_ratio={self.target_ratio} would have no effect; use DecodingPress for these"
            )

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        wrapped = super().wrap(step, model)
        return replace(wrapped, schedule=replace(wrapped.schedule, target=Amount(self.target_compression_ratio)))
