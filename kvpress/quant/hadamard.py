# SPDX-License-Identifier: Apache-2.0
"""The Hadamard matrix that codecs rotate by: the same for every head, so that nothing is held of it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
@torch.inference_mode(False)
def hadamard(dim: int, device: torch.device, most: int = 2**30) -> Tensor:
    """Return an orthonormal, symmetric matrix, float32 [D, D], that spreads what is in one channel over many evenly.

    It is made of blocks of the largest power of two that divides D, at most `most` channels.
    """
    size = dim & -dim
    while size > most:
        size //= 2
    block = torch.ones(1, 1)
    while len(block) < size:
        block = torch.kron(block, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return torch.kron(torch.eye(dim // size), block / size**0.5).to(device)
