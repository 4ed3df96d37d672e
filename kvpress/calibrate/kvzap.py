# SPDX-License-Identifier: Apache-2.0
"""Networks that predict what a repetition of the text finds a pair worth, the surrogates of `kvzap`."""

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
LEAST = torch.finfo(torch.float32).tiny
"""What a weight of zero counts as, since its logarithm is asked for."""


@dataclass(frozen=True)
class KVzapSettings(Predicted):
    """Surrogates of KVzip+: networks that predict log scores from hidden states, for `kvzap`.

        target[h, t] = log max over i and the group of a_it ||W_o v_t|| / ||x_i||,   i in the second reading

    `kind` is `mlp`, one hidden layer of `width` units that AdamW trains to the least squared error, the learning rate falling
    like a cosine; or `linear`, a ridge regression, which takes no steps. A layer gives the tensors `0.weight`, `0.bias`,
    `2.weight` and `2.bias`, or `weight` and `bias`, float32.

    Paper: Jegou & Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, 2026, arXiv:2601.07891.
    Differs from the paper: the text is read again without a request to repeat it; hidden states and targets are
    standardised for the training, which the written weights take in; every layer is trained by itself.
    """

    method: ClassVar[str] = METHOD
    plus: ClassVar[bool] = True

    sample: Count = 500
    steps: Count = 2000
    lr: Positive = 5e-3
    kind: Literal["linear", "mlp"] = "mlp"
    width: Count = 512

    def train(self, hidden: Tensor, scores: Tensor, groups: int, generator: torch.Generator) -> dict[str, Tensor]:
        del groups
        wanted = scores.clamp_min(LEAST).log()
        return ridge(hidden, wanted) if self.kind == "linear" else self.perceptron(hidden, wanted, generator)

    @torch.enable_grad()
    def perceptron(self, hidden: Tensor, wanted: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return a network of one hidden layer that predicts `wanted [n, H]`."""
        (mean, scale), (centre, spread) = standard(hidden), standard(wanted)
        inputs, targets = (hidden - mean) / scale, (wanted - centre) / spread
        first, last = nn.Linear(inputs.shape[1], self.width), nn.Linear(self.width, targets.shape[1])
        for layer in (first, last):
            bound = layer.in_features**-0.5
            for part in (layer.weight, layer.bias):
                nn.init.uniform_(part, -bound, bound, generator=generator)
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
    """Mean and standard deviation of columns `[n, d]`; 1 for those that do not vary."""
    spread = numbers.std(dim=0, correction=0)
    return numbers.mean(dim=0), torch.where(spread > 0, spread, torch.ones_like(spread))


def ridge(inputs: Tensor, wanted: Tensor, price: float = 1.0) -> dict[str, Tensor]:
    """Linear regression with a price on squared weights, none on the bias."""
    x, y = inputs.double(), wanted.double()
    mean, centre = x.mean(dim=0), y.mean(dim=0)
    squares = (x - mean).T @ (x - mean) + price * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weight = torch.linalg.solve(squares, (x - mean).T @ (y - centre)).T
    return {"weight": weight.float(), "bias": (centre - weight @ mean).float()}
