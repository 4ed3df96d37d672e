# SPDX-License-Identifier: Apache-2.0
"""Gates that predict what a repetition of the text finds a pair worth, for `fastkvzip`."""

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
    """Gates of `fastkvzip`, trained on `kvzip` scores by their cross-entropy.

        loss = mean over tokens, sum over heads of -(s log g + (1 - s) log(1 - g)),   s the score and g the gate, both in [0, 1]

    `width` is the number of channels of a gate's queries and keys, `bases` that of the learned keys that a token's own
    competes with. Gradient descent has momentum 0.9; the learning rate rises for a hundredth of the steps and falls to a half
    after half of them and to a quarter after three quarters. A layer gives the tensors of a published file, float32.

    Paper: Kim et al., Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction, 2026, arXiv:2601.17668.
    Differs from the paper: the text is read again without a request to repeat it; learned keys start at small random numbers,
    since equal ones stay equal; every layer is trained by itself.
    """

    method: ClassVar[str] = METHOD
    plus: ClassVar[bool] = False

    sample: Count = 2000
    steps: Count = 5000
    lr: Positive = 0.2
    width: Count = 16
    bases: Count = 16

    def train(self, hidden: Tensor, scores: Tensor, groups: int, generator: torch.Generator) -> dict[str, Tensor]:
        found = self.untrained(hidden.shape[1], scores.shape[1], groups, generator)
        found = {name: tensor.to(hidden.device).requires_grad_() for name, tensor in found.items()}
        optimiser = torch.optim.SGD(found.values(), lr=self.lr, momentum=MOMENTUM)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, self.rate)
        with torch.enable_grad():
            for _ in range(self.steps):
                batch = torch.randint(len(hidden), (BATCH,), generator=generator).to(hidden.device)
                optimiser.zero_grad()
                gates = gates_of(found, hidden[None, batch])[0]
                binary_cross_entropy(gates, scores[batch], reduction="none").mean(dim=0).sum().backward()
                optimiser.step()
                schedule.step()
        return {name: tensor.detach() for name, tensor in found.items()}

    def rate(self, step: int) -> float:
        """Return the part of the learning rate that a step has."""
        done = step / self.steps
        return min(1.0, 100 * (step + 1) / self.steps) if done < 0.5 else 0.5 if done < 0.75 else 0.25

    def untrained(self, hidden: int, heads: int, groups: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tensors of a layer's gates before training."""
        width, reach = self.width, hidden**-0.5

        def drawn(*shape: int) -> Tensor:
            return torch.empty(shape).uniform_(-reach, reach, generator=generator)

        return {
            "q_proj.weight": drawn(heads * groups * width, hidden),
            "q_proj.bias": drawn(heads * groups * width),
            "k_proj.weight": drawn(heads * width, hidden),
            "q_norm.weight": torch.ones(width),
            "k_norm.weight": torch.ones(width),
            "k_base": drawn(heads, 1, self.bases, width),
            "b": torch.zeros(heads, 1, groups),
        }
