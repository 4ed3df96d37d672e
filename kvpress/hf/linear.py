# SPDX-License-Identifier: Apache-2.0
"""Linear layers of bfloat16 models on processors without bfloat16 instructions."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvpress.cache.matmul import has_bfloat16

ROWS = 6
"""Fewest rows that are multiplied in float32: the weights are converted at every call."""
BLOCK = 2**20
"""Most weights that are converted at a time: a float32 copy of a large layer would be slow to allocate."""


def speed_up(model: nn.Module) -> None:
    """Make linear layers of a bfloat16 model on such a CPU multiply in float32.

    On AVX2, 8 rows are then up to twice as fast, and 512 rows 5 to 7 times (`benchmarks.linear`). The products are rounded to
    bfloat16 afterwards, as the slow ones are: they too are summed in float32. Passes of fewer rows, such as decode steps of one
    row, stay as they are. Layers on other devices, in other dtypes and with a forward that was replaced are left alone.
    Copies of the model multiply in float32, too.
    """
    if has_bfloat16():
        return
    for module in model.modules():
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        if module.weight.dtype == torch.bfloat16 and module.weight.device.type == "cpu":
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    if inputs.numel() // inputs.shape[-1] < ROWS or inputs.dtype != torch.bfloat16:
        return functional.linear(inputs, layer.weight, layer.bias)
    exact, step = inputs.float(), max(1, BLOCK // layer.in_features)
    weights = layer.weight.split(step)
    biases = [None] * len(weights) if layer.bias is None else [bias.float() for bias in layer.bias.split(step)]
    blocks = [
        functional.linear(exact, weight.float(), bias).to(inputs.dtype)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)
