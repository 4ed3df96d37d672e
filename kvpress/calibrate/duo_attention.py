"""Which heads retrieve, by distillation: gates that may close as far as the hidden states of the full model stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.gates import Gated, GateSettings
from kvpress.core.checks import Count, NotNegative, Positive, Size


@dataclass(frozen=True)
class DuoAttentionSettings(GateSettings):
    """Gates by distillation of the full model, a table for `duo_attention`.

        loss = mean((h - h')^2) / mean(h'^2) + price * mean(gates)

    h and h' are the last hidden states of the `answer` tokens with gates and with full attention.

    Paper: Xiao et al., DuoAttention, 2024, arXiv:2410.10819.
    Differs from the paper: any text will do, where its answers are passkeys; the distance is one relative to the size of
    the hidden states, so that a price suits models of any scale; only answers are gated, behind a prompt that was read in
    full.
    """

    method: ClassVar[str] = "duo_attention"

    sink_size: Size = 128
    recent_size: Count = 256
    price: NotNegative = 0.05
    steps: Count = 200
    lr: Positive = 0.02

    def prompt(self, model: Any, attention: Gated, ids: Tensor) -> tuple[Tensor, Tensor]:
        start = len(ids) - self.answer
        return ids, attention.read(model, ids).hidden_states[-1][0, start:].float()

    def loss(self, model: Any, attention: Gated, prompt: tuple[Tensor, Tensor], generator: torch.Generator) -> Tensor:
        del generator
        (ids, target), start = prompt, len(prompt[0]) - self.answer
        found = attention.follow(model, ids[None, start:], torch.tensor([start], device=ids.device))
        apart = (found.hidden_states[-1][0].float() - target).square().mean() / target.square().mean()
        return apart + self.price * attention.gates.mean()
