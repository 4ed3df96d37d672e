# SPDX-License-Identifier: Apache-2.0
"""Hadamard matrix of codecs: the same for every head, so that it is not stored."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
@torch.inference_mode(False)
def hadamard(dim: int, device: torch.device, limit: int = 2**30) -> Tensor:
    """Return an orthonormal, symmetric matrix, float32 [D, D], that spreads one channel evenly over many.

    It consists of blocks; their size is the largest power of two that divides D, at most `limit`.
    """
    size = dim & -dim
    while size > limit:
        size //= 2
    block = torch.ones(1, 1)
    while len(block) < size:
        block = torch.kron(block, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return torch.kron(torch.eye(dim // size), block / size**0.5).to(device)
