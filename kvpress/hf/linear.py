# SPDX-License-Identifier: Apache-2.0
"""Linear layers of bfloat16 models on processors without bfloat16 instructions."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvpress.cache.matmul import has_bfloat16

ROWS = 8
"""Fewest rows that are multiplied in float32: the weights are converted at every call."""


def speed_up(model: nn.Module) -> None:
    """Make linear layers of a bfloat16 model on such a CPU multiply in float32, which is about 6 times faster on AVX2.

    The products are rounded to bfloat16 afterwards, as the slow ones are: they too are summed in float32. Passes of fewer than
    8 rows, such as decode steps, stay as they are. Models on other devices and in other dtypes are left alone. Copies of the
    model multiply in float32, too.
    """
    if has_bfloat16():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.bfloat16 and module.weight.device.type == "cpu":
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    if inputs.numel() // inputs.shape[-1] < ROWS:
        return functional.linear(inputs, layer.weight, layer.bias)
    bias = None if layer.bias is None else layer.bias.float()
    return functional.linear(inputs.float(), layer.weight.float(), bias).to(inputs.dtype)
