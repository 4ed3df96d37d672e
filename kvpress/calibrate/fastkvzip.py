# SPDX-License-Identifier: Apache-2.0
"""Calibration of `fastkvzip`: gates that predict the KVzip scores of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from kvpress.calibrate.repeated import Predicted
from kvpress.core.checks import Count, Positive
from kvpress.presses.fastkvzip import METHOD, gates_of

BATCH = 1000
"""Tokens in an update."""
MOMENTUM = 0.9


@dataclass(frozen=True)
class FastKVzipSettings(Predicted):
    """Gates of `fastkvzip`, trained on `kvzip` scores with a cross-entropy loss.

        loss = mean over tokens, sum over heads of -(s log g + (1 - s) log(1 - g)),   s the score and g the gate, both in [0, 1]

    Gradient descent has momentum 0.9. The learning rate rises for a hundredth of the steps, falls to a half after half of them
    and to a quarter after three quarters. A layer gives the tensors of a published file, float32.

    Paper: Kim et al., Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction, 2026, arXiv:2601.17668.
    Differs from the paper: the text is read again without a request to repeat it; learned keys start at small random numbers,
    since equal keys would stay equal; every layer is trained separately.
    """

    method: ClassVar[str] = METHOD
    plus: ClassVar[bool] = False

    sample: Count = 2000
    steps: Count = 5000
    lr: Positive = 0.2
    width: Count = 16
    """Channels of a gate's queries and keys."""
    bases: Count = 16
    """Learned keys that the key of a token competes with."""

    def train(self, hidden: Tensor, scores: Tensor, groups: int, generator: torch.Generator) -> dict[str, Tensor]:
        tensors = self.untrained(hidden.shape[1], scores.shape[1], groups, generator)
        tensors = {name: tensor.to(hidden.device).requires_grad_() for name, tensor in tensors.items()}
        optimiser = torch.optim.SGD(tensors.values(), lr=self.lr, momentum=MOMENTUM)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, self.rate)
        with torch.enable_grad():
            for _ in range(self.steps):
                batch = torch.randint(len(hidden), (BATCH,), generator=generator).to(hidden.device)
                optimiser.zero_grad()
                gates = gates_of(tensors, hidden[None, batch])[0]
                binary_cross_entropy(gates, scores[batch], reduction="none").mean(dim=0).sum().backward()
                optimiser.step()
                schedule.step()
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate at a step."""
        progress = step / self.steps
        return min(1.0, 100 * (step + 1) / self.steps) if progress < 0.5 else 0.5 if progress < 0.75 else 0.25

    def untrained(self, hidden: int, heads: int, groups: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tensors of a layer's gates before training."""
        width, reach = self.width, hidden**-0.5

        def uniform(*shape: int) -> Tensor:
            return torch.empty(shape).uniform_(-reach, reach, generator=generator)

        return {
            "q_proj.weight": uniform(heads * groups * width, hidden),
            "q_proj.bias": uniform(heads * groups * width),
            "k_proj.weight": uniform(heads * width, hidden),
            "q_norm.weight": torch.ones(width),
            "k_norm.weight": torch.ones(width),
            "k_base": uniform(heads, 1, self.bases, width),
            "b": torch.zeros(heads, 1, groups),
        }
