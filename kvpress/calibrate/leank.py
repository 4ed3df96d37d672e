# SPDX-License-Identifier: Apache-2.0
"""Calibration of `leank`: scales of key channels, trained by distillation of the full model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.gates import Distilled, Gated, softmax
from kvpress.calibrate.run import CalibrationSettings
from kvpress.core.calibration import Calibration
from kvpress.core.checks import Count, NotNegative, Positive, Size
from kvpress.core.host import AttentionInputs
from kvpress.core.model import ModelFacts
from kvpress.quant.leank import METHOD


class Scaled(Gated):
    """Attention function whose gates `[L, H, D]` scale the channels of keys outside of sinks and window."""

    def weights(
        self, call: AttentionInputs, logits: Callable[..., Tensor], visible: Tensor, in_window: Tensor
    ) -> Tensor:
        mixed = torch.where(in_window, logits(), logits(self.gates[call.layer]))
        return softmax(mixed.masked_fill(~visible, -torch.inf), call.sinks)


@dataclass(frozen=True)
class LeanKSettings(Distilled):
    """Scales of key channels, by distillation of the full model, for `leank`.

        loss = mean((h - h')^2) / mean(h'^2) + price * mean(scales)

    h are the last hidden states of the `answer` tokens with scaled keys, except those of the first `sink_size` and the newest
    `recent_size` tokens; h' are those with full attention. A layer gives `scale [H, D]`, float32, in [0, 1].

    Paper: Zhang et al., LeanK: Learnable K Cache Channel Pruning for Efficient Decoding, 2025, arXiv:2508.02215.
    Differs from the paper: there is no second stage, which continues training with the remaining channels; the distance is
    relative to the size of the hidden states.
    """

    method: ClassVar[str] = METHOD

    sink_size: Size = 128
    recent_size: Count = 1024
    price: NotNegative = 0.06
    steps: Count = 200
    lr: Positive = 0.02

    def check(self, model: ModelFacts) -> None:
        super().check(model)
        if len({layer.head_dim for layer in model.layers}) > 1:
            raise ValueError(f"{self.method} needs the same head dim in every layer, which {model.name} does not have")

    def check_out(self, out: Path) -> None:
        CalibrationSettings.check_out(self, out)

    def outputs(self, out: Path) -> tuple[Path, ...]:
        return CalibrationSettings.outputs(self, out)

    def write(self, result: Calibration, model: ModelFacts, out: Path) -> None:
        CalibrationSettings.write(self, result, model, out)

    def attention(self, gates: Tensor, growing: set[int]) -> Gated:
        return Scaled(gates, growing, self.sink_size, self.recent_size)

    def gated(self, model: ModelFacts) -> tuple[int, ...]:
        return model.layers[0].kv_heads, model.layers[0].head_dim

    def named(self, gates: Tensor, model: ModelFacts) -> dict[str, Tensor]:
        return {f"{layer.index}.scale": gates[layer.index] for layer in model.growing}
