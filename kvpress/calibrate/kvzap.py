# SPDX-License-Identifier: Apache-2.0
"""Calibration of `kvzap`: networks that predict the KVzip+ scores of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from kvpress.calibrate.repeated import Predicted
from kvpress.core.checks import Count, Positive
from kvpress.presses.kvzap import METHOD

BATCH = 512
"""Tokens in an update."""
CLIP = 1.0
"""Largest gradient of a weight."""
SMALLEST = torch.finfo(torch.float32).tiny
"""Lower limit of a score before its logarithm."""


@dataclass(frozen=True)
class KVzapSettings(Predicted):
    """Networks that predict the logarithm of KVzip+ scores from hidden states, for `kvzap`.

        target[h, t] = log max over i and the group of a_it ||W_o v_t|| / ||x_i||,   i in the second reading

    `kind` is `mlp`, with one hidden layer of `width` units, trained by AdamW on the squared error with a cosine schedule; or
    `linear`, a ridge regression without training steps. A layer gives the tensors `0.weight`, `0.bias`, `2.weight` and
    `2.bias`, or `weight` and `bias`, float32.

    Paper: Jegou & Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, 2026, arXiv:2601.07891.
    Differs from the paper: the text is read again without a request to repeat it; hidden states and targets are
    standardised for training, and the weights are rescaled afterwards; every layer is trained separately.
    """

    method: ClassVar[str] = METHOD
    plus: ClassVar[bool] = True

    sample: Count = 500
    steps: Count = 2000
    lr: Positive = 5e-3
    kind: Literal["linear", "mlp"] = "mlp"
    """A network with one hidden layer, or a ridge regression."""
    width: Count = 512
    """Units of the hidden layer of an `mlp`."""

    def train(self, hidden: Tensor, scores: Tensor, groups: int, generator: torch.Generator) -> dict[str, Tensor]:
        del groups
        targets = scores.clamp_min(SMALLEST).log()
        return ridge(hidden, targets) if self.kind == "linear" else self.perceptron(hidden, targets, generator)

    @torch.enable_grad()
    def perceptron(self, hidden: Tensor, scores: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tensors of a network with one hidden layer that predicts `scores [n, H]`."""
        (mean, scale), (centre, spread) = standard(hidden), standard(scores)
        inputs, targets = (hidden - mean) / scale, (scores - centre) / spread
        first, last = nn.Linear(inputs.shape[1], self.width), nn.Linear(self.width, targets.shape[1])
        for layer in (first, last):
            bound = layer.in_features**-0.5
            for parameter in (layer.weight, layer.bias):
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
        network = nn.Sequential(first, nn.GELU(), last).to(inputs.device)
        optimiser = torch.optim.AdamW(network.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.steps)
        for _ in range(self.steps):
            batch = torch.randint(len(inputs), (BATCH,), generator=generator).to(inputs.device)
            optimiser.zero_grad()
            mse_loss(network(inputs[batch]), targets[batch]).backward()
            nn.utils.clip_grad_value_(network.parameters(), CLIP)
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            first.weight.div_(scale)
            first.bias.sub_(first.weight @ mean)
            last.weight.mul_(spread[:, None])
            last.bias.mul_(spread).add_(centre)
        return {name: tensor.detach() for name, tensor in network.state_dict().items()}


def standard(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation `[d]` of the columns of `numbers [n, d]`; the deviation of a constant is 1."""
    spread = numbers.std(dim=0, correction=0)
    return numbers.mean(dim=0), torch.where(spread > 0, spread, torch.ones_like(spread))


def ridge(inputs: Tensor, targets: Tensor, price: float = 1.0) -> dict[str, Tensor]:
    """Return weight and bias of a ridge regression, with `price` on squared weights and none on the bias."""
    x, y = inputs.double(), targets.double()
    mean, centre = x.mean(dim=0), y.mean(dim=0)
    squares = (x - mean).T @ (x - mean) + price * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weight = torch.linalg.solve(squares, (x - mean).T @ (y - centre)).T
    return {"weight": weight.float(), "bias": (centre - weight @ mean).float()}
