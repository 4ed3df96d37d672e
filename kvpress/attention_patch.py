# SPDX-License-Identifier: Apache-2.0
"""Names of NVIDIA kvpress' attention patch; nothing is patched here, because what heads evict is freed, not hidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["attention_patch", "check_masked_key_indices_support", "patch_attention_functions", "search_hyperplane"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def patch_attention_functions() -> None:
    """Do nothing: inside `with press(model)`, what is marked in `module.masked_key_indices` is freed by the session."""


def attention_patch(func: FunctionT) -> FunctionT:
    """Return an attention function as it is; see `patch_attention_functions`."""
    return func


def check_masked_key_indices_support(module: nn.Module) -> None:
    """Do nothing: heads may keep different numbers of pairs under any attention implementation, eager included."""
    del module


def search_hyperplane(X: Tensor, max_iter: int = 1000) -> Tensor:
    """Return keys `[B, D]` that no query of `X [B, n, D]` attends to: all logits are far below 0.

    A perceptron looks for a direction y with x . y > 0 for all queries x of a row, in `max_iter` steps; the key is
    -1e5 y / ||y||^2.

    Raises:
        ValueError: none was found; the queries of a row may lie around 0, so that there is none.
    """
    direction = X.mean(dim=1)
    for _ in range(max_iter):
        wrong = (torch.einsum("bnd,bd->bn", X, direction) <= 0).to(X.dtype)
        if not bool(wrong.any()):
            return -1e5 * direction / direction.square().sum(dim=-1, keepdim=True)
        missed = torch.einsum("bnd,bn->bd", X, wrong) / wrong.sum(dim=1, keepdim=True).clamp_min(1)
        direction = direction + missed
    raise ValueError(
        f"no direction was found in max_iter={max_iter} steps that all queries of a row lie on one side of"
    )
