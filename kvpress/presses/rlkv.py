# SPDX-License-Identifier: Apache-2.0
"""RLKV: full attention for the heads that reinforcement learning marks as needed for reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.presses.streaming_heads import NO_COMMON_BUDGET, TABLE, StreamingHeadsPress


@register(
    "rlkv",
    "budget",
    "Du et al., 2025, arXiv:2510.08525",
    example="rlkv",
    needs=TABLE,
    refuses=(Refusal("rlkv:0.5", "the model has no table of streaming heads"),),
    exempt=(Exemption(EVERY_SUITE, NO_COMMON_BUDGET),),
)
@dataclass
class RLKVPress(StreamingHeadsPress):
    """Cut the heads with the lowest gates of a table, learned by reinforcement learning, down to sinks and a window.

    A `StreamingHeadsPress` with the table and the window sizes of RLKV: 16 sinks and 64 recent tokens. `kvpress calibrate
    rlkv` learns a table; the table of the bundled reference model ships with it.

    Paper: Du et al., Which Heads Matter for Reasoning? RL-Guided KV Cache Compression, 2025, arXiv:2510.08525.
    Differs from the paper: ties are broken by layer and head instead of by noise.
    """

    sizes: ClassVar[tuple[int, int]] = (16, 64)
    beside: ClassVar[str] = "adapter_weights.tsv"
