# SPDX-License-Identifier: Apache-2.0
"""Argument checks that operators share; every message names the expected and the actual value."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def shape(name: str, tensor: Tensor, expected: tuple[int | str, ...], *dtypes: torch.dtype) -> None:
    """Refuse a tensor of another shape or dtype; a string in ``expected`` names a free size."""
    if tensor.dtype in dtypes and tensor.dim() == len(expected):
        actual = tensor.shape
        if actual == expected or all([s == n or type(s) is str for s, n in zip(expected, actual, strict=True)]):
            return
    kinds = "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    sizes = ", ".join(map(str, expected))
    got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    raise ValueError(f"{name} must be {kinds} [{sizes}], got {got}")


def rows_layout(name: str, tensor: Tensor) -> None:
    """Refuse rows whose elements are not contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def contiguous(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def same_device(q: Tensor, *others: Tensor | None) -> None:
    """Refuse tensors on different devices: a kernel would read an address of another device."""
    device = q.device
    for tensor in others:
        if tensor is not None and tensor.device != device:
            raise ValueError(f"all tensors must be on {device} like q, got one on {tensor.device}")
