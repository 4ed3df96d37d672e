# SPDX-License-Identifier: Apache-2.0
"""Calibration of `duo_attention`: gates of retrieval heads, trained by distillation of the full model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpress.calibrate.gates import Distilled
from kvpress.core.checks import Count, NotNegative, Positive, Size


@dataclass(frozen=True)
class DuoAttentionSettings(Distilled):
    """Gates by distillation of the full model, a table for `duo_attention`.

        loss = mean((h - h')^2) / mean(h'^2) + price * mean(gates)

    h and h' are the last hidden states of the `answer` tokens with gates and with full attention.

    Paper: Xiao et al., DuoAttention, 2024, arXiv:2410.10819.
    Differs from the paper: any text works, where its answers are passkeys; the distance is relative to the size of the hidden
    states, so that a price suits models of any scale; only answers are gated, after a prompt that is read with full attention.
    """

    method: ClassVar[str] = "duo_attention"

    sink_size: Size = 128
    recent_size: Count = 256
    price: NotNegative = 0.05
    steps: Count = 200
    lr: Positive = 0.02
