# SPDX-License-Identifier: Apache-2.0
"""Dense weights of linear layers, also of layers that store them in another form (quantised, packed, with adapters)."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

UNITS = 1024
"""Unit vectors that a layer is applied to at a time."""
DENSE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of weights that are read as they are; numbers of 8 bits come with scales."""


def plain_weight(layer: nn.Module | None) -> Tensor | None:
    """Return the weight `[out, in]` of an unquantised `nn.Linear`, not a copy; None for any other layer.

    Under tensor parallel, it has the rows or columns of this rank. Subclasses count as other layers, since their product need
    not be that of their `weight`: those with adapters or with scales of 8-bit floats have one that is incomplete.
    """
    from torch.distributed.tensor import DTensor  # takes a second to import, which a press alone does not need

    weight = layer.weight if type(layer) is nn.Linear else None
    if weight is None or weight.is_meta or weight.dtype not in DENSE:
        return None
    if isinstance(weight, DTensor):
        return weight.to_local()
    return weight if type(weight) in (Tensor, nn.Parameter) else None


@torch.no_grad()
def dense_weight(layer: nn.Module, inputs: int, like: Tensor) -> Tensor:
    """Return the weight `[out, inputs]` of a linear layer: its own if it is plain, else its products with unit vectors.

    A weight from products has the type of `like`, and is on the device of the layer. It is a copy of the whole matrix, made at
    each call. The bias is taken off.

    Args:
        layer: the layer.
        inputs: channels that it reads.
        like: a tensor in the type of its inputs.

    Raises:
        ValueError: the layer does not read vectors of `inputs` channels.
    """
    if (weight := plain_weight(layer)) is not None:
        if weight.shape[1] != inputs:
            raise ValueError(f"{type(layer).__name__} reads vectors of {weight.shape[1]} channels, not of {inputs}")
        return weight.detach()
    device = device_of(layer, like.device)

    def apply(vectors: Tensor) -> Tensor:
        try:
            outputs: Any = layer(vectors[None])
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ValueError(f"{type(layer).__name__} does not read vectors of {inputs} channels: {error}") from error
        rows: Tensor = outputs[0].float()
        return rows

    pair = torch.zeros(2, inputs, dtype=like.dtype, device=device)
    pair[0, 0], pair[1, 0] = 1, -1
    bias = apply(pair).mean(dim=0)  # not the product of zeros, which a layer that scales its inputs would divide by 0
    columns = []
    for start in range(0, inputs, UNITS):
        units = torch.zeros(min(UNITS, inputs - start), inputs, dtype=like.dtype, device=device)
        units.diagonal(start).fill_(1)
        columns.append((apply(units) - bias).to(like.dtype))
    return torch.cat(columns).T


def device_of(module: nn.Module, default: torch.device) -> torch.device:
    """Return the device of a module's weights, packed ones included; `default` without any, or if they are offloaded."""
    tensor = next(chain(module.parameters(), module.buffers()), None)
    return default if tensor is None or tensor.is_meta else tensor.device


@torch.no_grad()
def embedding_of(model: Any) -> Tensor:
    """Return the embedding `[1, 1, hidden]` of the first token of the vocabulary, in the form that the layers read."""
    table = model.get_input_embeddings()
    embedding: Tensor = table(torch.zeros(1, 1, dtype=torch.long, device=device_of(table, model.device)))
    return embedding


def multiplied_weights(model: Any) -> int:
    """Return the number of weights that a token is multiplied with, without the table of embeddings.

    Packed layers count by the channels that they read and return. Tied embeddings count once.
    """
    table = model.get_input_embeddings()
    seen, count = {id(parameter) for parameter in table.parameters()}, 0
    for module in model.modules():
        if module is table:
            continue
        own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) not in seen}
        seen.update(own)
        inputs, outputs = (getattr(module, name, None) for name in ("in_features", "out_features"))
        if plain_weight(module) is None and isinstance(inputs, int) and isinstance(outputs, int):
            count += 0 if list(module.children()) else inputs * outputs  # a layer with adapters counts by its base
        else:
            count += sum(own.values())
    return count
